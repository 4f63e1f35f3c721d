# The overloads that pybind11 describes cannot be overridden one by one.
# mypy: disable-error-code="override,assignment,arg-type,call-arg"
"""A process group without peers: collectives take the time a hardware profile gives, and fill their outputs.

Owns the values and the prices of collectives. Must not know what uses them, or how time is spent (`lanes`).

This process is the first rank of a world whose ranks all hold and compute the same: a gather repeats the own shard, a
mean of gradients is the own gradient, and a reduce-scatter keeps the first part. So numbers are those of a model whose
every parameter is its first shard, repeated (`repeat_first_shards`), and memory, kernels and their order are those of
one rank of a real world.

    with modelled_world(64, "h100_sxm", Instant()) as world:
        mesh = init_device_mesh("cpu", (64,))
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.lanes import Instant, Lane
from inductor_passes.costs.collective import CollectiveModel
from inductor_passes.costs.profiles import HardwareProfile, load_profile
from inductor_passes.costs.topology import topology_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BACKEND = "modelled"
_UNCHANGED = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective that a group ran.

    Args:
        kind: as the cost model calls it: "all_gather", "reduce_scatter", "all_reduce".
        ranks: ranks of the group.
        size_bytes: full payload: the gathered tensor, the gradient before it is scattered.
        time_ns: what the profile says it takes; 0 where time is switched off.
    """

    kind: str
    ranks: int
    size_bytes: int
    time_ns: int


class World:
    """What the groups of one modelled world share.

    Args:
        profile: gives the time of each collective.
        lane: where collectives of tensors on the device of interest spend their time. Those of CPU tensors take none
            when the lane is a GPU's: they are set-up.

    Attributes:
        log: every collective since the list was last cleared.
        timed: whether collectives take time. Off, the same program runs with a network that is infinitely fast.
    """

    def __init__(self, profile: HardwareProfile, lane: Lane, device_type: str) -> None:
        self.log: list[Collective] = []
        self.timed = True
        self._model = CollectiveModel(profile)
        self._ranks_per_node = profile.value("ranks_per_node")
        self._lane = lane
        self._device_type = device_type
        self._setup = Instant()

    def price_ns(self, kind: str, ranks: Sequence[int], size_bytes: int) -> int:
        """Time of one collective by the profile; nodes hold consecutive ranks."""
        return self._model.time_ns(kind, topology_of(ranks, self._ranks_per_node), size_bytes)

    def start(
        self, kind: str, ranks: Sequence[int], fills: Sequence[_Fill], payloads: Iterable[torch.Tensor]
    ) -> dist.Work:
        """Queue one collective: what to write, and the full tensors whose bytes it moves."""
        size_bytes = sum(tensor.nbytes for tensor in payloads)
        time_ns = self.price_ns(kind, ranks, size_bytes) if self.timed else 0
        tensors = [tensor for fill in fills for tensor in (fill.target, fill.source)]
        moved_bytes = sum(fill.moved_bytes for fill in fills)
        here = all(tensor.device.type == self._device_type for tensor in tensors)
        if here:
            self.log.append(Collective(kind, len(ranks), size_bytes, time_ns))

        def fill_all() -> None:
            for fill in fills:
                fill()

        with torch.no_grad():
            return (self._lane if here else self._setup).start(fill_all, time_ns, moved_bytes, tensors)


@dataclasses.dataclass(frozen=True)
class _Fill:
    """`target` becomes `source` times `factor`, repeated as often as it goes into it."""

    target: torch.Tensor
    source: torch.Tensor
    factor: int = 1

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return 0 if self._changes_nothing else self.target.nbytes + self.source.nbytes

    @property
    def _changes_nothing(self) -> bool:
        same = self.target.data_ptr() == self.source.data_ptr() and self.target.numel() == self.source.numel()
        return self.source.numel() == 0 or (same and self.factor == 1)

    def __call__(self) -> None:
        if self._changes_nothing:
            return
        repeated = self.target.view(-1, self.source.numel())
        source = self.source.reshape(1, -1).expand_as(repeated)
        if self.factor == 1:
            repeated.copy_(source)
        else:
            torch.mul(source, self.factor, out=repeated)


class ModelledGroup(dist.ProcessGroup):
    """The process group. Names of methods are torch's: those of 2.13 and, where they differ, those of 2.11.

    Args:
        world: times, and where they are spent.
        ranks: global ranks of the group; this process is the first.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        super().__init__(0, len(ranks))
        self._shared = world
        self._ranks = tuple(ranks)
        self._name = ""

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        """The name under which torch registered the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        fills = [_Fill(output, source) for output, source in zip(outputs, inputs, strict=True)]
        return self._shared.start("all_gather", self._ranks, fills, outputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [source])

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        fills = [_Fill(part, source) for parts, source in zip(outputs, inputs, strict=True) for part in parts]
        return self._shared.start(
            "all_gather", self._ranks, fills, [part for parts in outputs for part in parts]
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        factor = self._factor(opts)
        fills = [
            _Fill(output, source.reshape(-1)[: output.numel()], factor)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return self._shared.start("reduce_scatter", self._ranks, fills, inputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        factor = self._factor(opts)
        fills = [_Fill(tensor, tensor, factor) for tensor in tensors]
        return self._shared.start("all_reduce", self._ranks, fills, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._shared.start("broadcast", self._ranks, [_Fill(t, t) for t in tensors], tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._shared.start("barrier", self._ranks, [], [])

    # torch 2.11 and 2.12 call the same things so; delete with support for them.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    allreduce_coalesced = allreduce

    def _factor(self, opts: Any) -> int:
        """What a reduction over equal values multiplies them by."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if op == dist.ReduceOp.SUM:
            return len(self._ranks)
        if any(op == known for known in _UNCHANGED):
            return 1
        raise ValueError(f"a modelled group reduces with sum, avg, min, max, band or bor, not with {op}")


@contextlib.contextmanager
def modelled_world(
    ranks: int, profile: str | HardwareProfile, lane: Lane, device_type: str = "cpu"
) -> Iterator[World]:
    """Make this process the first rank of a modelled world, as its default process group.

    Args:
        ranks: ranks of the world.
        profile: hardware profile that gives the times: a shipped name, a path, or the profile itself.
        lane: where the time is spent; closed at the end.
        device_type: type of the tensors whose collectives take time.

    Raises:
        RuntimeError: the process has a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a modelled world needs a process without a process group")
    known = profile if isinstance(profile, HardwareProfile) else load_profile(profile)
    world = World(known, lane, device_type)

    def create(options: Any, group_options: object) -> ModelledGroup:
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        return ModelledGroup(world, members)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, rank=0, world_size=ranks, store=dist.HashStore())
    try:
        with _gather_into_given_memory():
            yield world
    finally:
        lane.close()
        dist.destroy_process_group()


def repeat_first_shards(parameters: Iterable[torch.Tensor], ranks: int) -> None:
    """Give whole parameters the values that a modelled world of `ranks` gathers: the first shard, repeated.

    Args:
        parameters: plain tensors of shape (n, ...), sharded along dim 0 into parts of ceil(n / ranks) rows.
        ranks: size of the group that shards.
    """
    with torch.no_grad():
        for parameter in parameters:
            rows = first_shard(parameter, ranks)
            times = -(-parameter.shape[0] // rows.shape[0])
            repeated = rows.clone().repeat(times, *[1] * (parameter.dim() - 1))
            parameter.copy_(repeated[: parameter.shape[0]])


def first_shard(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """The rows of a whole tensor that the first of `ranks` ranks holds: ceil(n / ranks) of them."""
    return tensor[: -(-tensor.shape[0] // ranks)]


@contextlib.contextmanager
def _gather_into_given_memory() -> Iterator[None]:
    """Have the out-variant of the functional gather call the group.

    torch's own goes past the methods of a Python process group to a backend of the device, which this one has not.
    Checked on torch 2.11 and 2.13.
    """

    def gather(source: torch.Tensor, group_size: int, group_name: str, *, out: torch.Tensor) -> torch.Tensor:
        group = torch._C._distributed_c10d._resolve_process_group(group_name)
        work = group.all_gather_single(out, source)
        torch._C._distributed_c10d._register_work(out, work)
        return out

    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        for key in ("CPU", "CUDA"):
            library.impl("all_gather_into_tensor_out", gather, key)
        yield
