"""Which part of a full tensor a rank holds, and how to write it there without communication.

Owns: the arithmetic between a parameter's full shape and its local shard. Must not know: models, files,
wrapping. A plain tensor is a shard that covers everything.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def local_tensor(param: Tensor) -> Tensor:
    """The memory this rank holds for ``param``: its shard of a DTensor, otherwise all of it (detached)."""
    if isinstance(param, DTensor):
        with torch.no_grad():
            return param.to_local()
    return param.detach()


def local_slices(param: Tensor) -> tuple[slice, ...] | None:
    """Where this rank's shard of ``param`` lies in the full tensor.

    Follows DTensor's rule: mesh dimensions split in order, each into ``ceil(n / size)`` rows per rank, the
    last ranks getting fewer or none.

    Args:
        param: plain tensor or DTensor.

    Returns:
        One slice per tensor dimension; ``None`` if a placement is neither ``Shard`` nor ``Replicate``
        (strided shards interleave, so no slice describes them).
    """
    bounds = [(0, size) for size in param.shape]
    if isinstance(param, DTensor):
        for mesh_dim, placement in enumerate(param.placements):
            if type(placement) is Shard:
                start, stop = bounds[placement.dim]
                rows = -(-(stop - start) // param.device_mesh.size(mesh_dim))
                first = min(start + rows * param.device_mesh.get_local_rank(mesh_dim), stop)
                bounds[placement.dim] = (first, min(first + rows, stop))
            elif type(placement) is not Replicate:
                return None
    return tuple(slice(start, stop) for start, stop in bounds)


@torch.no_grad()
def copy_full_(param: Tensor, full: Tensor) -> None:
    """Write ``full`` into ``param``; every rank keeps its own part and nothing is sent.

    Args:
        param: plain tensor or DTensor, written in place; keeps its dtype and device.
        full: plain tensor of ``param``'s global shape, equal on all ranks of the mesh.
    """
    if isinstance(param, DTensor):
        replicated = [Replicate()] * param.device_mesh.ndim
        whole = DTensor.from_local(full, param.device_mesh, replicated, run_check=False)
        full = whole.redistribute(placements=param.placements).to_local()
    local_tensor(param).copy_(full)
