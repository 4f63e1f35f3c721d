"""A process group without peers: values of a world of identical ranks, times of a profile, the order of a queue."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.lanes import Instant, Stream, Thread
from benchmarks.modelled_group import (
    Collective,
    first_shard,
    modelled_world,
    repeat_first_shards,
)
from inductor_passes import PassConfig, options
from inductor_passes.costs.collective import CollectiveModel
from inductor_passes.costs.profiles import load_profile
from inductor_passes.costs.topology import topology_of
from inductor_passes.debug import AotEagerBackend
from simplefsdp import simple_fsdp

RANKS = 4
PROFILE = "cpu_gloo"
MS = 10**6


@pytest.fixture
def world():
    with modelled_world(RANKS, PROFILE, Instant()) as made:
        yield made


class Net(nn.Module):
    """Rows that `RANKS` does not divide, a bias, a parameter read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 7)
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.tanh(self.up(x))) * self.scale + self.scale).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def plain_net() -> Net:
    """The model that a world of identical ranks computes with."""
    model = net()
    repeat_first_shards(model.parameters(), RANKS)
    return model


def losses(model: nn.Module, step: nn.Module, whole: bool = False) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps of SGD and the first shards at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(3):
        loss = step(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if whole:
            repeat_first_shards(model.parameters(), RANKS)
        found.append(loss.item())
    if whole:
        return found, [first_shard(p.detach(), RANKS) for p in model.parameters()]
    return found, [p.detach().to_local() for p in model.parameters()]


def assert_same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def test_compiled_model_with_passes_equals_a_plain_one(world):
    reference = losses(plain := plain_net(), plain, whole=True)
    model = simple_fsdp(net(), init_device_mesh("cpu", (RANKS,)))
    backend = AotEagerBackend(PassConfig("block", ("up", "down"), profile=PROFILE))
    assert_same(losses(model, torch.compile(model, backend=backend, fullgraph=True)), reference)
    assert {item.kind for item in world.log} >= {"all_gather", "reduce_scatter"}
    assert reference[0][2] < reference[0][0]


def test_fsdp2_equals_a_plain_model(world):
    reference = losses(plain := plain_net(), plain, whole=True)
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    assert_same(losses(model, model), reference)


def test_inductor_code_with_collectives_in_flight_equals_a_plain_model():
    def layer():
        torch.manual_seed(0)
        return nn.Linear(8, 8, bias=False)

    plain, x = layer(), torch.randn(3, 8)
    repeat_first_shards(plain.parameters(), RANKS)
    config = PassConfig(profile=PROFILE)
    with modelled_world(RANKS, PROFILE, Thread()):
        model = simple_fsdp(layer(), init_device_mesh("cpu", (RANKS,)), passes=config)
        compiled = torch.compile(model, fullgraph=True, options=options(config) | {"fx_graph_cache": False})
        results = [step(x) for step in (plain, compiled)]
        for result in results:
            result.square().sum().backward()
    assert torch.equal(*results)
    assert torch.equal(model.weight.grad.to_local(), first_shard(plain.weight.grad, RANKS))


def test_hybrid_worlds_reduce_over_both_groups(world):
    model = simple_fsdp(net(), init_device_mesh("cpu", (2, 2)))
    world.log.clear()
    model(torch.randn(5, 6)).backward()
    kinds = [(item.kind, item.ranks) for item in world.log]
    assert kinds.count(("reduce_scatter", 2)) == kinds.count(("all_reduce", 2)) == 5


@pytest.mark.parametrize(
    ("op", "factor"),
    [(dist.ReduceOp.SUM, RANKS), (dist.ReduceOp.AVG, 1), (dist.ReduceOp.MAX, 1), (dist.ReduceOp.MIN, 1)],
)
def test_reductions_are_those_of_equal_ranks(world, op, factor):
    tensor = torch.arange(8.0)
    dist.all_reduce(tensor, op)
    assert torch.equal(tensor, torch.arange(8.0) * factor)
    part = torch.empty(2)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, torch.arange(8.0), op)
    assert torch.equal(part, torch.arange(2.0) * factor)


def test_gathers_repeat_the_own_shard(world):
    whole = torch.empty(8)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, torch.arange(2.0))
    assert whole.tolist() == [0, 1] * RANKS
    objects = [None] * RANKS
    dist.all_gather_object(objects, "same")
    assert objects == ["same"] * RANKS


def test_unknown_reductions_are_refused(world):
    with pytest.raises(ValueError, match="reduces with sum, avg"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.PRODUCT)


def test_a_collective_takes_what_the_profile_says(world):
    dist.all_reduce(torch.ones(1000))
    profile = load_profile(PROFILE)
    topology = topology_of(range(RANKS), profile.value("ranks_per_node"))
    expected = CollectiveModel(profile).time_ns("all_reduce", topology, 4000)
    assert world.log == [Collective("all_reduce", RANKS, 4000, expected)]
    world.timed = False
    dist.all_reduce(torch.ones(1000))
    assert world.log[-1].time_ns == 0


def test_a_second_world_is_refused_and_the_first_leaves_nothing_behind():
    with (
        modelled_world(2, PROFILE, Instant()),
        pytest.raises(RuntimeError, match="without a process group"),
        modelled_world(2, PROFILE, Instant()),
    ):
        pass
    assert not dist.is_initialized()
    with modelled_world(3, PROFILE, Instant()):
        assert dist.get_world_size() == 3


def test_a_thread_works_off_one_collective_after_the_other_beside_the_caller():
    lane = Thread()
    order = []
    begin = time.perf_counter_ns()
    works = [lane.start(lambda i=i: order.append(i), 20 * MS, 0, ()) for i in range(3)]
    issued = time.perf_counter_ns() - begin
    works[2].wait()
    taken = time.perf_counter_ns() - begin
    lane.close()
    assert order == [0, 1, 2]
    assert taken >= 60 * MS > issued
    assert all(work.is_completed() for work in works)


def test_an_error_on_the_thread_reaches_who_waits():
    lane = Thread()
    failing = lane.start(lambda: [].pop(), 0, 0, ())
    with pytest.raises(IndexError):
        failing.wait()
    assert lane.start(lambda: None, 0, 0, ()).wait()
    lane.close()


def test_parameters_become_their_first_shard_repeated():
    tensor = torch.arange(10.0)
    repeat_first_shards([tensor], 4)
    assert tensor.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


@pytest.mark.gpu
def test_a_stream_is_held_as_long_as_asked_and_only_who_waits_is_held():
    device = torch.device("cuda")
    lane = Stream(device, 10**12)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    with modelled_world(RANKS, "h100_sxm", lane, "cuda") as world:
        whole, shard = torch.empty(8, device=device), torch.arange(2.0, device=device)
        marks[0].record()
        work = lane.start(lambda: whole.copy_(shard.repeat(RANKS)), 20 * MS, 0, (whole, shard))
        torch.ones(8, device=device).sum()
        marks[1].record()
        work.wait()
        marks[2].record()
        torch.cuda.synchronize()
        assert whole.tolist() == [0, 1] * RANKS
        dist.all_reduce(whole)
        assert whole.tolist() == [0, RANKS] * RANKS
        assert world.log[-1].time_ns > 0
    free, held = (marks[0].elapsed_time(mark) for mark in marks[1:])
    assert free < 10
    assert 16 < held < 30
