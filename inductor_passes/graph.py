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

if TYPE_CHECKING:
    from collections.abc import Iterable

TAG_KEY = "simplefsdp"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"

# Namespaces whose operators talk to other ranks. Anything in them that is not one of the three bucketable
# kinds or a wait is opaque to the passes: nothing is moved across it.
_COMM_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem")
# A start is (input, ..., group): where the reduce operation stands in the positional arguments, or None.
_REDUCE_OP_POSITION = {ALL_GATHER: None, REDUCE_SCATTER: 1, ALL_REDUCE: 1}
_GROUP_POSITION = {ALL_GATHER: 2, REDUCE_SCATTER: 3, ALL_REDUCE: 2}
# "L['self'].layers.0.wq", "L['fn']._modules['layers']._modules['0']": the root is whatever object was
# compiled.
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


@dataclass(frozen=True, order=True)
class GroupKey:
    """Collectives with equal keys may share a bucket; others never do.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        group: process-group name as it stands in the graph. It identifies a group within one graph only.
        dtype: name of the element type that is communicated, as in "bfloat16".
        reduce_op: "sum", "avg", ...; "" for an all-gather.
    """

    kind: str
    group: str
    dtype: str
    reduce_op: str


def find_tag(node: fx.Node) -> Tag | None:
    """The unshard tag of a node, or None for a node that belongs to no parameter."""
    custom = node.meta.get("custom")
    tag = custom.get(TAG_KEY) if isinstance(custom, dict) else None
    if not isinstance(tag, dict) or "param" not in tag:
        return None
    return Tag(str(tag["param"]), bool(tag.get("reshard", True)), tag.get("passes", ""))


def is_tagged(graph: fx.Graph) -> bool:
    """Whether any node of the graph carries an unshard tag."""
    return any(find_tag(node) is not None for node in graph.nodes)


def find_kind(node: fx.Node) -> str | None:
    """The kind of a bucketable collective start ("all_gather", "reduce_scatter", "all_reduce"), or None."""
    if node.op != "call_function":
        return None
    ops = torch.ops._c10d_functional
    if node.target is ops.all_gather_into_tensor.default:
        return ALL_GATHER
    if node.target is ops.reduce_scatter_tensor.default:
        return REDUCE_SCATTER
    if node.target is ops.all_reduce.default:
        return ALL_REDUCE
    return None


def is_start(node: fx.Node) -> bool:
    """Whether the node starts an all-gather, reduce-scatter or all-reduce."""
    return find_kind(node) is not None


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective."""
    return node.op == "call_function" and node.target is torch.ops._c10d_functional.wait_tensor.default


def is_comm(node: fx.Node) -> bool:
    """Whether the node is any communication operator, a wait included."""
    return getattr(node.target, "namespace", None) in _COMM_NAMESPACES


def is_barrier(node: fx.Node) -> bool:
    """Whether nothing that communicates may be moved across the node.

    That is communication the passes do not understand, and operators with side effects. Random operators
    are no
    barrier: collectives leave the generators alone.
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
    """The kind of a collective start.

    Raises:
        ValueError: the node does not start a bucketable collective.
    """
    kind = find_kind(start)
    if kind is None:
        raise ValueError(f"{start.format_node()} does not start an all-gather, reduce-scatter or all-reduce")
    return kind


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs[name]


def input_of(start: fx.Node) -> fx.Node:
    """The tensor a collective start sends."""
    value = _argument(start, 0, "input")
    assert isinstance(value, fx.Node)
    return value


def group_of(start: fx.Node) -> Any:
    """The process-group argument of a collective start, as it stands in the graph."""
    return _argument(start, _GROUP_POSITION[get_kind(start)], "group_name")


def reduce_op_of(start: fx.Node) -> str:
    """The reduce operation of a collective start, "" for an all-gather."""
    position = _REDUCE_OP_POSITION[get_kind(start)]
    return "" if position is None else str(_argument(start, position, "reduce_op")).lower()


def world_of(start: fx.Node) -> int:
    """Number of ranks in the group of a collective start."""
    kind = get_kind(start)
    if kind == ALL_GATHER:
        return int(_argument(start, 1, "group_size"))
    if kind == REDUCE_SCATTER:
        return int(_argument(start, 2, "group_size"))
    return _compat.group_size(group_of(start))


def group_key(start: fx.Node) -> GroupKey:
    """Kind, process group, element type and reduce operation of a collective start."""
    dtype = str(value_of(input_of(start)).dtype).removeprefix("torch.")
    return GroupKey(get_kind(start), _compat.group_name(group_of(start)), dtype, reduce_op_of(start))


def value_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor a node produces.

    Raises:
        ValueError: the node produces no single tensor, or the graph was not traced with fake tensors.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{node.format_node()} has no fake tensor in meta['val']")
    return value


def size_bytes(node: fx.Node) -> int:
    """Bytes of all tensors a node produces; symbolic sizes count with their hint."""
    return sum(
        _compat.size_hint(value.numel()) * value.element_size()
        for value in _leaves(node.meta.get("val"))
        if isinstance(value, torch.Tensor)
    )


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def full_bytes(start: fx.Node) -> int:
    """Bytes of the unsharded side of a collective: an all-gather's output, a reduction's input."""
    return size_bytes(start) if find_kind(start) == ALL_GATHER else size_bytes(input_of(start))


def is_tensor(node: fx.Node) -> bool:
    """Whether the node produces a tensor or a tuple holding one (not a size, a scalar or nothing)."""
    return any(isinstance(value, torch.Tensor) for value in _leaves(node.meta.get("val")))


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


def tangent_closure(graph: fx.Graph) -> set[fx.Node]:
    """All nodes of a joint graph that depend on the gradient of an output: they must run in backward."""
    closure: set[fx.Node] = set()
    for node in graph.nodes:
        if _compat.is_tangent(node) or any(source in closure for source in node.all_input_nodes):
            closure.add(node)
    return closure


def starts(graph: fx.Graph) -> list[fx.Node]:
    """All bucketable collective starts, in graph order."""
    return [node for node in graph.nodes if is_start(node)]


def is_heavy(node: fx.Node) -> bool:
    """Whether the node is a matrix product, convolution or attention: the work that hides communication."""
    return node.op == "call_function" and _compat.find_flop_formula(node.target) is not None
