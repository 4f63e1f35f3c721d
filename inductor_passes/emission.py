"""Put nodes in a new order, one by one, each after what it reads.

It owns the order. It must not know what a node is: FX nodes and scheduler nodes both go through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from inductor_passes.verify import VerificationError

Node = TypeVar("Node")


class Emission(Generic[Node]):
    """Places nodes in order.

    A held node is placed when it is released. Any other node is placed just before the first node that reads it, or
    with `release_readers`, or by `finish`.

    Args:
        inputs_of: what a node reads.
        held: nodes to place only when they are released.
        placed: nodes that stand in front, in this order.
    """

    def __init__(
        self,
        inputs_of: Callable[[Node], Iterable[Node]],
        held: Iterable[Node],
        placed: Iterable[Node] = (),
    ) -> None:
        self._inputs_of = inputs_of
        self._held = set(held)
        self.order = list(placed)
        self._placed = set(self.order)

    def hold(self, nodes: Iterable[Node]) -> None:
        """Add nodes that wait for their release."""
        self._held.update(nodes)

    def release(self, nodes: Iterable[Node]) -> None:
        """Place nodes now, in this order, after whatever they read.

        Raises:
            VerificationError: one of them reads a node that is still held.
        """
        for node in nodes:
            stack = [node]
            while stack:
                current = stack[-1]
                missing = [source for source in self._inputs_of(current) if source not in self._placed]
                for source in missing:
                    if source in self._held:
                        raise VerificationError(f"{node} needs {source} before the plan has it")
                if missing and current not in self._placed:
                    stack += reversed(missing)
                    continue
                stack.pop()
                if current not in self._placed:
                    self._placed.add(current)
                    self.order.append(current)

    def release_readers(
        self,
        nodes: Iterable[Node],
        users_of: Mapping[Node, Iterable[Node]] | Callable[[Node], Iterable[Node]],
    ) -> None:
        """Place all nodes that are not held and read nothing but placed ones, starting from these nodes' readers.

        What unpacks a reduced gradient is cheap and frees the buffer it came in.
        """
        users = users_of if callable(users_of) else users_of.__getitem__
        pending = list(nodes)[::-1]
        while pending:
            for user in users(pending.pop()):
                free = user not in self._held and user not in self._placed
                if free and all(source in self._placed for source in self._inputs_of(user)):
                    self.release([user])
                    pending.append(user)

    def finish(self, nodes: Iterable[Node]) -> list[Node]:
        """Place those of the nodes that nobody asked for; the whole order."""
        self.release(node for node in nodes if node not in self._placed)
        return self.order
