"""`simplefsdp plan --scale`: facts of other devices, groups and batches by arithmetic, and what the table shows."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from inductor_passes.costs.profiles import load_profile
from simplefsdp.cli import main
from simplefsdp.explainer.hardware import GIB
from simplefsdp.explainer.runs import once_each
from simplefsdp.planner.build import Parameter, Traced
from simplefsdp.planner.request import Request
from simplefsdp.planner.rescale import RescaleError, World, at_batch, at_world
from simplefsdp.planner.scale import DEVICES, Load, Scaling, loads, ways, ways_text
from simplefsdp.planner.step import Step
from tests.helpers.tower import explained

PROFILE = load_profile("h100_sxm")
ROWS = 40  # divides by none of the factors above 8: padded there


class Small(nn.Module):
    """An embedding, two layers of which one is checkpointed, and a head that adds a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 16)
        self.up = nn.Linear(16, 48, bias=False)
        self.down = nn.Linear(48, 16, bias=False)
        self.head = nn.Linear(16, ROWS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + checkpoint(self._middle, x, use_reentrant=False)
        return self.head(x)

    def _middle(self, x):
        return self.down(torch.tanh(self.up(x)))


def build():
    """What `--model tests.simplefsdp.test_plan_scale:build` names."""
    return Small(), (torch.zeros(4, 32, dtype=torch.int64),)


@functools.cache
def facts_of(devices, factor, batch=4):
    torch.compiler.reset()
    report = explained(Small, ranks=devices, batch=batch, sharding_factor=factor, planner="greedy", blocks=())
    return report.graphs


def rows():
    return {name: parameter.shape[0] for name, parameter in Small().named_parameters()}


@pytest.fixture(scope="module")
def traced():
    """Forward and backward, by world: sharded over all, hybrid, and replicated on two numbers of devices."""
    return {where: facts_of(*where) for where in ((16, 16), (32, 8), (16, 1), (64, 1))}


def test_facts_on_other_devices_and_in_other_groups_equal_a_trace_there(traced):
    sharded = [where for where in traced if where[1] > 1]
    kinds = set()
    for old, new in [*itertools.permutations(sharded, 2), ((16, 1), (64, 1)), ((64, 1), (16, 1))]:
        for here, there in zip(traced[old], traced[new], strict=True):
            assert at_world(here, PROFILE, World(*old), World(*new), rows()) == there, (old, new, here.kind)
            kinds |= {(item.key.kind, item.key.group) for item in there.problem.collectives}
    assert kinds >= {("all_gather", "group0"), ("reduce_scatter", "group0"), ("all_reduce", "group1")}


def test_without_rows_sizes_stay_as_they_were_padded(traced):
    here = at_world(traced[16, 16][0], PROFILE, World(16, 16), World(32, 8), {})
    sizes = [item.size_bytes for item in here.problem.collectives]
    assert sizes == [item.size_bytes for item in traced[16, 16][0].problem.collectives]
    assert sizes != [item.size_bytes for item in traced[32, 8][0].problem.collectives]


def test_replicated_and_sharded_steps_do_not_follow_from_each_other(traced):
    for old, new in (((16, 1), (16, 16)), ((16, 16), (16, 1))):
        with pytest.raises(RescaleError, match="replicated there and sharded here"):
            at_world(traced[old][1], PROFILE, World(*old), World(*new), rows())


def test_other_batches_follow_from_two(traced):
    small, large = facts_of(16, 16, batch=1), facts_of(16, 16, batch=8)
    for low, middle, high in zip(small, traced[16, 16], large, strict=True):
        found = at_batch(low, 1, high, 8, 4)
        assert [value.size_bytes for value in found.values] == [value.size_bytes for value in middle.values]
        assert [region.flops for region in found.regions] == [region.flops for region in middle.regions]
        times = zip(found.problem.region_ns, middle.problem.region_ns, strict=True)
        assert all(abs(one - other) <= 2 for one, other in times), "ns"
        assert found.traffic == middle.traffic
        assert at_batch(low, 1, high, 8, 8) == high


def test_batches_of_different_graphs_are_refused(traced):
    low = traced[16, 16][0]
    with pytest.raises(RescaleError, match="forward: batches 1 and 2 give different graphs"):
        at_batch(low, 1, dataclasses.replace(low, values=low.values[:-1]), 2, 4)


def test_a_world_must_divide():
    with pytest.raises(ValueError, match="16 devices do not divide into groups of 5"):
        World(16, 5)


def step(devices=16, factor=16, batch=4, tokens=128):
    """A step as the command traces it, of the model above."""
    request = Request("small", None, None, batch, "none", devices, factor, "bf16", 4.0, True, False, "greedy")
    parameters = {name: Parameter.of(item) for name, item in Small().named_parameters()}
    graphs = facts_of(devices, factor, batch)
    traced = Traced(graphs, once_each(facts.kind for facts in graphs), parameters, "", ())
    return Step(request, "Small", traced, tokens * batch // 4, 1e6)


def series_of(scaling, factor=None):
    """Points of each way to shard, or why there are none, by name."""
    return {way.name: points for way, points in scaling.series(factor)}


def test_each_device_stores_the_largest_shard():
    traced = step().traced
    for factor, rows, up_rows, down_rows in ((1, ROWS, 48, 16), (3, 14, 16, 6), (16, 3, 3, 1)):
        expected = 4 * (rows * (16 + 16 + 1) + up_rows * 16 + down_rows * 48)
        assert traced.stored(factor).total == expected, factor


def test_what_each_device_computes():
    weak = list(loads([World(8, 8), World(16, 16)], 4, None))
    assert weak == [Load(World(8, 8), 4), Load(World(16, 16), 4)]
    strong = list(loads([World(number, 8) for number in (8, 16, 32, 64, 128)], 4, 96))
    # 12, 6, 3 and - for 64, where 96 does not divide -
    assert [(item.world.devices, item.batch, item.passes) for item in strong] == [
        (8, 4, 3),
        (16, 3, 2),
        (32, 3, 1),
    ]


def test_every_number_of_nodes_may_share_a_copy():
    every = {way.name: way for way in ways(None, 8)}
    hybrid = [f"sharded over {factor}" for factor in DEVICES[:-1]]
    assert list(every) == ["sharded over all", *hybrid, "replicated"]
    assert [name for name, way in every.items() if way.in_full] == [
        "sharded over all",
        "sharded over 8",
        "replicated",
    ]
    covered = {(world.devices, world.factor) for way in every.values() for world in way.worlds}
    assert covered == {
        (devices, factor) for devices in DEVICES for factor in (1, *DEVICES) if factor <= devices
    }
    assert [world.devices for world in ways(16, 8)[0].worlds] == list(DEVICES[1:])
    assert [way.name for way in ways(None, 1)][:2] == ["sharded over all", "sharded over 8"]
    assert "sharded over 8" not in [way.name for way in ways(None, 16)]


def test_ways_stand_side_by_side_with_the_fastest_that_fits_marked():
    found = series_of(
        Scaling(step(), PROFILE, 80 * GIB, "greedy", None, lambda request: step(16, request.factor))
    )
    points = {name: item for name, item in found.items() if not isinstance(item, str)}
    head, *lines = ways_text(points, 80 * GIB).splitlines()
    assert head.split()[:6] == ["devices", "over", "all", "over", "8", "over"]
    assert [line.split()[0] for line in lines] == [str(number) for number in DEVICES]
    for line, devices in zip(lines, DEVICES, strict=True):
        here = {
            name: point.step_ns
            for name, item in points.items()
            for point in item
            if point.load.world.devices == devices
        }
        assert line.split()[1:][list(here.values()).index(min(here.values()))].endswith("*"), line
        assert line.count("*") == 1
        assert len(line.split()) == 1 + len(here)
    large = max(point.total_bytes for item in points.values() for point in item) - 1
    text = ways_text(points, large)
    assert "(" in text
    assert all(not cell.endswith("*)") for cell in text.split())


def test_strong_scaling_takes_passes_and_traces_what_is_needed():
    asked: list[Request] = []

    def tracer(request):
        asked.append(request)
        return step(16, 16 if request.factor > 1 else 1, request.batch)

    series = series_of(Scaling(step(), PROFILE, 80 * GIB, "greedy", 256, tracer))
    assert series["sharded over 512"] == "a global batch of 256 divides among none of these devices"
    full, hybrid, replicated = (series[name] for name in ("sharded over all", "sharded over 8", "replicated"))
    assert [point.load.world.devices for point in full] == [8, 16, 32, 64, 128, 256]
    assert [(point.load.batch, point.load.passes) for point in full] == [
        (4, 8),
        (4, 4),
        (4, 2),
        (4, 1),
        (2, 1),
        (1, 1),
    ]
    assert [point.load.world for point in hybrid] == [World(devices, 8) for devices in (16, 32, 64, 128, 256)]
    first = full[0]
    passes = sum(line.step_ns for line in first.prediction.timelines)
    assert first.step_ns == 8 * passes + first.prediction.optimizer_ns
    assert first.tokens_per_s == pytest.approx(8 * 128 / (first.step_ns / 1e9))
    assert first.total_bytes == first.prediction.memory.total_bytes + first.prediction.memory.parameters
    assert full[3].total_bytes == full[3].prediction.memory.total_bytes, "one pass keeps nothing"
    # The low batch, and replicated parameters with both batches: all else follows.
    assert [(request.factor, request.batch) for request in asked] == [(16, 1), (1, 4), (1, 1)]
    assert len(replicated) == 6
    stored = step().traced.stored
    for points in (full, hybrid, replicated):
        for point in points:
            assert point.prediction.memory.parameters == stored(point.load.world.factor).total


def test_one_device_tells_nothing_about_several():
    asked: list[Request] = []

    def tracer(request):
        asked.append(request)
        return step(request.devices, request.factor, request.batch)

    series = series_of(Scaling(step(1, 1), PROFILE, 80 * GIB, "greedy", None, tracer))
    for points in series.values():
        assert all(point.exposed_ns > 0 for point in points)
    assert [(request.devices, request.factor) for request in asked] == [(8, 8), (8, 1)]
    with pytest.raises(RescaleError, match="one device"):
        at_world(facts_of(1, 1)[0], PROFILE, World(1, 1), World(8, 1), rows())


def test_a_sharding_factor_that_fits_no_number_of_devices_is_named():
    series = series_of(Scaling(step(), PROFILE, 80 * GIB, "greedy", None, lambda request: step()), 12)
    assert list(series.values()) == ["none of these numbers of devices divides by a sharding factor of 12"]


def test_replicas_that_cannot_fit_are_not_traced():
    def tracer(request):
        raise AssertionError(request)

    series = series_of(Scaling(step(), PROFILE, 20_000, "greedy", None, tracer))
    assert series["replicated"].startswith("does not fit: parameters, gradients and optimizer alone take")
    assert all(point.fit(20_000) == "no" for point in series["sharded over all"])


def test_the_command_prints_and_draws_all_ways_to_shard(capsys, tmp_path):
    picture = tmp_path / "new" / "scale.svg"
    arguments = ["--model", f"{__name__}:build", "--gpus", "16", "--planners", "greedy", "--scale"]
    assert main(["plan", *arguments, "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    weak, *tables, together, trust = said[said.index("weak scaling") :].split("\n\n")
    assert trust.startswith("How far to trust this")
    assert "modelled, hardware profile h100_sxm" in weak
    assert [table.splitlines()[0] for table in tables] == ["sharded over all", "sharded over 8", "replicated"]
    devices = [[line.split()[0] for line in table.splitlines()[2:]] for table in tables]
    assert devices[0] == devices[2] == [str(number) for number in DEVICES]
    assert devices[1] == [str(number) for number in DEVICES[1:]]
    assert together.startswith("all ways to shard: step, ms; * the fastest that fits")
    assert [line.split()[0] for line in together.splitlines()[2:]] == [str(number) for number in DEVICES]
    drawn = picture.read_text()
    assert "sharded over 8" in drawn
    assert "sharded over 2048" in drawn
    assert "does not fit" in drawn
