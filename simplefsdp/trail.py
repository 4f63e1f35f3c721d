"""The order in which a rank reads parameters and reduces gradients, and the comparison of it between ranks.

Collectives pair up by order alone: a rank that reads parameter a where another reads b of the same shape would train on
wrong values without an error. What is noted until the first optimizer step, where ranks compare it:

    eager mode     every read and every reduction, in order
    compiled code  the first read of each parameter, when Dynamo traces it: no collective in the graph, no guard, and
                   cached code is traced all the same. Equal blocks share code, which the first of them traces
    both           which parameters have a gradient

A model that no optimizer steps (one for inference, a teacher) is noted up to a number of entries.

Ranks may differ in what they compile, recompile or run eagerly, as long as parameters are first read in one order. That
holds without buckets: where the passes bucket, ranks must also plan alike, which this does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from .ranks import digest, extremes, first_difference

__all__ = ["Trail"]


MOST_STEPS = 20_000
"""What is noted at most: ranks that do the same stop at the same place."""


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
        self.first_reads[slot.fqn] = None
        if self._note(f"gather of '{slot.fqn}'") and full.requires_grad:
            full.register_hook(self._reduction_of(slot))

    def record_traced(self, slot: _Named) -> None:
        """Note that code which reads the parameter is being compiled."""
        self.first_reads[slot.fqn] = None
        self.traced = True

    def _reduction_of(self, slot: _Named) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self._note(f"reduction of '{slot.fqn}'")

        return note

    def _note(self, step: str) -> bool:
        """Note a step if there is room; whether there was."""
        if len(self.steps) == MOST_STEPS:
            return False
        self.steps.append(step)
        return True

    def check_equal(self, mesh: DeviceMesh, with_gradient: Iterable[str]) -> None:
        """Compare with the other ranks of the mesh: one all-reduce of 48 bytes for each of its dims.

        Args:
            mesh: the data-parallel mesh; every rank of it calls.
            with_gradient: names of the parameters that have a gradient on this rank.

        Raises:
            RuntimeError: another rank did something else; names the first difference. Raised on every rank.
        """
        used = [f"gather of '{name}'" for name in self.first_reads]
        used += [f"gradient of '{name}'" for name in with_gradient]
        steps, reads, traced = extremes([digest(self.steps), digest(used), int(self.traced)], mesh)
        compared = [(reads, used)] if traced != (0, 0) else [(steps, self.steps), (reads, used)]
        for (lowest, highest), lines in compared:
            if lowest != highest:
                position, here = first_difference(lines, mesh)
                raise RuntimeError(
                    "ranks use parameters in different orders, so their collectives did not match and gradients are "
                    f"wrong; use {position} was {here}. Every rank has to run the same forward and backward"
                )
