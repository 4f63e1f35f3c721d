"""The differentiable unshard: cast and all-gather forward; cast, reduce-scatter and all-reduce backward.

Works on plain local tensors and the constants of a ShardSpec, in eager mode and under torch.compile alike; knows
nothing about modules.

    forward    shard (r, ...) -> cast -> pad to (p, ...) -> all-gather (W*p, ...) -> narrow -> full (n, ...)
    backward   grad (n, ...)  -> cast -> pad to (W*p, ...) -> reduce-scatter (p, ...) -> narrow -> all-reduce -> cast

In hybrid sharding the reduce-scatter inside the shard group comes first, so that only a shard crosses between
replicas: F times fewer bytes than reducing the whole gradient. Gradients are means over all data-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate

from . import _compat
from .mesh import Group
from .placement import ShardSpec
from .policy import GradientSync

__all__ = ["gather", "reduce_gradient", "remember", "unshard", "unshard_in_graph"]


def unshard(
    shard: torch.Tensor,
    accumulator: torch.Tensor | None,
    spec: ShardSpec,
    sync: GradientSync,
    traced: str | None = None,
    context: str = "",
) -> torch.Tensor:
    """Gather a parameter for compute, differentiably.

    Args:
        shard: this rank's stored shard, a plain tensor.
        accumulator: None to send the fully reduced gradient to `shard`. Otherwise a leaf that takes the partly reduced
            gradient instead: of the unsharded shape for `GradientSync.NONE`, of the shard's for `SHARD_GROUP`.
        spec: the parameter's spec.
        sync: how far backward reduces; FULL exactly when `accumulator` is None.
        traced: what `remember` returned, used under torch.compile; None has Dynamo trace the autograd Function.
        context: what else the traced graph depends on: the passes that the tags name, the rank's place.

    Returns:
        A tensor of shape `spec.shape` and dtype `spec.compute_dtype`; a DTensor on the tensor-parallel mesh where the
        parameter came on one.
    """
    if not (spec.storage_dtype.is_floating_point or spec.storage_dtype.is_complex):
        full = gather(shard.detach(), spec)
    elif traced is not None and torch.compiler.is_compiling():
        full = unshard_in_graph(shard, accumulator, sync.value, traced, context)
    else:
        full = _Unshard.apply(shard, accumulator, spec, sync)
    tp = spec.tensor_parallel
    if tp is None:
        return full
    kwargs: dict[str, Any] = {}
    if _reduces_tensor_parallel(spec):
        kwargs["grad_placements"] = tuple(Partial() if p.is_replicate() else p for p in tp.placements)
    return DTensor.from_local(
        full, tp.mesh, tp.placements, run_check=False, shape=torch.Size(tp.shape), stride=tp.stride, **kwargs
    )


def gather(shard: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Cast and all-gather, without autograd.

    Returns:
        A tensor of shape `spec.shape` and dtype `spec.compute_dtype` that shares no memory with `shard`, unless nothing
        had to be cast or gathered.
    """
    shard = shard.to(spec.compute_dtype)
    if spec.gather_group is None:
        return shard
    dim, ranks, rows = _cut(spec)
    shard = _pad(shard, dim, rows)
    wire = _to_wire(shard.contiguous())
    out = _compat.all_gather(wire, spec.gather_group.name, ranks)
    out = _from_wire(out, spec.compute_dtype)
    if dim != 0:  # rank-major (W * d0, ..., p, ...) to (d0, ..., W * p, ...)
        out = out.view(ranks, *shard.shape).movedim(0, dim)
        out = out.reshape(*shard.shape[:dim], ranks * rows, *shard.shape[dim + 1 :])
    return _crop(out, dim, spec.shape[dim])


def reduce_gradient(
    grad: torch.Tensor, shard_shape: torch.Size, spec: ShardSpec, start: GradientSync, stop: GradientSync
) -> torch.Tensor:
    """Reduce a gradient from one stage to a later one.

    Args:
        grad: the unsharded gradient if `start` is NONE, the shard group's mean if it is SHARD_GROUP.
        shard_shape: shape of this rank's stored shard.
        spec: the parameter's spec.
        start: how far `grad` is reduced already.
        stop: how far to reduce it.

    Returns:
        The gradient: in `spec.storage_dtype` and of the shard's shape if `stop` is FULL, else in
        `spec.accumulate_dtype`, of the unsharded shape if `stop` is NONE and of the shard's if it is SHARD_GROUP.
    """
    if spec.storage_dtype.is_complex:
        grad = grad.resolve_conj()
    grad = grad.to(spec.reduce_dtype or grad.dtype)
    if start is GradientSync.NONE and stop is not GradientSync.NONE:
        if spec.gather_group is not None:
            grad = _reduce_scatter_mean(grad, shard_shape, spec)
        for group in spec.mean_groups:
            grad = _all_reduce_mean(grad, group)
    if stop is GradientSync.FULL:
        for group in spec.replica_groups:
            grad = _all_reduce_mean(grad, group)
    return grad.to(spec.storage_dtype if stop is GradientSync.FULL else spec.accumulate_dtype)


_SPECS: dict[str, ShardSpec] = {}
"""Specs by their text: calls in Dynamo's graphs can carry text, and no object of ours."""


def remember(spec: ShardSpec, shard_rank: int) -> str:
    """Text that stands for a spec in Dynamo's graphs: equal where all that the traced graph depends on is equal.

    torch keys a DTensor by its global shape. The text therefore also tells shards of different length apart, and
    places on a tensor-parallel mesh, of which DTensor may trace constants.

    Args:
        spec: the parameter's spec.
        shard_rank: this rank's position in the shard group.
    """
    text = f"{spec!r}, {spec.rows_of(shard_rank)} rows"
    if spec.tensor_parallel is not None:
        text += f" at {spec.tensor_parallel.mesh.get_coordinate()}"
    _SPECS[text] = spec
    return text


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def unshard_in_graph(
    shard: torch.Tensor, accumulator: torch.Tensor | None, sync: str, spec: str, context: str
) -> torch.Tensor:
    """The unshard as one call in Dynamo's graph, which AOTAutograd then traces through.

    Dynamo spends about 0.1 s of CPU time on each autograd Function that it traces itself. The text arguments are
    guarded, and they are part of the keys of torch's caches: they say all that the traced graph depends on, besides
    the tensors and the sources of this package.

    Args:
        shard: the stored shard.
        accumulator: as for `unshard`.
        sync: value of the `GradientSync`.
        spec: what `remember` returned.
        context: as for `unshard`.
    """
    return _Unshard.apply(shard, accumulator, _SPECS[spec], GradientSync(sync))


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, accumulator: torch.Tensor | None, spec: ShardSpec, sync: GradientSync
    ) -> torch.Tensor:
        ctx.spec, ctx.sync, ctx.to_accumulator = spec, sync, accumulator is not None
        ctx.shard_shape = shard.shape
        full = gather(shard, spec)
        # An input returned as it is would become an alias with a gradient of its own. In eager mode the output is a
        # view every time: autograd refuses in-place writes to a view that a Function returns, and such a write would
        # change the gathered copy without reaching the shards.
        return full.view_as(full) if full is shard or not torch.compiler.is_compiling() else full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        # nn.Embedding(sparse=True); Dynamo refuses to trace `layout`, and compiled gradients are dense.
        if not torch.compiler.is_compiling() and grad.layout != torch.strided:
            grad = grad.to_dense()
        grad = _sum_over_tensor_parallel(grad, ctx.spec)
        grad = reduce_gradient(grad, ctx.shard_shape, ctx.spec, GradientSync.NONE, ctx.sync)
        return (None, grad, None, None) if ctx.to_accumulator else (grad, None, None, None)


def _reduces_tensor_parallel(spec: ShardSpec) -> bool:
    """Whether gradients of weights replicated over tensor-parallel ranks are summed here, in the reduce dtype.

    Without a reduce dtype of its own, DTensor's reduction in the compute dtype is the right one.
    """
    tp = spec.tensor_parallel
    return (
        tp is not None
        and spec.reduce_dtype not in (None, spec.compute_dtype)
        and any(placement == Replicate() for placement in tp.placements)
    )


def _sum_over_tensor_parallel(grad: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    if not _reduces_tensor_parallel(spec):
        return grad
    assert spec.tensor_parallel is not None
    grad = grad.to(spec.reduce_dtype)
    for placement, group in zip(spec.tensor_parallel.placements, spec.tensor_parallel.groups, strict=True):
        if placement.is_replicate() and group.size > 1:
            grad = _compat.all_reduce(grad.contiguous(), "sum", group.name)
    return grad


def _reduce_scatter_mean(grad: torch.Tensor, shard_shape: torch.Size, spec: ShardSpec) -> torch.Tensor:
    assert spec.gather_group is not None
    group = spec.gather_group
    dim, ranks, rows = _cut(spec)
    grad = _pad(grad, dim, ranks * rows)
    if dim != 0:  # (d0, ..., W * p, ...) to rank-major (W * d0, ..., p, ...)
        shape = (*grad.shape[:dim], rows, *grad.shape[dim + 1 :])
        grad = grad.unflatten(dim, (ranks, rows)).movedim(dim, 0).reshape(ranks * shape[0], *shape[1:])
    grad = _mean(grad, ranks, lambda x, op: _compat.reduce_scatter(x, op, group.name, ranks))
    return _crop(grad, dim, shard_shape[dim])


def _all_reduce_mean(grad: torch.Tensor, group: Group) -> torch.Tensor:
    return _mean(grad, group.size, lambda x, op: _compat.all_reduce(x, op, group.name))


def _mean(
    grad: torch.Tensor, ranks: int, collective: Callable[[torch.Tensor, str], torch.Tensor]
) -> torch.Tensor:
    """Run a reduction as a mean; complex numbers travel as pairs of reals."""
    if grad.is_complex():
        return torch.view_as_complex(_mean(torch.view_as_real(grad.contiguous()), ranks, collective))
    grad = grad.contiguous()
    if grad.dtype != torch.float16:
        return collective(grad, "avg")
    # fp16 overflows when summed and underflows when divided first: divide by about sqrt(W) before and after, as FSDP2
    # does.
    before = 2 ** math.ceil(math.log2(math.sqrt(ranks)))
    return collective(grad / before, "sum") / (ranks / before)


def _cut(spec: ShardSpec) -> tuple[int, int, int]:
    """Shard dim, ranks of the shard group, rows that each rank sends."""
    assert spec.shard_dim is not None
    assert spec.gather_group is not None
    return spec.shard_dim, spec.gather_group.size, spec.padded_rows


def _pad(tensor: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    missing = rows - tensor.shape[dim]
    if missing == 0:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing))


def _crop(tensor: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    return tensor if tensor.shape[dim] == rows else tensor.narrow(dim, 0, rows)


# Dtypes that both gloo and NCCL send as they are. Everything else travels as its bytes: a gather only copies.
_WIRE_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)


def _to_wire(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.dtype in _WIRE_DTYPES else tensor.view(torch.uint8)


def _from_wire(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(tensor)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
