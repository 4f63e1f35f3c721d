"""Node predicates and graph walks: the only file that knows what a collective looks like in an FX graph.

It owns the meaning of operators, tags, module names and sizes. It must not know about plans, costs or
configuration, and it never changes a graph.

A collective is two nodes, a start that returns at once and a wait that returns its value::

    input --> all_gather_into_tensor(input, group_size, group) --> wait_tensor --> full parameter
    grad  --> reduce_scatter_tensor(grad, op, group_size, group) --> wait_tensor --> gradient shard
    grad  --> all_reduce(grad, op, group) --> wait_tensor --> mean gradient

Nodes traced inside a parameter's unshard carry `meta["custom"]["simplefsdp"]`, a dictionary read by
`find_tag`. The backward nodes of an unshard carry the tag of its forward.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inductor_passes import _compat
from inductor_passes.plan import GroupKey

if TYPE_CHECKING:
    from collections.abc import Iterable

TAG_KEY = "simplefsdp"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"

# Collectives the passes understand, by operator; kinds as the cost model names them.
_KINDS = {
    "_c10d_functional::all_gather_into_tensor": ALL_GATHER,
    "_c10d_functional::reduce_scatter_tensor": REDUCE_SCATTER,
    "_c10d_functional::all_reduce": ALL_REDUCE,
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
}
# What TorchInductor makes of a collective between the graph passes and the scheduler, if nothing else reads its input.
_LOWERED_KINDS = {"_c10d_functional::all_reduce_": ALL_REDUCE}
_CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
_UNSAFE_VIEWS = ("aten::_unsafe_view", "aten::reshape")
_WAIT = "_c10d_functional::wait_tensor"
# Namespaces whose operators talk to other ranks. Whatever in them is not named above is opaque to the passes.
_COMM_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem")
# "L['self'].layers.0.wq", "L['fn']._modules['layers']._modules['0']": the root is whatever was compiled.
_STACK_ROOT = re.compile(r"^L\[['\"][^'\"]*['\"]\]\.?")
_STACK_ITEM = re.compile(r"(?:\.?_modules)?\[['\"]?([^'\"\]]+)['\"]?\]")


@dataclass(frozen=True)
class Tag:
    """What the parametrization says about the unshard a node belongs to.

    Args:
        param: attribute name of the parameter on its module.
        reshard: whether the gathered parameter is freed after forward and gathered again in backward.
        passes: key of the `PassConfig` to use; "" when the tag names none, None when the model wants no
            passes.
    """

    param: str
    reshard: bool
    passes: str | None


def find_tag(node: fx.Node) -> Tag | None:
    """The unshard tag of a node, or None for a node that belongs to no parameter."""
    custom = node.meta.get("custom")
    tag = custom.get(TAG_KEY) if isinstance(custom, dict) else None
    if not isinstance(tag, dict) or "param" not in tag:
        return None
    return Tag(str(tag["param"]), bool(tag.get("reshard", True)), tag.get("passes", ""))


def operator_name(node: fx.Node) -> str:
    """Name of the operator a node calls, as in "aten::mm"; "" for anything that is no operator."""
    return getattr(getattr(node.target, "_schema", None), "name", "") if node.op == "call_function" else ""


def find_kind(node: fx.Node) -> str | None:
    """The kind of a collective start, None for every other node."""
    return _KINDS.get(operator_name(node))


def is_start(node: fx.Node) -> bool:
    """Whether the node starts a collective that the passes understand."""
    return find_kind(node) is not None


def is_lowered_start(node: fx.Node) -> bool:
    """Whether the node starts a collective that the passes understand after lowering, where in-place ones join.

    In a graph an in-place collective is a barrier: nothing there says who may not read its input afterwards.
    """
    return is_start(node) or operator_name(node) in _LOWERED_KINDS


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective."""
    return operator_name(node) == _WAIT


def is_comm(node: fx.Node) -> bool:
    """Whether the node is any communication operator, a wait included."""
    return getattr(node.target, "namespace", None) in _COMM_NAMESPACES


def is_barrier(node: fx.Node) -> bool:
    """Whether nothing that communicates may be moved across the node.

    That is communication the passes do not understand, and operators with side effects. Random operators are
    no barrier: collectives leave the generators alone.
    """
    if node.op == "call_module":
        return True
    if node.op != "call_function" or is_start(node) or is_wait(node):
        return False
    return is_comm(node) or _compat.has_side_effect(node)


def find_wait(start: fx.Node) -> fx.Node | None:
    """The wait of a collective start, or None when the start is never awaited or has other users too."""
    users = list(start.users)
    return users[0] if len(users) == 1 and is_wait(users[0]) else None


def get_kind(start: fx.Node) -> str:
    """The kind of a collective start, before or after lowering.

    Raises:
        ValueError: the node starts no collective.
    """
    kind = find_kind(start) or _LOWERED_KINDS.get(operator_name(start))
    if kind is None:
        raise ValueError(f"{start.format_node()} starts no collective")
    return kind


def _argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument by its name in the operator's schema."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if name not in names:
        return default
    position = names.index(name)
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def input_of(start: fx.Node) -> fx.Node:
    """The tensor a collective start sends."""
    value = _argument(start, "input")
    assert isinstance(value, fx.Node)
    return value


def group_of(start: fx.Node) -> Any:
    """The process-group argument of a collective start, as it stands in the graph."""
    return _argument(start, "group_name")


def world_of(start: fx.Node) -> int:
    """Number of ranks in the group of a collective start."""
    size = _argument(start, "group_size")
    return _compat.group_size(group_of(start)) if size is None else int(size)


def group_key(start: fx.Node) -> GroupKey:
    """Kind, process group, element type and reduce operation of a collective start.

    The group is named as in the graph: a name that identifies it within this graph only.
    """
    dtype = str(value_of(input_of(start)).dtype).removeprefix("torch.")
    reduce_op = str(_argument(start, "reduce_op", "")).lower()
    return GroupKey(get_kind(start), _compat.group_name(group_of(start)), dtype, reduce_op)


def value_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor a node produces.

    Raises:
        ValueError: the node produces no single tensor, or the graph was not traced with fake tensors.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{node.format_node()} has no fake tensor in meta['val']")
    return value


def tensors_of(node: fx.Node) -> Iterable[torch.Tensor]:
    """All fake tensors a node produces: one, none, or the members of a tuple."""
    return _tensors(node.meta.get("val"))


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def size_bytes(node: fx.Node) -> int:
    """Bytes of all tensors a node produces; symbolic sizes count with the value they were traced with."""
    return sum(_compat.size_hint(value.numel()) * value.element_size() for value in tensors_of(node))


def full_bytes(start: fx.Node) -> int:
    """Bytes of the unsharded side of a collective: an all-gather's output, the input of any other."""
    return size_bytes(start) if get_kind(start) == ALL_GATHER else size_bytes(input_of(start))


def is_tensor(node: fx.Node) -> bool:
    """Whether the node produces a tensor or a tuple holding one (not a size, a scalar or nothing)."""
    return next(iter(tensors_of(node)), None) is not None


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes one item of a tuple."""
    return node.op == "call_function" and node.target is operator.getitem


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a random generator."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def module_stack(node: fx.Node) -> tuple[tuple[str, type | str], ...]:
    """The modules a node was traced in, outermost first, as (fully qualified name, class).

    Names are relative to the compiled object, whose own name is "". A backward node carries the stack of
    the forward it differentiates. Nodes that passes created have no stack.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return tuple((_clean_path(path), cls) for path, cls in stack.values())


def _clean_path(path: str) -> str:
    path = _STACK_ITEM.sub(r".\1", _STACK_ROOT.sub("", path))
    return re.sub(r"\.+", ".", path).strip(".")


def module_fqn(node: fx.Node) -> str:
    """Fully qualified name of the module a node was traced in; "" for the root or when unknown."""
    stack = module_stack(node)
    return stack[-1][0] if stack else ""


def param_fqn(node: fx.Node) -> str:
    """Fully qualified name of the parameter whose unshard a tagged node belongs to; "" for other nodes."""
    tag = find_tag(node)
    if tag is None:
        return ""
    module = module_fqn(node)
    return f"{module}.{tag.param}" if module else tag.param


def describe(node: fx.Node) -> str:
    """The operator a node calls and the module it was traced in, for people: "mm of layers.0.wq"."""
    return f"{operator_name(node).rpartition('::')[2] or node.op} of {module_fqn(node) or 'no module'}"


def tangent_closure(graph: fx.Graph) -> set[fx.Node]:
    """All nodes of a joint graph that depend on the gradient of an output: they must run in backward."""
    closure: set[fx.Node] = set()
    for node in graph.nodes:
        if _compat.is_tangent(node) or any(source in closure for source in node.all_input_nodes):
            closure.add(node)
    return closure


def starts(graph: fx.Graph) -> list[fx.Node]:
    """All collective starts that the passes understand, in graph order."""
    return [node for node in graph.nodes if is_start(node)]


def is_view(node: fx.Node) -> bool:
    """Whether the result shares memory with an argument and costs nothing: view, transpose, slice, expand."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return is_getitem(node)
    aliases = [item.alias_info for item in schema.returns]
    aliased = bool(aliases) and all(info is not None and not info.is_write for info in aliases)
    return aliased or operator_name(node) in _UNSAFE_VIEWS


def is_cast(node: fx.Node) -> bool:
    """Whether the node changes the dtype of a tensor and nothing else."""
    return node.target in _CASTS and node.kwargs.keys() <= {"dtype"}


def is_heavy(node: fx.Node) -> bool:
    """Whether the node is a matrix product, convolution or attention: the work that hides communication."""
    return node.op == "call_function" and _compat.find_flop_formula(node.target) is not None
