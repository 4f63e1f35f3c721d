"""Every private torch symbol that `simplefsdp` uses, in one place, with the torch versions it was checked on.

Nothing else in the package may import a private torch name. Checked on torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "StridedShard",
    "TorchDispatchMode",
    "all_gather",
    "all_reduce",
    "compilations",
    "concatenate_meshes",
    "fake_like",
    "fake_mode",
    "fake_world",
    "find_fake_mode",
    "find_graph_break",
    "find_sharded_dim",
    "foreach_norm",
    "gradient_hooks",
    "in_dispatch_mode",
    "is_compiled_module",
    "is_traceable_wrapper_subclass",
    "local_tensor",
    "mark_cacheable",
    "queue_backward_callback",
    "recompile_reasons",
    "reduce_scatter",
    "replace_cpu_gather",
    "root_mesh",
    "running_backward",
    "split_mesh_dim",
    "storage_id",
    "strided_shard",
    "tree_leaves",
    "tree_map_only",
    "version",
    "while_tracing",
    "with_own_code",
    "write_count",
]


# The functional collectives are called as raw ops, not through `torch.distributed._functional_collectives`: the
# Python wrappers return an AsyncCollectiveTensor in eager mode and pad or chunk for dim != 0, which we do ourselves.


def all_gather(tensor: torch.Tensor, group_name: str, group_size: int) -> torch.Tensor:
    """Gather `tensor` of shape (n, ...) from every rank of the group into (group_size * n, ...)."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(tensor, group_size, group_name))


@functools.cache
def replace_cpu_gather() -> torch.library.Library:
    """Run `all_gather_into_tensor` of CPU tensors, compiled or not, through its out-variant, for the whole process.

    torch runs the functional gather as a coalesced one. gloo's coalesced gather corrupts the heap when several are in
    flight and their outputs are freed ("malloc(): unaligned tcache chunk detected", or a segmentation fault, within
    seconds of a loop of 8 gathers of 64 elements and 8 waits; torch 2.13). Its plain gather, which the out-variant
    runs, does not. The values are the same. Delete when `tests/simplefsdp/test_compat.py` passes without it.
    """
    ops = torch.ops._c10d_functional

    def gather(tensor: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
        out = tensor.new_empty((group_size * tensor.shape[0], *tensor.shape[1:]))
        source, target = map(torch.view_as_real, (tensor, out)) if tensor.is_complex() else (tensor, out)
        ops.all_gather_into_tensor_out(source, group_size, group_name, out=target)
        return out

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gather, "CPU")
    return library


def reduce_scatter(tensor: torch.Tensor, op: str, group_name: str, group_size: int) -> torch.Tensor:
    """Reduce `tensor` of shape (group_size * n, ...) over the group; this rank's (n, ...) part comes back."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(tensor, op, group_size, group_name))


def all_reduce(tensor: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    """Reduce `tensor` over the group; a new tensor of the same shape comes back."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, op, group_name))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor (typed as its base: parameters are) itself: no autograd, no fresh view."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def storage_id(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory; a number of its own for a tensor without storage."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata


def version(tensor: DTensor) -> tuple[int, int]:
    """Counts in-place writes: ops on a DTensor move its own counter, writes to the local tensor the local one's.

    Tensors made in inference mode do not count.
    """
    local = tensor._local_tensor
    return (0 if tensor.is_inference() else tensor._version), (0 if local.is_inference() else local._version)


def write_count(tensor: torch.Tensor) -> int:
    """Counts in-place writes to a tensor; 0 for those made in inference mode."""
    if isinstance(tensor, DTensor):
        return sum(version(tensor))
    return 0 if tensor.is_inference() else tensor._version


def in_dispatch_mode() -> bool:
    """Whether a mode sees operators before their tensors do: fake tensors, one process that plays all ranks."""
    return len(_get_current_dispatch_mode_stack()) > 0


def running_backward() -> int | None:
    """A number of its own for the backward that this thread runs inside the autograd engine, or None."""
    task: int = torch._C._current_graph_task_id()
    return None if task == -1 else task


def gradient_hooks(param: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks on a leaf's gradient (`register_hook`), and those that run after it was added to `.grad`."""
    after = getattr(param, "_post_accumulate_grad_hooks", None)
    return list((param._backward_hooks or {}).values()), list((after or {}).values())


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Have the autograd engine call `callback()` once the running backward has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def while_tracing(callback: Callable[..., None], *subjects: Any) -> None:
    """In code that Dynamo traces: run `callback(*subjects)` now, once per trace.

    Nothing of it gets into the graph, and no guard depends on what it reads. Does nothing outside of tracing.

    Args:
        callback: a module-level function.
        subjects: objects of user-defined classes, passed as they are, and tensors, whose fake ones are passed.
    """
    # Not at import: torch._dynamo takes seconds, and compiled code alone comes here. Checked on torch 2.13.
    from torch._dynamo.comptime import comptime

    comptime(_call_back)


def _call_back(context: Any) -> None:
    callback, subjects = (
        context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
        for name in ("callback", "subjects")
    )
    values = []
    for subject in subjects.items:
        variable = subject.realize()
        is_object = hasattr(variable, "value")
        values.append(variable.value if is_object else variable.as_proxy().node.meta["example_value"])
    callback.get_function()(*values)


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` made this module object (an OptimizedModule around the user's module)."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from (itself when it was not)."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """One mesh with the dims of `first`, then of `second`; both are slices of one root mesh.

    Raises:
        RuntimeError: the two do not come from one root mesh, or share a dim.
    """
    return DeviceMesh._concatenate([first, second])


def split_mesh_dim(mesh: DeviceMesh, sizes: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
    """Cut the only dim of a named 1-D mesh in two; the result is a slice of the same root mesh.

    Making a mesh of the slice's own ranks instead would ask each slice for other process groups, and ranks wait for
    each other forever.
    """
    return mesh._unflatten(0, sizes, names)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Sharding of a tensor dim whose shards a later mesh dim has sharded before (tensor parallel, then FSDP)."""
    return StridedShard(dim, split_factor=split_factor)


def find_sharded_dim(placement: Placement) -> int | None:
    """The tensor dim that a placement shards, plainly or strided (StridedShard is no subclass of Shard), or None."""
    return placement.dim if isinstance(placement, Shard | StridedShard) else None


def foreach_norm(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each tensor, in one kernel where the device has one."""
    return list(torch._foreach_norm(tensors, norm_type)) if tensors else []


# For `simplefsdp.explain`: graphs without memory, on a process group that may not exist.


@contextlib.contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """Play one rank of a process group of `ranks` whose collectives do nothing.

    Raises:
        RuntimeError: a process group exists already.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a process group exists already")
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers shardings with their mesh; an equal mesh of the next world has other process groups.
        _clear_sharding_prop_cache()


def mark_cacheable(function: Callable[..., Any], version: str) -> None:
    """Let AOTAutograd's cache keep graphs that call a function, under keys that hold the version.

    The function must be found by its module and name, and do the same wherever its arguments and version are the same.
    """
    import torch._inductor.config

    known = torch._inductor.config.unsafe_marked_cacheable_functions
    name = f"{function.__module__}.{function.__name__}"
    torch._inductor.config.unsafe_marked_cacheable_functions = {**known, name: version}


def fake_mode() -> Any:
    """A mode whose tensors have shape, dtype and device, and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Tensors that code makes on the fly, such as constants, are real.
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(tensor: torch.Tensor, mode: Any, device: torch.device | None = None) -> torch.Tensor:
    """A tensor without memory of the same kind, shape, layout and dtype.

    It pretends to be on `device`; None is where the tensor is, or the CPU for one on the meta device.
    """
    if isinstance(tensor, DTensor):
        local = fake_like(tensor._local_tensor, mode, device)
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    if device is None:
        device = torch.device("cpu") if tensor.is_meta else tensor.device
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def find_fake_mode(values: Iterable[Any]) -> Any:
    """The mode of the first fake tensor among values, None when there is none."""
    from torch._subclasses.fake_tensor import FakeTensor

    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def find_graph_break(graph: torch.fx.GraphModule) -> tuple[str, str] | None:
    """Why Dynamo ended a graph before the end of the code, and where ("file.py:12"); None when it did not."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    stack = list(reason.user_stack)
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "unknown place"
    return str(reason.reason).strip().splitlines()[0], place


def compilations() -> list[Any]:
    """What Dynamo remembers of its last compilations, oldest first; it forgets all but the last dozens."""
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def recompile_reasons(known: Iterable[Any]) -> list[tuple[str, str]]:
    """Why Dynamo compiled code again, and which ("file.py:12"), in compilations that are not `known`."""
    old = set(map(id, known))
    return [
        (str(item.recompile_reason).strip().splitlines()[0], f"{item.co_filename}:{item.co_firstlineno}")
        for item in compilations()
        if id(item) not in old and getattr(item, "recompile_reason", None)
    ]


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function whose compilations are its own, and go with it.

    Dynamo keeps compilations with the code that they are of, and goes over to eager mode after 8 (`recompile_limit`):
    functions that share code share that number.
    """
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
