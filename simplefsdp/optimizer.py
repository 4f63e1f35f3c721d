"""What optimizers and gradient clipping need to know about sharded parameters.

Optimizers built before `simple_fsdp` hold the unsharded originals and would train nothing; a hook before every
optimizer step (torch's global one, installed by the first `simple_fsdp` call) retargets them, state included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from . import _compat
from .census import check_complete
from .slots import Slot, WrapState

__all__ = ["clip_grad_norm_", "mark_sharded", "watch_optimizers"]

_MARK = "_simplefsdp_slot"
_SEEN = "_simplefsdp_seen"
"""Optimizer attribute: how many plain parameters, and which models, it had when they were looked at."""


def mark_sharded(original: torch.Tensor, sharded: nn.Parameter, slot: Slot) -> None:
    """Note on the original parameter what became of it, and on the sharded one where it belongs.

    The sharded one takes over attributes that the user has set on the original.
    """
    sharded.__dict__.update(original.__dict__)
    setattr(original, _MARK, slot)
    setattr(sharded, _MARK, slot)


def find_slot(param: torch.Tensor) -> Slot | None:
    """The slot that `mark_sharded` noted on a parameter, or None."""
    return getattr(param, _MARK, None)


@functools.cache
def watch_optimizers() -> None:
    """Install the step hook, once per process."""
    # Under torch.compile(optimizer.step) the hook runs as it is, between two graphs: it communicates at the first step
    # and may exchange parameters. torch's own step breaks the graph too (fullgraph=True fails on plain parameters).
    register_optimizer_step_pre_hook(
        torch.compiler.disable(_before_step, reason="simple_fsdp checks the optimizer before its step")
    )


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    wraps: dict[int, WrapState] = {}
    plain = 0
    for group in optimizer.param_groups:
        params = group["params"]
        for index, param in enumerate(params):
            slot = find_slot(param)
            if slot is None:
                plain += 1
                continue
            wraps[id(slot.wrap)] = slot.wrap
            if not isinstance(param, DTensor) or slot.spec.tensor_parallel is not None:
                params[index] = _retarget(optimizer, param, slot)
            if slot.waits:
                raise RuntimeError(
                    f"optimizer.step() while the gradient of '{slot.fqn}' waits for its reduction: run the last "
                    "micro-batch's forward and backward outside of no_sync, or drop the window by the model's "
                    "zero_grad() (the optimizer's does not reach these gradients)"
                )
        # torch's multi-tensor loops cannot mix DTensors of several meshes, or DTensors and plain tensors.
        if group.get("foreach", False) is None and not group.get("fused") and _is_mixed(params):
            group["foreach"] = False
    _check_models(optimizer, list(wraps.values()), plain)


def _check_models(optimizer: Optimizer, wraps: list[WrapState], plain: int) -> None:
    """Look at the models that an optimizer trains: at its first step, and again when it got other parameters."""
    seen = (plain, [id(wrap) for wrap in wraps])
    if vars(optimizer).get(_SEEN) == seen:
        return
    for wrap in wraps:
        check_complete(wrap)
        if wrap.trail is not None:
            trail, wrap.trail = wrap.trail, None
            trail.check_equal(wrap.dp.mesh, [slot.fqn for slot in wrap.slots if _has_gradient(slot)])
    setattr(optimizer, _SEEN, seen)


def _has_gradient(slot: Slot) -> bool:
    param = slot.find_param()
    return param is not None and param.grad is not None


def _retarget(optimizer: Optimizer, original: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Replace a parameter that was wrapped after the optimizer was built."""
    sharded = slot.param
    if original is sharded:
        return original
    state = optimizer.state.pop(original, None)
    if state is not None:
        optimizer.state[sharded] = {
            key: slot.shard_full(value, sharded.device)
            if isinstance(value, torch.Tensor) and value.shape == original.shape and value.dim() > 0
            else value
            for key, value in state.items()
        }
    return sharded


def _is_mixed(params: list[torch.Tensor]) -> bool:
    meshes = {id(p.device_mesh) if isinstance(p, DTensor) else 0 for p in params}
    return len(meshes) > 1


def _by_sharding(grads: list[torch.Tensor]) -> dict[tuple[Any, ...], list[torch.Tensor]]:
    """Local gradients by (mesh, mesh dims of more than one rank that shard, dtype); plain ones have no mesh."""
    groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            dims = tuple(
                d
                for d, placement in enumerate(grad.placements)
                if _compat.find_sharded_dim(placement) is not None and mesh.size(d) > 1
            )
            groups.setdefault((mesh, dims, grad.dtype), []).append(_compat.local_tensor(grad))
        else:
            groups.setdefault((None, (), grad.dtype), []).append(grad)
    return groups


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the gradient norm over all ranks, like `torch.nn.utils.clip_grad_norm_`.

    Unlike torch's, it takes parameters on several meshes and plain ones together, and gives a plain tensor that is
    equal on all ranks: one small all-reduce per mesh dim and kind of placement.

    Args:
        parameters: parameters with gradients, sharded or plain; plain gradients count as equal on all ranks.
        max_norm: upper bound of the norm.
        norm_type: p of the p-norm, or inf.
        error_if_nonfinite: raise instead of scaling by a NaN.

    Returns:
        The norm before clipping, a 0-dim fp32 (or fp64) tensor.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    infinite = math.isinf(norm_type)
    totals = []
    for (mesh, mesh_dims, _), local_grads in _by_sharding(grads).items():
        norms = _compat.foreach_norm([t for t in local_grads if t.numel() > 0], norm_type)
        # Ranks without elements, and sums in less than fp32, would not do.
        total = torch.zeros((), device=local_grads[0].device)
        if norms:
            powers = torch.stack([n.to(torch.promote_types(torch.float32, n.dtype)) for n in norms])
            total = powers.max() if infinite else powers.pow(norm_type).sum()
        for dim in mesh_dims:
            name = mesh.get_group(dim).group_name
            total = _compat.all_reduce(total.reshape(1), "max" if infinite else "sum", name).reshape(())
        totals.append(total)
    stacked = torch.stack([t.to(totals[0]) for t in totals])
    norm = stacked.max() if infinite else stacked.sum().pow(1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {norm.item()}, so gradients cannot be clipped; pass "
            "error_if_nonfinite=False to scale them all the same"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        local = _compat.local_tensor(grad) if isinstance(grad, DTensor) else grad
        local.mul_(scale.to(local.device, local.real.dtype if local.is_complex() else local.dtype))
    return norm
