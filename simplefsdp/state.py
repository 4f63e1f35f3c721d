"""State dicts: full ones out of shards, shards out of full ones, and whole parameters for evaluation and export.

`state_dict()` of a wrapped module needs nothing from here: it gives sharded DTensors under the original names, without
a collective, and `torch.distributed.checkpoint` saves, loads and reshards those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from . import _compat
from .parametrize import module_state, slots_of
from .slots import Slot
from .unshard import gather

__all__ = ["full_parameters", "full_state_dict", "load_full_state_dict", "shard_incoming_state"]


_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Segments of names that torch.compile and activation checkpointing insert where they wrap a module."""


def unwrapped_name(name: str) -> str:
    """A parameter's name in the plain model, whatever was wrapped in between."""
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)


def full_tensor(param: DTensor, slot: Slot | None = None) -> torch.Tensor:
    """The whole tensor on every rank, in its storage dtype, detached; a collective.

    With the parameter's slot, any dtype works; DTensor alone sends only what the backend knows.
    """
    with torch.no_grad():
        if slot is not None and slot.spec.tensor_parallel is None:
            spec = dataclasses.replace(slot.spec, compute_dtype=slot.spec.storage_dtype)
            full = gather(_compat.local_tensor(param), spec)
        else:
            full = param.full_tensor()
    # A tensor that is whole everywhere comes back as its own storage.
    return full.clone() if _compat.storage_id(full) == _compat.storage_id(param) else full


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = True, device: torch.device | str | None = "cpu"
) -> dict[str, Any]:
    """Gather an unsharded state dict, one parameter at a time; every rank calls it.

    Args:
        module: the wrapped model, compiled or not.
        rank0_only: give the state dict to rank 0 alone and an empty one to the others, so that only one whole model is
            in memory.
        device: where whole tensors are kept; None leaves them on the mesh's device.

    Returns:
        Names of the original model to plain tensors. Tied parameters stay one tensor.
    """
    keep = not rank0_only or dist.get_rank() == 0
    out: dict[str, Any] = {}
    slots = {id(owner._parameters.get(name)): slot for owner, name, slot in slots_of(module)}
    seen: dict[int, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        key = id(value)
        if key not in seen:
            whole = value
            if isinstance(value, DTensor):
                whole = full_tensor(value, slots.get(key))
            elif isinstance(value, torch.Tensor):
                whole = value.detach()
            seen[key] = (
                (whole.to(device) if isinstance(whole, torch.Tensor) and device else whole) if keep else None
            )
        if keep:
            out[unwrapped_name(name)] = seen[key]
    return out


def load_full_state_dict(
    module: nn.Module, source: Mapping[str, Any] | str | os.PathLike[str], *, strict: bool = True
) -> Any:
    """Load an unsharded state dict; each rank copies only its shards, without a collective.

    Args:
        module: the wrapped model.
        source: the state dict, the same on every rank, or the path of a file that `torch.save` wrote. A file is mapped
            into memory, so that a rank reads only the pages of its shards.
        strict: as in `load_state_dict`.

    Returns:
        What `load_state_dict` returns: missing and unexpected keys.

    Raises:
        RuntimeError: keys or shapes that do not fit, named.
    """
    if isinstance(source, Mapping):
        state = source
    else:
        state = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
    # A part compiled by itself has a wrapper's name in its keys, which the file, of the plain model, has not.
    inner = getattr(module, "_orig_mod", module)
    inside = {unwrapped_name(key): key for key in inner.state_dict(keep_vars=True)}
    if any(key != name for name, key in inside.items()):
        state = {inside.get(unwrapped_name(name), name): value for name, value in state.items()}
    return inner.load_state_dict(state, strict=strict)


def shard_incoming_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A load_state_dict pre-hook: plain tensors for sharded parameters become shards first."""
    for name, slot in module_state(module).slots.items():
        value = state_dict.get(prefix + name)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        current = module._parameters.get(name)
        if tuple(value.shape) != slot.full_shape or not isinstance(current, DTensor):
            continue  # load_state_dict reports the shapes itself
        state_dict[prefix + name] = slot.shard_full(value)


@contextlib.contextmanager
def full_parameters(module: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Inside, the model holds whole plain parameters: for evaluation, export and surgery on values.

    Attribute reads, `named_parameters()` and `state_dict()` give whole tensors in the storage dtype, without gradients;
    forward computes in the policy's dtype, as ever. Every rank enters; the whole model is in memory on each.

    Args:
        module: a module that holds wrapped modules.
        writeback: copy what the body wrote into the parameters back into the shards at the end; each rank keeps its own
            part, so all ranks have to write the same values.
    """
    whole: dict[int, nn.Parameter] = {}
    before: list[tuple[nn.Module, str, nn.Parameter, Slot]] = []
    for owner, name, slot in slots_of(module):
        param = owner._parameters.get(name)
        if param is None or not isinstance(param, DTensor):
            continue
        if id(param) not in whole:
            whole[id(param)] = nn.Parameter(full_tensor(param, slot), requires_grad=False)
        before.append((owner, name, param, slot))
    for owner, name, param, _ in before:
        owner._parameters[name] = whole[id(param)]
    try:
        yield
    finally:
        for owner, name, param, _slot in before:
            current, owner._parameters[name] = owner._parameters.get(name), param
            if writeback and current is not None:
                whole[id(param)] = current
        if writeback:
            with torch.no_grad():
                for _, _, param, slot in before:
                    _compat.local_tensor(param).copy_(_compat.local_tensor(slot.shard_full(whole[id(param)])))
