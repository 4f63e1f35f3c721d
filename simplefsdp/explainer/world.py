"""A model without memory, on the process group that runs or on one that is imagined.

Owns fake copies and the lending of fake parameters. Must not know graphs or plans.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from simplefsdp import _compat

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def fake_copy(module: ModuleT, mode: Any, device: torch.device | None = None) -> ModuleT:
    """A copy of an unwrapped module whose parameters and buffers have no memory; ties stay ties.

    Args:
        module: what to copy.
        mode: of the fake tensors.
        device: where they pretend to be; None is where they are, or the CPU for those on the meta device.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        fake = nn.Parameter(
            _compat.fake_like(parameter.detach(), mode, device), requires_grad=parameter.requires_grad
        )
        memo[id(parameter)] = fake
    for buffer in module.buffers():
        memo[id(buffer)] = _compat.fake_like(buffer, mode, device)
    return copy.deepcopy(module, memo)


@contextlib.contextmanager
def fake_parameters(module: nn.Module, mode: Any) -> Iterator[None]:
    """Inside, a wrapped module holds fake parameters and buffers; gradients of the real ones are not touched."""
    fakes: dict[int, Any] = {}
    lent: list[tuple[dict[str, Any], str, Any]] = []
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                if id(parameter) not in fakes:
                    value = _compat.fake_like(parameter.detach(), mode)
                    fakes[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                lent.append((owner._parameters, name, parameter))
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                fakes.setdefault(id(buffer), _compat.fake_like(buffer, mode))
                lent.append((owner._buffers, name, buffer))
    try:
        for registry, name, value in lent:
            registry[name] = fakes[id(value)]
        yield
    finally:
        for registry, name, value in lent:
            registry[name] = value


def fake_inputs(inputs: Any, mode: Any, device: torch.device | None = None) -> Any:
    """The same arguments with tensors that have no memory; `device` as for `fake_copy`."""
    return _compat.tree_map_only(
        torch.Tensor,
        lambda tensor: _compat.fake_like(tensor, mode, device).requires_grad_(tensor.requires_grad),
        inputs,
    )
