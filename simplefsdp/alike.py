"""Whether the data-parallel ranks were given the same model.

Owns the comparison of parameters between ranks when a model is wrapped. Different shapes would abort in the first
collective or hang it; different values, as from a seed of its own on each rank, would give a model pieced together from
several, or replicas that train apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _compat
from .ranks import digest, extremes, first_difference

__all__ = ["check_alike"]

_SAMPLE = 1024
"""Elements of each parameter that are compared: enough to tell seeds apart, and no time for models of any size."""


def check_alike(parameters: Sequence[tuple[str, torch.Tensor]], mesh: DeviceMesh) -> None:
    """Compare parameters with the other ranks of the mesh: two small all-reduces for each of its dims.

    Args:
        parameters: names and parameters, whole, before they are sharded.
        mesh: the data-parallel mesh; every rank of it calls.

    Raises:
        RuntimeError: another rank has other names, shapes or dtypes; names the first difference. Raised on every rank.

    Warns:
        RuntimeWarning: values differ. Whoever loads a checkpoint later can ignore it.
    """
    if _compat.in_dispatch_mode():
        return  # fake tensors, or one process that plays all ranks
    shapes = [
        f"'{name}' {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in parameters
    ]
    ((lowest, highest),) = extremes([digest(shapes)], mesh)
    if lowest != highest:
        position, here = first_difference(shapes, mesh)
        raise RuntimeError(
            f"ranks have different models; parameter {position} is {here}. Every rank has to build the same model"
        )
    sums = extremes([_sample(param) for _, param in parameters], mesh)
    different = [name for (name, _), (low, high) in zip(parameters, sums, strict=True) if low != high]
    if different:
        warnings.warn(
            f"ranks hold different values of {len(different)} parameters, '{different[0]}' first: sharding makes one "
            "model of parts of theirs, and replicas train apart. Set the same seed on every rank before the model is "
            "built, or initialise inside sharded_parameters(model); ignore this if weights are loaded afterwards",
            RuntimeWarning,
            stacklevel=3,
        )


def _sample(param: torch.Tensor) -> int:
    """The sum of some of a tensor's bytes; 0 where there are none."""
    local = _compat.local_tensor(param) if isinstance(param, DTensor) else param
    if (
        local.device.type == "meta"
        or local.numel() == 0
        or type(local) not in (torch.Tensor, torch.nn.Parameter)
    ):
        return 0
    flat = local.detach().flatten()
    some = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].resolve_conj().resolve_neg().contiguous()
    return int(some.view(torch.uint8).sum(dtype=torch.int64))
