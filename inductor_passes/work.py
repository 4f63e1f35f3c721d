"""How much work graph nodes are: floating-point operations and bytes moved, per kernel they will become.

It owns the reading of sizes for costs and the guess at what will be fused. It must not know hardware or times.

Symbolic sizes stand for a fixed nominal number, not for what one rank happened to see: ranks may see different lengths,
and their plans must be equal. Sizes that were traced as constants are taken as they are: ranks that compile for other
constants may plan differently, which `agreement` tells them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from inductor_passes import _compat
from inductor_passes import graph as fxg
from inductor_passes.costs.compute import Work

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import fx

    from inductor_passes.costs.model import CostModel

# What all symbolic sizes of a graph multiply to: about the tokens one rank handles in one step of the published
# Llama 3.1 runs (sequence 8192, local batch 1 or 2; torchtitan, December 2024).
NOMINAL_SYMBOLIC_ELEMENTS = 8192
_FUSED = "fused_"


def nominal_size(graph: fx.Graph) -> int:
    """The number that stands for each symbolic size of a graph."""
    symbols = symbols_of(graph)
    return max(1, round(NOMINAL_SYMBOLIC_ELEMENTS ** (1 / len(symbols)))) if symbols else 1


def symbols_of(graph: fx.Graph) -> frozenset[Any]:
    """The symbols in the sizes of a graph's inputs."""
    return frozenset[Any]().union(
        *(
            _compat.free_symbols(size)
            for node in graph.find_nodes(op="placeholder")
            for value in fxg.tensors_of(node)
            for size in value.shape
        )
    )


def time_ns(nodes: Sequence[fx.Node], nominal: int, cost: CostModel) -> int:
    """Modelled time of consecutive nodes; arguments as of `kernels`, and the prices."""
    return sum(map(cost.compute_ns, kernels(nodes, nominal, named=cost.knows_kernels())))


def kernels(nodes: Sequence[fx.Node], nominal: int, *, named: bool = True) -> list[Work]:
    """The kernels that consecutive nodes become.

    Matrix products, convolutions and attention are a kernel each. All others are taken to fuse into one kernel, which
    reads what comes from outside and writes what is read outside. Views are no work.

    Args:
        nodes: compute nodes in graph order, without communication.
        nominal: what each symbolic size counts as.
        named: name light operators by `light_key`, which takes time; needed only where kernel times are known.
    """
    heavy = [node for node in nodes if fxg.is_heavy(node)]
    light = list(filter(is_light, nodes))
    work = [_heavy_kernel(node, nominal) for node in heavy]
    if not all(map(fxg.is_view, light)):
        work.append(_fused_kernel(light, nominal, named))
    return work


def is_light(node: fx.Node) -> bool:
    """Whether a compute node is one of those that fuse."""
    return not fxg.is_heavy(node) and fxg.is_tensor(node)


def light_key(node: fx.Node, nominal: int) -> str:
    """Name for the work of a light node: equal for equal operators on equal shapes, in every process."""
    shapes = [
        (str(value.dtype), *(_compat.evaluate(size, nominal) for size in value.shape))
        for source in (*node.all_input_nodes, node)
        for value in fxg.tensors_of(source)
    ]
    return _FUSED + hashlib.sha256(f"{node.target} {shapes}".encode()).hexdigest()[:16]


def is_light_key(key: str) -> bool:
    """Whether `light_key` may have made a key."""
    return key.startswith(_FUSED)


def _heavy_kernel(node: fx.Node, nominal: int) -> Work:
    formula = _compat.find_flop_formula(node.target)
    assert formula is not None
    args, kwargs = torch.fx.map_arg(
        (node.args, node.kwargs), lambda source: _sized(source.meta.get("val"), nominal)
    )
    flops = formula(*args, out_val=_sized(node.meta.get("val"), nominal), **kwargs)
    moved = moved_bytes((*node.all_input_nodes, node), nominal)
    return Work(flops=int(flops), moved_bytes=moved, dtype=_dtype(node))


def _fused_kernel(nodes: Sequence[fx.Node], nominal: int, named: bool) -> Work:
    """One kernel of light nodes and the views between them, which stand for the tensor they view.

    What is only viewed is not read: the partitioner leaves views of saved activations wherever forward ends.
    """
    inside = set(nodes)
    base = {node: node for node in nodes}
    for node in nodes:
        if fxg.is_view(node) and node.all_input_nodes:
            source = node.all_input_nodes[0]
            base[node] = base.get(source, source)
    read = dict.fromkeys(
        base.get(source, source)
        for node in nodes
        if base[node] is node
        for source in node.all_input_nodes
        if base.get(source, source) not in inside
    )
    written = dict.fromkeys(
        base[node]
        for node in nodes
        if base[node] in inside and any(user not in inside for user in node.users)
    )
    moved = moved_bytes((*read, *written), nominal)
    keys = tuple(light_key(node, nominal) for node in nodes) if named else ()
    return Work(moved_bytes=moved, dtype=_dtype(nodes[-1]), kernels=keys)


def moved_bytes(nodes: Iterable[fx.Node], nominal: int) -> int:
    """Bytes of all tensors the nodes produce, with symbolic sizes at their nominal value."""
    return sum(
        _compat.evaluate(value.numel(), nominal) * value.element_size()
        for node in nodes
        for value in fxg.tensors_of(node)
    )


def _sized(value: Any, nominal: int) -> Any:
    """A value with every symbolic size replaced; tensors become meta tensors, which have a shape and no data."""
    if isinstance(value, torch.Tensor):
        return torch.empty([_compat.evaluate(size, nominal) for size in value.shape], device="meta")
    if isinstance(value, (list, tuple)):
        return [_sized(item, nominal) for item in value]
    return _compat.evaluate(value, nominal) if isinstance(value, torch.SymInt) else value


def _dtype(node: fx.Node) -> str:
    """The element type that decides the speed: that of the first floating-point input, or of the result."""
    values = [value for source in (*node.all_input_nodes, node) for value in fxg.tensors_of(source)]
    floating = [value.dtype for value in values if value.dtype.is_floating_point]
    return str(floating[0] if floating else values[0].dtype).removeprefix("torch.")
