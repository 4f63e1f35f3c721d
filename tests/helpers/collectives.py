"""What collectives ran, or stand in a graph: kind, group size, dtype, bytes, in order.

Owns: reading collectives from dispatched operators and from FX nodes into one comparable form. Must not know:
why a program issues them.

`record_collectives()` sees eager programs (the `c10d` operators of FSDP2, the functional ones of DTensor) and
compiled ones (Inductor's code calls functional operators). `graph_collectives(graph)` reads an `fx.Graph`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operator name -> kind. Names inside a namespace do not clash, so both namespaces share the table.
_KINDS = {
    # _c10d_functional
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    # c10d
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_": "reduce",
}
_NAMESPACES = ("_c10d_functional", "c10d")
# What the operators' schemas call the tensors they send.
_INPUT_NAMES = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors")
# Collectives that send nothing worth counting, and the second half of an asynchronous pair.
_NOT_COUNTED = ("wait_tensor", "barrier", "monitored_barrier_", "check_for_nan", "_wrap_tensor_autograd")


@dataclass(frozen=True)
class Collective:
    """One collective as one rank sees it. Equality ignores what differs by rank or cannot always be read.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, gather, scatter or reduce.
        group_size: number of ranks that take part.
        dtype: element type of what is sent.
        size_bytes: bytes of the largest tensor on this rank: a gather's output, otherwise the input.
        ranks: global ranks of the group, in group order.
        reduce_op: "sum", "avg", ...; `None` where nothing is reduced and for `c10d` operators, which hide it.
    """

    kind: str
    group_size: int
    dtype: torch.dtype
    size_bytes: int
    ranks: tuple[int, ...] = field(compare=False)
    reduce_op: str | None = field(compare=False)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        operation = f" {self.reduce_op}" if self.reduce_op else ""
        return f"{self.kind}{operation} {dtype} {self.size_bytes} B over {self.group_size}"


def counts_by_kind(collectives: list[Collective]) -> dict[str, int]:
    """Return how many collectives of each kind there are, kinds in alphabetical order."""
    kinds = [item.kind for item in collectives]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


@contextmanager
def record_collectives() -> Iterator[list[Collective]]:
    """Record the collectives the block runs, eager or compiled, forward and backward, in issue order."""
    mode = _RecordingMode()
    with mode:
        yield mode.collectives


def graph_collectives(graph: torch.fx.Graph) -> list[Collective]:
    """Return the collectives of a graph whose nodes carry `meta["val"]`, in graph order."""
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
            collective = _read_collective(node.target, args, kwargs)
            if collective is not None:
                found.append(collective)
    return found


class _RecordingMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[Collective] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile runs its function uncompiled under this mode

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs first and issues the collectives itself
        kwargs = kwargs or {}
        collective = _read_collective(func, args, kwargs)
        if collective is not None:
            self.collectives.append(collective)
        return func(*args, **kwargs)


def _read_collective(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Collective | None:
    name = func._opname
    if func.namespace not in _NAMESPACES or name in _NOT_COUNTED:
        return None
    if name not in _KINDS:
        raise NotImplementedError(f"{func} is missing from the table of collectives in {__name__}")
    names = [argument.name for argument in func._schema.arguments]
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = _flatten(next(bound[key] for key in _INPUT_NAMES if key in bound))
    group = bound["process_group"] if "process_group" in bound else bound["group_name"]
    ranks = tuple(dist.get_process_group_ranks(_process_group(group)))
    input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    kind = _KINDS[name]
    reduce_op = bound.get("reduce_op")
    return Collective(
        kind=kind,
        group_size=len(ranks),
        dtype=tensors[0].dtype,
        size_bytes=int(input_bytes) * (len(ranks) if kind == "all_gather" else 1),
        ranks=ranks,
        reduce_op=reduce_op if isinstance(reduce_op, str) else None,
    )


def _flatten(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [leaf for item in value for leaf in _flatten(item)]


def _process_group(group: Any) -> dist.ProcessGroup:
    if isinstance(group, str):
        return distributed_c10d._resolve_process_group(distributed_c10d.GroupName(group))
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
