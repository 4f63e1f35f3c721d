"""The order in which a rank reads parameters and reduces gradients, and the comparison of it between ranks.

Collectives pair up by order alone: a rank that reads parameter a where another reads b of the same shape would train on
wrong values without an error. What is noted until the first optimizer step, where ranks compare it:

    eager mode     every read and every reduction, in order
    compiled code  the first read of each parameter, when Dynamo traces it: no collective in the graph, no guard, and
                   cached code is traced all the same. Equal blocks share code, which the first of them traces
    both           which parameters have a gradient

Ranks may differ in what they compile, recompile or run eagerly, as long as parameters are first read in one order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _compat

__all__ = ["Trail"]

_DIGEST_BYTES = 7
"""Of a digest that is compared: a non-negative int64, whose negative is one too."""


class _Named(Protocol):
    fqn: str


class Trail:
    """Names of the parameters that this rank has gathered and reduced, in order."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.first_reads: dict[str, None] = {}
        self.traced = False

    def record(self, slot: _Named, full: torch.Tensor) -> None:
        """Note a read, and have its reduction noted when the gradient arrives."""
        self.steps.append(f"gather of '{slot.fqn}'")
        self.first_reads[slot.fqn] = None
        if full.requires_grad:
            full.register_hook(self._reduction_of(slot))

    def record_traced(self, slot: _Named) -> None:
        """Note that code which reads the parameter is being compiled."""
        self.first_reads[slot.fqn] = None
        self.traced = True

    def _reduction_of(self, slot: _Named) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self.steps.append(f"reduction of '{slot.fqn}'")

        return note

    def check_equal(self, mesh: DeviceMesh, with_gradient: Iterable[str]) -> None:
        """Compare with the other ranks of the mesh: one all-reduce of 40 bytes for each of its dims.

        Args:
            mesh: the data-parallel mesh; every rank of it calls.
            with_gradient: names of the parameters that have a gradient on this rank.

        Raises:
            RuntimeError: another rank did something else; names the first difference. Raised on every rank.
        """
        used = [f"gather of '{name}'" for name in self.first_reads]
        used += [f"gradient of '{name}'" for name in with_gradient]
        numbers = [_digest(self.steps), _digest(used)]
        local = torch.tensor([*numbers, *(-n for n in numbers), int(self.traced)], device=mesh.device_type)
        # Reduced over one dim after the other, so that all ranks come to the same conclusion.
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                local = _compat.all_reduce(local, "max", mesh.get_group(dim).group_name)
        steps_most, used_most, steps_least, used_least, traced = local.tolist()
        if not traced and steps_most != -steps_least:
            _report(self.steps, mesh)
        if used_most != -used_least:
            _report(used, mesh)


def _digest(steps: list[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(steps).encode()).digest()[:_DIGEST_BYTES], "big")


def _report(steps: list[str], mesh: DeviceMesh) -> None:
    """Raise with the first difference between the ranks of the mesh."""
    trails = {dist.get_rank(): steps}
    for dim in range(mesh.ndim):
        gathered: list[dict[int, list[str]]] = [{} for _ in range(mesh.size(dim))]
        dist.all_gather_object(gathered, trails, group=mesh.get_group(dim))
        trails = {rank: trail for part in gathered for rank, trail in part.items()}
    for position in range(max(map(len, trails.values()))):
        at = {
            rank: trail[position] if position < len(trail) else "nothing"
            for rank, trail in sorted(trails.items())
        }
        if len(set(at.values())) > 1:
            here = ", ".join(f"rank {rank}: {step}" for rank, step in at.items())
            raise RuntimeError(
                "ranks use parameters in different orders, so their collectives did not match and gradients are "
                f"wrong; use {position} was {here}. Every rank has to run the same forward and backward"
            )
