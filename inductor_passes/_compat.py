"""Every private torch symbol that `inductor_passes` uses, in one place.

This file owns the names that torch may move: the rest of the package imports them from here and never from a
private torch module. It must not know what the passes do. All names below exist in torch 2.11 to 2.14
unless a note says otherwise; nothing of TorchInductor is imported before a function here is called.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._logging._internal import trace_structured
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

__all__ = [
    "CheckpointPolicy",
    "CustomGraphPass",
    "trace_structured",
]  # torch's own names that others import from here

# Operators that fx keeps alive as "impure" but that only check or annotate: moving a collective across them
# changes nothing a program can see.
_HARMLESS = (
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::_assert_tensor_metadata",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
)


def inductor_config() -> ModuleType:
    """TorchInductor's configuration module. Imported late: it is slow to import and reads the environment."""
    import torch._inductor.config as config

    return config


class PassChain(CustomGraphPass):
    """Several graph passes in one object, for torch before 2.13, whose hooks take one pass and no list.

    Delete when torch 2.12 is no longer supported.
    """

    def __init__(self, passes: Sequence[Any]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        for item in self.passes:
            item(graph)

    def uuid(self) -> Any:
        """All members' identities; None, which keeps graphs out of the cache, if a member has none."""
        identities = [item.uuid() if isinstance(item, CustomGraphPass) else None for item in self.passes]
        return None if None in identities else tuple(identities)


def hook_passes(hook: str) -> list[Any]:
    """The passes set on one of TorchInductor's graph hooks, in the order they run."""
    value = getattr(inductor_config(), hook)
    if value is None:
        return []
    if isinstance(value, PassChain):
        return list(value.passes)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def hook_value(passes: Sequence[Any]) -> Any:
    """What to assign to a graph hook so that it runs the given passes: as simple as torch accepts."""
    if len(passes) <= 1:
        return passes[0] if passes else None
    from torch._inductor import custom_graph_pass

    accepts_lists = hasattr(custom_graph_pass, "get_custom_graph_passes")  # since 2.13
    return list(passes) if accepts_lists else PassChain(passes)


def set_hook_passes(hook: str, passes: Sequence[Any]) -> None:
    """Set the passes that one of TorchInductor's graph hooks runs."""
    setattr(inductor_config(), hook, hook_value(passes))


def min_cut_partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's default partitioner: splits a joint graph into forward and backward graph modules."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def aot_autograd_backend(
    fw_compiler: Callable[..., Any],
    bw_compiler: Callable[..., Any],
    inference_compiler: Callable[..., Any],
    partition_fn: Callable[..., Any],
    *,
    decompose: bool = False,
) -> Callable[..., Any]:
    """A `torch.compile` backend that calls the given partitioner and compilers on AOTAutograd's graphs.

    Args:
        fw_compiler, bw_compiler, inference_compiler: what to call on each graph module and its inputs.
        partition_fn: what splits a joint graph.
        decompose: break operators down as TorchInductor does.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_compiler

    decompositions = None
    if decompose:
        from torch._inductor.decomposition import select_decomp_table

        decompositions = select_decomp_table()

    return aot_autograd(
        fw_compiler=make_boxed_compiler(fw_compiler),
        bw_compiler=make_boxed_compiler(bw_compiler),
        inference_compiler=make_boxed_compiler(inference_compiler),
        partition_fn=partition_fn,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )


def is_tangent(node: fx.Node) -> bool:
    """Whether a joint-graph placeholder is the gradient of a forward output (AOTAutograd names it
    `tangents_N`).

    The partitioner has the same test and reads the same target string, so both split a graph at the same
    place.
    """
    return node.op == "placeholder" and "tangents" in str(node.target)


def has_side_effect(node: fx.Node) -> bool:
    """Whether a call changes something besides its result: mutates an input, prints, synchronises."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.name in _HARMLESS:
        return False
    return node.is_impure(impure_random=False)


def size_hint(size: int | torch.SymInt) -> int:
    """A size as a plain integer: symbolic sizes give the value they had when the graph was traced."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def free_symbols(size: int | torch.SymInt) -> frozenset[Any]:
    """The symbols a size depends on; none for a plain number."""
    return frozenset() if isinstance(size, int) else frozenset(size.node.expr.free_symbols)


def evaluate(size: int | torch.SymInt, symbol_value: int) -> int:
    """A size as a number, with the given value for every symbol in it."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, symbol_value)))


def group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group as it stands in a graph, in group order."""
    if isinstance(group, str):
        from torch.distributed.distributed_c10d import _resolve_process_group

        group = _resolve_process_group(group)  # type: ignore[arg-type]
    return tuple(torch.distributed.get_process_group_ranks(group))


def default_store() -> torch.distributed.Store:
    """The key-value store that the process groups were made with."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def cache_hits() -> int:
    """How many graphs TorchInductor's caches have served to this process."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def group_name(group: Any) -> str:
    """Name of a process group as it stands in a graph: a name, a ProcessGroup, or an input that holds one."""
    if isinstance(group, str):
        return group
    return str(getattr(group, "group_name", None) or getattr(group, "name", group))


def group_size(group: Any) -> int:
    """Number of ranks in a process group as it stands in a graph."""
    return len(group_ranks(group))


CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Attention on CPU, which torch's flop counter has no formula for, and what has one and the same arguments."""


def find_flop_formula(target: Any) -> Callable[..., int] | None:
    """The function that counts an operator's floating-point operations from its arguments, None for cheap ones."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(target, "overloadpacket", target)
    try:
        return flop_registry.get(CPU_ATTENTION.get(packet, packet))
    except TypeError:  # an unhashable target
        return None


def find_meshes(graph: fx.Graph) -> list[DeviceMesh]:
    """The device meshes among a graph's inputs, each once: since torch 2.13 a DTensor's mesh is one."""
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    objects = {id(item): item for item in (getattr(value, "real_obj", None) for value in values)}
    return [item for item in objects.values() if isinstance(item, DeviceMesh)]


def forget_hash(mesh: DeviceMesh) -> None:
    """Drop the hash values that a mesh, its root and its flattened forms keep; they are computed anew when needed.

    torch 2.13 and 2.14 put the state of a mesh that is a graph input into the key of the FX graph cache, this value
    included. Python salts it in each process, so no process would find what another one compiled. Delete when
    `DeviceMesh.__getstate__` leaves it out.
    """
    root = getattr(mesh, "_root_mesh", None)
    for item in (mesh, root, *getattr(root or mesh, "_flatten_mapping", {}).values()):
        if item is not None and getattr(item, "_hash", None) is not None:
            item._hash = None


def fake_result(node: fx.Node) -> Any:
    """What a node computes, as fake (or meta) tensors, from those of its inputs.

    Operators that only lay tensors out anew go straight to their meta kernels: the way through the fake mode costs
    twelve times as much for a slice that was not seen before, and a bucket is made of these.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    values = [source.meta["val"] for source in node.all_input_nodes]
    mode = next(filter(None, (getattr(value, "fake_mode", None) for value in values)), None)
    if mode is None:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.target in _LAYOUT_OPERATORS and all(
        isinstance(size, int) for value in values for size in value.shape
    ):
        from torch._subclasses.fake_tensor import in_kernel_invocation_manager

        with in_kernel_invocation_manager(mode):
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        return mode.fake_tensor_converter.from_meta_and_device(mode, result, values[0].device)
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


_LAYOUT_OPERATORS = (torch.ops.aten.reshape.default, torch.ops.aten.slice.Tensor)


def rename(node: fx.Node, name: str) -> None:
    """Give a node a name, made unique within its graph by a numeric suffix."""
    node._rename(name)


# Scheduler nodes: TorchInductor's fused kernels, extern calls and collectives, after lowering.


def is_collective_kernel(snode: Any) -> bool:
    """Whether a scheduler node starts a collective of any kind."""
    from torch._inductor import ir

    return isinstance(snode.node, ir._CollectiveKernel) and not is_wait_kernel(snode)


def is_wait_kernel(snode: Any) -> bool:
    """Whether a scheduler node waits for a collective."""
    from torch._inductor import ir

    return isinstance(snode.node, ir._WaitKernel)


def is_opaque_kernel(snode: Any) -> bool:
    """Whether a scheduler node calls a library or a template rather than code generated for light operators."""
    return bool(snode.is_extern() or snode.is_template())


def called_operator(snode: Any) -> Any:
    """The operator that a scheduler node calls, or takes one result of; None for one with code of its own."""
    from torch._inductor import ir

    node = snode.node
    if isinstance(node, ir.MultiOutput):
        node = node.inputs[0]
    return getattr(node, "op_overload", None)


def is_reduction_kernel(snode: Any) -> bool:
    """Whether a scheduler node generates a sum or another reduction within this rank's tensors."""
    return bool(snode.is_reduction())


def origins(snode: Any) -> list[fx.Node]:
    """The graph nodes a scheduler node came from, each once."""
    parts = [part.node for part in snode.get_nodes() if part.node is not None]
    return list(dict.fromkeys(origin for part in parts for origin in part.get_origins()))


def written_buffers(snode: Any) -> list[str]:
    """Names of the buffers a scheduler node writes."""
    return [buffer.get_name() for buffer in snode.get_outputs()]


def accessed_bytes(snode: Any) -> int:
    """Bytes that the kernel of a scheduler node reads and writes, each buffer once."""
    return int(snode.get_read_write_buffers_sizes())


def reads_graph_inputs(snode: Any) -> bool:
    """Whether a scheduler node reads any value that no scheduler node writes."""
    return any(item.name not in snode.scheduler.name_to_buf for item in snode.read_writes.reads)


def read_buffers(snode: Any) -> list[str]:
    """Names of the buffers that must be written before a scheduler node runs, for data or for order alone."""
    return [dependency.name for dependency in snode.unmet_dependencies]


def order_only_buffers(snode: Any) -> list[str]:
    """Names of buffers that must be written before a scheduler node runs for no other reason than a wish for order.

    torch orders collectives so: each after the one before it. Once the collective before is one in place, that name
    stands for the buffer as its *wait* leaves it, and the order becomes one after the other's end. Torch before 2.13
    may not mark such dependencies; there are none then.
    """
    wished: dict[str, bool] = {}
    for dependency in snode.unmet_dependencies:
        wished[dependency.name] = wished.get(dependency.name, True) and getattr(dependency, "is_fake", False)
    return [name for name, only in wished.items() if only]


def lowered_position(snode: Any) -> int:
    """Where the first of a scheduler node's operators stood when the graph was lowered."""
    return int(snode.min_order)


def lowered_graph() -> fx.Graph:
    """The graph that TorchInductor is compiling at this moment."""
    from torch._inductor.virtualized import V

    graph: Any = V.graph.module.graph
    return graph  # type: ignore[no-any-return]


def peak_bytes(snodes: list[Any]) -> int | None:
    """Peak of live bytes when scheduler nodes run in this order; None where torch cannot say."""
    planned = _plan_memory(snodes)
    return None if planned is None else int(planned[0])


@dataclasses.dataclass(frozen=True)
class BufferLifetime:
    """Memory that scheduler nodes share: who allocates it (None: it is an input), who reads it last of all."""

    size_bytes: int
    writer: Any
    readers: tuple[Any, ...]
    kept: bool


def buffer_lifetimes(snodes: list[Any]) -> list[BufferLifetime] | None:
    """The buffers that scheduler nodes write and the inputs they may free; None where torch cannot say."""
    from torch._inductor.virtualized import V

    planned = _plan_memory(snodes)
    if planned is None:
        return None
    kept = set(V.graph.get_output_names())
    known = set(snodes)
    buffers = [(buffer, snode) for snode in snodes for buffer in snode.get_outputs()]
    buffers += [(buffer, None) for buffer in planned[1].values()]
    return [
        BufferLifetime(
            int(buffer.mpi_buffer.size_free),
            writer,
            tuple(reader for reader in buffer.mpi_buffer.succ_nodes if reader in known),
            buffer.get_name() in kept,
        )
        for buffer, writer in buffers
        if buffer.mpi_buffer.size_free
    ]


def _plan_memory(snodes: list[Any]) -> tuple[int, dict[str, Any]] | None:
    """Peak of live bytes in this order, and the inputs that may be freed; notes lifetimes on the buffers."""
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    try:
        from torch._inductor.memory import prepare_planning_info

        scheduler = snodes[0].scheduler
        planned: tuple[int, dict[str, Any]] = prepare_planning_info(
            snodes,
            scheduler.name_to_buf,
            scheduler.name_to_fused_node,
            OrderedSet(V.graph.graph_inputs.keys()),
            OrderedSet(V.graph.get_output_names()),
        )
    except (ImportError, AttributeError, TypeError):
        return None
    return planned


_OVERLAP_FLAG = "reorder_for_compute_comm_overlap"
_OVERLAP_PASSES = "reorder_for_compute_comm_overlap_passes"
# Since torch 2.14 a stock pass moves collectives after all custom passes.
_STOCK_OVERLAP = "enable_simple_overlap"


@dataclasses.dataclass(frozen=True)
class SchedulerSettings:
    """TorchInductor's settings for passes over scheduler nodes.

    Args:
        enabled: whether it runs such passes.
        passes: the passes, in order.
        stock_overlap: whether the stock overlap pass runs after them; None where torch has none.
    """

    enabled: bool
    passes: tuple[Any, ...]
    stock_overlap: bool | None

    @classmethod
    def current(cls) -> SchedulerSettings:
        """The settings in force."""
        config = inductor_config()
        stock = getattr(config.aten_distributed_optimizations, _STOCK_OVERLAP, None)
        return cls(getattr(config, _OVERLAP_FLAG), tuple(getattr(config, _OVERLAP_PASSES)), stock)

    def options(self) -> dict[str, Any]:
        """The settings as options of `torch.compile`."""
        values: dict[str, Any] = {_OVERLAP_FLAG: self.enabled, _OVERLAP_PASSES: list(self.passes)}
        if self.stock_overlap is not None:
            values[f"aten_distributed_optimizations.{_STOCK_OVERLAP}"] = self.stock_overlap
        return values

    def apply(self) -> None:
        """Put the settings in force."""
        config = inductor_config()
        setattr(config, _OVERLAP_FLAG, self.enabled)
        setattr(config, _OVERLAP_PASSES, list(self.passes))
        if self.stock_overlap is not None:
            setattr(config.aten_distributed_optimizations, _STOCK_OVERLAP, self.stock_overlap)


def stock_overlap(snodes: list[Any]) -> list[Any]:
    """TorchInductor's own overlap pass, in torch 2.14 and later."""
    from torch._inductor import comms

    return list(comms.simple_overlap(snodes))  # type: ignore[attr-defined]
