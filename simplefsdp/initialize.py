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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _compat
from .parametrize import raw_reads
from .placement import local_part

__all__ = ["sharded_parameters"]

_aten = torch.ops.aten
_IN_PLACE = frozenset(
    (
        _aten.normal_,
        _aten.uniform_,
        _aten.exponential_,
        _aten.cauchy_,
        _aten.log_normal_,
        _aten.geometric_,
        _aten.bernoulli_,
        _aten.random_,
    )
)
_LIKE = {_aten.rand_like: _aten.uniform_.default, _aten.randn_like: _aten.normal_.default}


@contextlib.contextmanager
def sharded_parameters(module: nn.Module) -> Iterator[None]:
    """Attribute reads give the sharded DTensors, for initialisation code; contexts nest.

    Random ops (`nn.init.normal_`, `trunc_normal_`, `kaiming_uniform_`, `tensor.uniform_`, `torch.randn_like`, ...)
    give exactly the values of the unsharded model for the same seed, on any number of ranks. Where ranks were seeded
    differently, all use the random state of the mesh's first rank, so that replicas agree. This does not hold for
    what DTensor cannot compute (`nn.init.orthogonal_`), nor where the unsharded initialisation would draw on another
    device than the mesh's.

    Args:
        module: a module that holds wrapped modules.
    """
    with raw_reads(module), _SameNumbersOnAllRanks():
        yield


class _SameNumbersOnAllRanks(_compat.TorchDispatchMode):
    """Replaces random ops on DTensors by a draw of the whole tensor and a copy of this rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[DeviceMesh] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if not args or not isinstance(args[0], DTensor):
            return func(*args, **kwargs)
        if packet is _aten._local_scalar_dense:
            # torch 2.11 to 2.14: the number that rejection sampling loops on is a rank's own, not the sum over ranks.
            return args[0].full_tensor().item()
        if packet in _IN_PLACE:
            self._draw(args[0], func, *args[1:], **kwargs)
            return args[0]
        if packet in _LIKE:
            target = _aten.empty_like.default(*args, **{k: v for k, v in kwargs.items() if k != "generator"})
            self._draw(target, _LIKE[packet])
            return target
        return func(*args, **kwargs)

    def _draw(self, target: DTensor, op: Any, *args: Any, **kwargs: Any) -> None:
        local = _compat.local_tensor(target)
        if local.is_meta:
            return
        if kwargs.get("generator") is None:
            self._sync_random_state(target.device_mesh, local.device)
        whole = torch.empty(target.shape, dtype=local.dtype, device=local.device)
        op(whole, *args, **kwargs)
        local.copy_(local_part(whole, target.device_mesh, target.placements))

    def _sync_random_state(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Take over the random state of the mesh's first rank, once per context and mesh."""
        if any(mesh is known for known in self.synced):
            return
        self.synced.append(mesh)
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        wire = state.to(device)
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                dist.broadcast(wire, group=mesh.get_group(dim), group_src=0)
        if device.type == "cuda":
            torch.cuda.set_rng_state(wire.cpu(), device)
        else:
            torch.set_rng_state(wire.cpu())
