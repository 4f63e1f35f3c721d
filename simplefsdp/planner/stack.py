"""Find the stack of equal layers in a model, and cut it down to a few.

Owns the comparison of layers by their structure. Must not know graphs.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from simplefsdp.planner.extend import TRACED_LAYERS


@dataclasses.dataclass(frozen=True)
class Stack:
    """A `ModuleList` of equal layers.

    Args:
        name: its fully qualified name.
        layers: how many there are.
    """

    name: str
    layers: int


def find_stack(model: nn.Module) -> Stack | None:
    """The longest `ModuleList` of more than `TRACED_LAYERS` layers that have equal classes and parameters, if any."""
    best: Stack | None = None
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) <= TRACED_LAYERS:
            continue
        shapes = [_structure(layer) for layer in module]
        if all(shape == shapes[0] for shape in shapes) and (best is None or len(module) > best.layers):
            best = Stack(name, len(module))
    return best


def cut(model: nn.Module, stack: Stack) -> list[nn.Module]:
    """Leave `TRACED_LAYERS` layers of a stack, in place; returns the others."""
    module = _list(model, stack)
    removed = list(module)[TRACED_LAYERS:]
    del module[TRACED_LAYERS:]
    return removed


def restore(model: nn.Module, stack: Stack, removed: list[nn.Module]) -> None:
    """Put back what `cut` has removed."""
    _list(model, stack).extend(removed)


def _list(model: nn.Module, stack: Stack) -> nn.ModuleList:
    module = model.get_submodule(stack.name)
    assert isinstance(module, nn.ModuleList)
    return module


def _structure(layer: nn.Module) -> tuple[object, ...]:
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    parameters = tuple(
        (name, tuple(item.shape), item.dtype, item.requires_grad) for name, item in layer.named_parameters()
    )
    return modules, parameters
