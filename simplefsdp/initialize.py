"""Initialising sharded parameters so that they get the values of the unsharded model.

`with sharded_parameters(model): model.init_weights()` runs initialisation code on the shards. Random in-place ops on a
sharded parameter draw the whole tensor's numbers on every rank, from one random state, and keep this rank's shard: the
result does not depend on the number of ranks or the sharding. One whole parameter at a time is in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from . import _compat
from .parametrize import Slot, raw_reads, slots_of
from .placement import shard_of

__all__ = ["sharded_parameters"]

# In-place ops that draw from a generator; out-of-place ones on DTensors stay torch's business.
_RANDOM_OPS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "normal_",
        "uniform_",
        "exponential_",
        "cauchy_",
        "log_normal_",
        "geometric_",
        "bernoulli_",
        "random_",
    )
)


@contextlib.contextmanager
def sharded_parameters(module: nn.Module) -> Iterator[None]:
    """Attribute reads give the sharded DTensors, for initialisation code; contexts nest.

    Random in-place ops on whole sharded parameters (`nn.init.normal_`, `trunc_normal_`, `uniform_`, ...) give exactly
    the values of the unsharded model for the same seed, on any number of ranks. Where ranks were seeded differently,
    all use the random state of the shard group's first rank, so that replicas agree. Where this does not hold: ops that
    draw into a new tensor (`torch.randn_like`, `nn.init.orthogonal_`), tensor-parallel parameters,
    and models whose unsharded initialisation draws on another device than the mesh's.

    Args:
        module: a module that holds wrapped modules.
    """
    slots = {id(slot.param): slot for _, _, slot in slots_of(module)}
    with raw_reads(module), _SameNumbersOnAllRanks(slots):
        yield


class _SameNumbersOnAllRanks(TorchFunctionMode):
    """Replaces random in-place ops on sharded parameters by a draw of the whole tensor and a copy of the shard."""

    def __init__(self, slots: dict[int, Slot]) -> None:
        super().__init__()
        self.slots = slots
        self.synced: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        slot = self._find_slot(args[0]) if func in _RANDOM_OPS and args else None
        if slot is None:
            return func(*args, **kwargs)
        target: DTensor = args[0]
        local = _compat.local_tensor(target)
        if local.is_meta:
            return target
        if kwargs.get("generator") is None:
            self._sync_random_state(slot, local.device)
        with torch.no_grad():
            full = torch.empty(slot.spec.shape, dtype=local.dtype, device=local.device)
            func(full, *args[1:], **kwargs)
            local.copy_(shard_of(full, slot.spec, slot.shard_rank))
        return target

    def _find_slot(self, target: Any) -> Slot | None:
        if not isinstance(target, DTensor):
            return None
        slot = self.slots.get(id(target)) or getattr(target, "_simplefsdp_slot", None)
        return None if slot is None or slot.spec.tensor_parallel is not None else slot

    def _sync_random_state(self, slot: Slot, device: torch.device) -> None:
        """Take over the random state of the mesh's first rank, once per context and mesh."""
        if id(slot.mesh) in self.synced:
            return
        self.synced.add(id(slot.mesh))
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        wire = state.to(device)
        for dim in range(slot.mesh.ndim):
            group = slot.mesh.get_group(dim)
            if slot.mesh.size(dim) > 1:
                dist.broadcast(wire, group=group, group_src=0)
        if device.type == "cuda":
            torch.cuda.set_rng_state(wire.cpu(), device)
        else:
            torch.set_rng_state(wire.cpu())
