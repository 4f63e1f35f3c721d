"""Find the stack of equal layers in a model, and cut it down to a few.

Owns the comparison of layers by their structure. Must not know graphs.
"""

from __future__ import annotations

import dataclasses
import itertools
import types

import torch
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
    """The longest `ModuleList` of more than `TRACED_LAYERS` layers that are alike, if any.

    Alike are equal classes, parameters and settings (numbers, texts, functions), submodules included.
    """
    best: Stack | None = None
    lists = {name: item for name, item in model.named_modules() if isinstance(item, nn.ModuleList)}
    for name, module in lists.items():
        if len(module) <= TRACED_LAYERS or (best is not None and len(module) <= best.layers):
            continue
        first, *others = module
        if all(_alike(first, 0, layer, number) for number, layer in enumerate(others, start=1)):
            best = Stack(name, len(module))
    if best is None:
        return None
    # Lists that forward walks through side by side: a shorter one would end the others, too.
    beside = [
        name
        for name, item in lists.items()
        if len(item) == best.layers and not name.startswith(f"{best.name}.")
    ]
    return best if beside == [best.name] else None


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


def _alike(one: nn.Module, at: int, other: nn.Module, number: int) -> bool:
    """Whether two layers, of these places in the stack, have equal classes, parameters and plain attributes."""
    if _parameters_of(one) != _parameters_of(other):
        return False
    pairs = list(itertools.zip_longest(one.named_modules(), other.named_modules()))
    return all(
        a is not None and b is not None and a[0] == b[0] and _same_module(a[1], at, b[1], number)
        for a, b in pairs
    )


def _parameters_of(layer: nn.Module) -> list[tuple[object, ...]]:
    return [
        (name, tuple(item.shape), item.dtype, item.requires_grad) for name, item in layer.named_parameters()
    ]


def _same_module(one: nn.Module, at: int, other: nn.Module, number: int) -> bool:
    if type(one) is not type(other):
        return False
    a, b = _plain_attributes(one), _plain_attributes(other)
    return a.keys() == b.keys() and all(
        # A number that says which layer it is, as `layer_idx` does, is no difference.
        a[name] == b[name] or (type(a[name]) is int and (a[name], b[name]) == (at, number))
        for name in a
    )


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    """What of a module's own attributes may make its forward another one: settings and functions."""
    kinds = bool, int, float, str, type(None), torch.dtype, types.FunctionType, types.BuiltinFunctionType
    return {
        name: getattr(value, "__code__", value)
        for name, value in vars(module).items()
        if isinstance(value, kinds) or (isinstance(value, tuple) and all(isinstance(v, kinds) for v in value))
    }
