"""The order in which a rank reads parameters and reduces gradients, and the comparison of it between ranks.

Collectives pair up by order alone: a rank that reads parameter a where another reads b of the same shape would train on
wrong values without an error. Eager mode notes the order up to the first optimizer step, where ranks compare it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _compat

__all__ = ["Trail"]


class _Named(Protocol):
    fqn: str


class Trail:
    """Names of the parameters that this rank has gathered and reduced, in order."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def record(self, slot: _Named, full: torch.Tensor) -> None:
        """Note a read, and have its reduction noted when the gradient arrives."""
        self.steps.append(f"gather of '{slot.fqn}'")
        if full.requires_grad:
            full.register_hook(self._reduction_of(slot))

    def _reduction_of(self, slot: _Named) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self.steps.append(f"reduction of '{slot.fqn}'")

        return note

    def check_equal(self, mesh: DeviceMesh) -> None:
        """Compare with the other ranks of the mesh: one all-reduce of 16 bytes for each of its dims.

        Raises:
            RuntimeError: another rank did something else; names the first difference.
        """
        digest = hashlib.sha256("\n".join(self.steps).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        for dim in range(mesh.ndim):
            if mesh.size(dim) == 1:
                continue
            group = mesh.get_group(dim)
            extremes = torch.tensor([number, -number], device=mesh.device_type)
            largest, smallest = _compat.all_reduce(extremes, "max", group.group_name).tolist()
            if largest != -smallest:
                self._report(group)

    def _report(self, group: dist.ProcessGroup) -> None:
        trails: list[list[str]] = [[] for _ in range(group.size())]
        dist.all_gather_object(trails, self.steps, group=group)
        for position in range(max(map(len, trails))):
            steps = [trail[position] if position < len(trail) else "nothing" for trail in trails]
            if len(set(steps)) > 1:
                here = ", ".join(f"rank {dist.get_global_rank(group, r)}: {s}" for r, s in enumerate(steps))
                raise RuntimeError(
                    "ranks use parameters in different orders, so their collectives did not match and gradients are "
                    f"wrong; collective {position} was {here}. Every rank has to run the same forward and backward"
                )
