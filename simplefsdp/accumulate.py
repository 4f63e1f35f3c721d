"""Gradient accumulation without communication: `no_sync`.

While gradients are not fully reduced they do not fit `.grad`, which has the shard's shape. They collect in the `.grad`
of a leaf of their own shape, the slot's accumulator; the first backward that reduces fully adds to the accumulators too
and, once it has ended, reduces every one of them and hands the result to the parameter's `.grad`:

    no_sync backward       full gradient -> accumulator.grad                             no collective
    last backward          full gradient -> accumulator.grad, then reduce-scatter, all-reduce -> parameter.grad

So there is one reduction per parameter, in the storage dtype's precision, whatever the number of micro-batches. Hooks
on the parameter run then, once, with the reduced gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import _compat
from .parametrize import wrap_states
from .placement import stored
from .policy import GradientSync
from .slots import Slot, WrapState
from .unshard import reduce_gradient

__all__ = ["no_sync"]


@contextlib.contextmanager
def no_sync(module: nn.Module, *, replicas_only: bool = False) -> Iterator[None]:
    """Accumulate gradients without reducing them, as `DistributedDataParallel.no_sync` does.

    Run forward and backward of all micro-batches but the last inside; the last one, outside, reduces the sum.
    `.grad` of the parameters is set by that last backward, which also runs the hooks on them. Each rank keeps unsharded
    gradients until then; with `replicas_only` it keeps shards. `module.zero_grad()` drops them, to start over;
    `optimizer.zero_grad()` does not know of them.

    Args:
        module: a module that `simple_fsdp` has wrapped, or one that contains such modules.
        replicas_only: in hybrid sharding, reduce-scatter inside the shard group at every backward and defer only the
            all-reduce over replicas. Without a replicate dim nothing is deferred.

    Raises:
        ValueError: nothing below `module` is wrapped.
    """
    wraps = wrap_states(module)
    if not wraps:
        raise ValueError(f"no_sync: {type(module).__name__} holds no module wrapped by simple_fsdp")
    stage = GradientSync.SHARD_GROUP if replicas_only else GradientSync.NONE
    before = [wrap.sync for wrap in wraps]
    for wrap in wraps:
        if not (replicas_only and wrap.dp.replicate_dim is None):
            _start_accumulating(wrap, stage)
    try:
        yield
    finally:
        for wrap, sync in zip(wraps, before, strict=True):
            wrap.sync = sync


def _start_accumulating(wrap: WrapState, stage: GradientSync) -> None:
    wrap.sync, wrap.accumulating = stage, True
    for slot in wrap.slots:
        # A gradient that waits already decides the stage until it is reduced: sums of unlike stages mean nothing.
        if not slot.waits and (slot.accumulator is None or slot.stage is not stage):
            slot.stage = stage
            slot.accumulator = _make_accumulator(wrap, slot)


def _make_accumulator(wrap: WrapState, slot: Slot) -> torch.Tensor | None:
    param = slot.find_param()
    if param is None or not (param.is_floating_point() or param.is_complex()):
        return None
    shape = slot.spec.shape if slot.stage is GradientSync.NONE else _local_shape(slot)
    leaf = (
        torch.zeros((), dtype=slot.spec.accumulate_dtype, device=param.device).expand(shape).requires_grad_()
    )

    def after_accumulation(_: torch.Tensor) -> None:
        # One callback for each backward that reduces; the first accumulator to get its gradient asks for it.
        backward = _compat.running_backward()
        if wrap.sync is GradientSync.FULL and wrap.reducing_backward != backward:
            wrap.reducing_backward = backward
            _compat.queue_backward_callback(lambda: _reduce_accumulated(wrap))

    leaf.register_post_accumulate_grad_hook(after_accumulation)
    return leaf


def _reduce_accumulated(wrap: WrapState) -> None:
    """Reduce what waits in the accumulators, in registration order, which is equal on all ranks."""
    wrap.accumulating, wrap.reducing_backward = False, None
    with torch.no_grad():
        for slot in wrap.slots:
            leaf = slot.accumulator
            if leaf is None or leaf.grad is None or slot.find_param() is None:
                continue
            grad, leaf.grad = leaf.grad, None
            local = reduce_gradient(grad, _local_shape(slot), slot.spec, slot.stage, GradientSync.FULL)
            _accumulate(slot.param, stored(local, slot.mesh, slot.placements, slot.full_shape))


def _accumulate(param: nn.Parameter, grad: torch.Tensor) -> None:
    """What autograd does with a gradient that has reached a leaf: its hooks, its `.grad`, the hooks after that."""
    before, after = _compat.gradient_hooks(param)
    for hook in before:
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    if param.grad is None:
        param.grad = grad
    else:
        param.grad += grad
    for hook in after:
        hook(param)


def _local_shape(slot: Slot) -> torch.Size:
    param = slot.param
    assert isinstance(param, DTensor)
    return _compat.local_tensor(param).shape
