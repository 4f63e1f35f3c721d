"""What benchmarks write: tables, targets, predictions, pictures; and how they read traces and memory."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torch import nn

import simplefsdp
from benchmarks import compile_cost, memory, sweep, train_step
from benchmarks.allocations import forget_peak, peak_above_start, peak_resident_set, resident_bytes
from benchmarks.compile_cost import Cost
from benchmarks.contestants import Setting, config_of, contestants
from benchmarks.gpu_overlap import NO_GPU
from benchmarks.gpu_overlap import main as gpu_overlap
from benchmarks.kernel_trace import activities, collectives
from benchmarks.machine import Machine, busy_s, machine_of
from benchmarks.memory import Footprint
from benchmarks.names import (
    AUTO,
    COMMUNICATION,
    COMPUTE,
    DDP,
    EAGER,
    EAGER_COMPUTE,
    FSDP2,
    FSDP2_COMPILED,
    NO_PASSES,
    NONE,
    OPTIMIZER,
    STOCK_OVERLAP,
)
from benchmarks.pictures import draw_fits, draw_steps
from benchmarks.prediction import Outlook, Prediction, Schedules, bound_s, judge, predict, scale_to, step_s
from benchmarks.stock import overlap_scheduling
from benchmarks.targets import targets
from benchmarks.workload import Workload
from inductor_passes import PassConfig
from inductor_passes.costs.profiles import load_profile, parse_profile
from inductor_passes.planners import PLANNER_NAMES
from simplefsdp.planner.build import planned

MIB = 2**20


def verdicts(**medians):
    names = {"compute": COMPUTE, "communication": COMMUNICATION, "auto": AUTO, "fsdp2": FSDP2, "none": NONE}
    names["stock"] = STOCK_OVERLAP
    return [item.verdict for item in targets({names[key]: value for key, value in medians.items()})]


def test_targets_are_met_or_missed_at_their_bounds():
    base = {"compute": 1.0, "communication": 1.0, "fsdp2": 2.0, "stock": 1.2, "none": 1.1}
    assert verdicts(auto=1.1, **base) == ["met"] * 4
    assert verdicts(auto=1.21, **base) == ["missed"] * 4


def test_targets_that_cannot_be_judged_say_why():
    found = verdicts(compute=1.0, communication=2.0, auto=2.1, fsdp2=4.0)
    assert found[0] == "met"
    assert found[1] == "does not apply: communication / compute is 2.00"
    assert found[2:] == ["no stock pass was measured", f"{NONE} was not measured"]
    assert set(verdicts(compute=1.0, communication=1.0)) == {f"{AUTO} was not measured"}


def test_a_result_says_what_was_measured_under_which_conditions():
    found = {
        "times": {
            COMPUTE: [1.0, 1.0, 4.0],
            COMMUNICATION: [2.0, 2.0, 2.0],
            OPTIMIZER: [0.1, 0.1, 0.1],
            AUTO: [2.0, 2.2, 2.6],
        },
        "busy_s": {key: [1.0] for key in (COMPUTE, COMMUNICATION, OPTIMIZER)} | {AUTO: [1.2, 1.3, 1.4]},
        "losses": {AUTO: 1.5},
        "failures": {"DDP": "RuntimeError: no"},
        "setup_s": {AUTO: 12.3},
        "load": [0.1, 2.0],
    }
    outlook = Outlook((Prediction(AUTO, 1.98, 2.2),), bound_s=1.9)
    text = train_step.record(
        Workload(rounds=9),
        "a network",
        "python -m benchmarks.train_step",
        found,
        Machine(0.9, 1.0, 0.1, pace=0.5),
        outlook,
        "a.png",
        "h100",
    )
    assert "3 rounds of 2 steps; communication / compute = 2.00" in text
    assert "| ours, auto | 2.200 | 2.000 to 2.600 | 1.10 | 1.300 | 1.500000 | 12 |" in text
    assert "| DDP | failed: RuntimeError: no |" in text
    assert "load average 0.1 before and 2.0 after" in text
    assert "| 1.10 | 1.10 | met |" in text
    assert "| ours, auto | 2.200 | 1.980 | -10% |" in text
    assert "no plan takes less than 1.900 s" in text
    assert "![Step times](a.png)" in text
    assert "on the hardware profile h100; compute scaled" in text
    assert "to 50% of that speed" in text


def test_predictions_are_judged_by_order_and_error():
    right = [Prediction("a", 1.0, 1.1), Prediction("b", 2.0, 1.9)]
    assert judge(right).startswith("ranks as measured; largest error 9%")
    wrong = [*right, Prediction("c", 0.5, 2.0)]
    assert judge(wrong).startswith("2 of 3 pairs in the wrong order (a and c; b and c); largest error 75%")


class Stack(nn.Module):
    """Four square layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


@pytest.fixture(scope="module")
def stack_graphs():
    """Forward and backward of a stack of layers on two ranks."""
    wrap = {"passes": PassConfig(profile="cpu_gloo")}
    return simplefsdp.explain(Stack(), torch.randn(8, 64), ranks=2, wrap=wrap).graphs


def predicted(graphs, compute_s, optimizer_s=0.0, pace=1.0):
    return step_s(graphs, scale_to(compute_s, graphs), Machine(compute_s, compute_s, optimizer_s, pace))


def test_predicted_time_grows_with_compute_and_never_falls_below_communication(stack_graphs):
    alone = predicted(stack_graphs, 1e-9)
    assert alone > 0
    assert predicted(stack_graphs, 1000 * alone) == pytest.approx(1000 * alone, rel=0.02)
    assert predicted(stack_graphs, alone) < 2 * alone + 1e-9
    assert predicted(stack_graphs, 1e-9, optimizer_s=1.0) == pytest.approx(1.0 + alone)


def test_no_plan_beats_the_bound_which_judges_forward_and_backward_apart(stack_graphs):
    machine = Machine(1.0, 1.0, 0.5)
    for scale in (1e-3, 1.0, 10.0, 1e4):
        bound = bound_s(stack_graphs, scale, machine)
        for planner in PLANNER_NAMES:
            assert bound <= step_s(planned(stack_graphs, planner), scale, machine) + 1e-9
        compute = [scale * sum(facts.problem.region_ns) / 1e9 for facts in stack_graphs]
        sent = [sum(item.transfer_ns for item in facts.problem.collectives) / 1e9 for facts in stack_graphs]
        assert bound - machine.optimizer_s >= sum(map(max, compute, sent))
    assert bound - machine.optimizer_s == pytest.approx(sum(compute), rel=0.05)


def test_communication_that_needs_the_cores_of_compute_slows_it(stack_graphs):
    alone = predicted(stack_graphs, 1e-9)
    full, some, half = (predicted(stack_graphs, 4 * alone, pace=pace) for pace in (1.0, 0.75, 0.5))
    assert full < some < half < full + 0.5 * alone


def test_the_pace_of_compute_follows_from_the_cores_that_both_need():
    times = {COMPUTE: 1.1, EAGER_COMPUTE: 1.4, COMMUNICATION: 2.0, OPTIMIZER: 0.1}
    busy = {COMPUTE: 1.1, COMMUNICATION: 0.8}
    lone = {"all_gather": [(10, 100), (20, 300)]}
    expected = Machine(
        1.0, pytest.approx(1.3), 0.1, pytest.approx(0.6), floor_s=pytest.approx(1.9), lone=lone
    )
    assert machine_of(times, busy, 1, lone) == expected
    assert machine_of(times, busy, 4, lone).pace == 1.0
    assert machine_of(times, busy, 0.25, lone).pace > 0, "compute never stops"


def test_a_lone_collective_takes_what_was_measured_and_between_sizes_a_straight_line():
    machine = Machine(1.0, 1.0, 0.1, lone={"all_gather": [(10, 100), (20, 300), (40, 400)]})
    sizes = (1, 10, 15, 20, 40, 60)
    assert [machine.lone_ns("all_gather", size) for size in sizes] == [100, 100, 200, 300, 400, 500]
    assert machine.lone_ns("all_reduce", 10) == 0


def test_a_busy_core_is_seen():
    before, begin = busy_s(), time.perf_counter()
    while time.perf_counter() - begin < 0.5:
        pass
    assert busy_s() - before > 0.3


@pytest.fixture(scope="module")
def schedules():
    """Of one layer on two ranks."""
    return Schedules(Workload(layers=1), "cpu_gloo", 2)


def test_every_contestant_has_a_schedule(schedules):
    found = {
        item.name: step_s(schedules.of(item), 1.0, Machine(0.0, 0.0, 0.0))
        for item in contestants(Setting(True, "cpu_gloo"))
    }
    assert min(found, key=lambda name: found[name]) in (DDP, NONE, AUTO)
    assert max(found, key=lambda name: found[name]) in (FSDP2, FSDP2_COMPILED, EAGER), (
        "collectives that block"
    )
    assert found[NONE] < 0.9 * found[NO_PASSES], "the pass over the final order is in the prediction"


def test_who_does_not_compile_is_predicted_with_the_compute_of_eager_mode(schedules):
    """As if eager compute took half of compiled compute, so long that it hides all communication."""
    entrants = contestants(Setting(True, "cpu_gloo"))
    medians = {item.name: 1.0 for item in entrants}
    seconds = 1000.0
    found = predict(schedules, entrants, medians, Machine(seconds, seconds / 2, 0.0)).predictions
    assert len(found) == len(entrants)
    for item in found:
        expected = seconds / 2 if item.name in (DDP, FSDP2, EAGER) else seconds
        assert item.predicted_s == pytest.approx(expected, rel=0.1), item.name


def test_collectives_that_block_cost_what_they_take(schedules):
    (eager,) = (item for item in contestants(Setting(True, "cpu_gloo")) if item.name == EAGER)
    graphs = schedules.of(eager)
    alone_ns = sum(
        facts.problem.alpha_ns[item.key] + item.transfer_ns + facts.problem.issue_ns
        for facts in graphs
        for item in facts.problem.collectives
    )
    compute_ns = sum(sum(facts.problem.region_ns) for facts in graphs)
    assert step_s(graphs, 1.0, Machine(0.0, 0.0, 0.0)) == pytest.approx(
        (alone_ns + compute_ns) / 1e9, rel=0.05
    )


def test_only_collectives_that_find_the_link_idle_take_as_long_as_alone(schedules):
    """A lone gather takes twice its time in a queue: who waits for each pays for each, who queues them for few."""
    by_name = {item.name: item for item in contestants(Setting(True, "cpu_gloo"))}
    costs: dict[str, list[float]] = {}
    for name in (EAGER, AUTO):
        graphs = schedules.of(by_name[name])
        gathers = [
            item for facts in graphs for item in facts.problem.collectives if item.key.kind == "all_gather"
        ]
        low, high = (pick(gathers, key=lambda item: item.size_bytes) for pick in (min, max))
        alpha = graphs[0].problem.alpha_ns[low.key]
        points = [(item.size_bytes, 2 * (alpha + item.transfer_ns)) for item in (low, high)]
        costs[name] = [
            step_s(graphs, 1e-6, Machine(0.0, 0.0, 0.0, lone=lone)) for lone in ({}, {"all_gather": points})
        ]
    queued_ns = sum(alpha + item.transfer_ns for item in gathers)
    assert costs[EAGER][1] - costs[EAGER][0] == pytest.approx(queued_ns / 1e9, rel=0.1)
    assert 0 < costs[AUTO][1] - costs[AUTO][0] < 0.3 * queued_ns / 1e9


def test_contestants_run_with_the_options_of_the_setting():
    setting = Setting(True, "h100_sxm", memory_budget_gb=0.5)
    found = {item.name: item for item in contestants(setting)}
    assert found[AUTO].config == config_of(setting, "auto")
    assert found[AUTO].config.memory_budget_bytes == 5 * 10**8
    assert found[AUTO].config.profile == "h100_sxm"
    assert found[NO_PASSES].config is None
    assert len(found) == 11


def test_workload_counts_the_bytes_of_a_block():
    workload = Workload()
    layer = workload.model().layers[0]
    assert workload.block_bytes == sum(p.nbytes for p in layer.parameters())
    one, other = workload.tokens(0), workload.tokens(1)
    assert torch.equal(one[0][:, 1:], one[1][:, :-1])
    assert not torch.equal(one[0], other[0])


def test_memory_targets():
    found = {
        FSDP2: Footprint(100 * MIB, 0),
        NO_PASSES: Footprint(90 * MIB, 0),
        AUTO: Footprint(101 * MIB, 0),
    }
    rows = {row[0]: row[3] for row in memory.verdicts(found, 10 * MIB)}
    assert [verdict for text, verdict in rows.items() if "FSDP2" in text] == ["met", "missed"]
    assert [verdict for text, verdict in rows.items() if "budget" in text] == ["missed"]
    assert memory.verdicts(found, 11 * MIB)[-1][3] == "met"


def test_peak_of_tensors_counts_what_is_alive_at_once():
    kept = []

    def step():
        first = torch.empty(MIB, dtype=torch.uint8)
        del first
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        kept.append(torch.empty(MIB, dtype=torch.uint8))
        del second

    assert peak_above_start(step) == 3 * MIB
    base = torch.zeros(MIB, dtype=torch.uint8)
    assert resident_bytes([base, base[: MIB // 2], torch.zeros(10)]) == MIB + 40


def test_peak_of_the_process_sees_what_was_written():
    forget_peak()
    before = peak_resident_set()
    torch.ones(64 * MIB, dtype=torch.uint8)
    assert peak_resident_set() - before > 48 * MIB
    forget_peak()
    assert peak_resident_set() - before < 32 * MIB


def kernel(name, stream, begin, end):
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": begin,
        "dur": end - begin,
        "args": {"stream": stream},
    }


def test_traces_tell_how_much_of_a_collective_nothing_covered():
    spin = "spin_kernel(long)"
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500, "args": {}},
        kernel("mm", 7, 100, 130),
        kernel("copy", 20, 110, 120),
        kernel(spin, 20, 120, 180),
        kernel("mm", 7, 150, 160),
        kernel("add", 9, 155, 170),
        kernel(spin, 20, 200, 210),
    ]
    first, second = collectives(activities(events))
    assert (first.begin_us, first.end_us, first.exposed_us, first.kernels) == (10, 80, 30, 2)
    assert (second.exposed_us, second.kernels) == (10, 0)
    assert collectives(activities([])) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_gpu_script_says_so(capsys):
    assert gpu_overlap([]) == NO_GPU
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_a_sweep_becomes_a_profile():
    points = {
        kind: [(size, 2_000 + 3 * size) for size in (1000, 10_000, 100_000)]
        for kind in ("all_gather", "all_reduce")
    }
    base = load_profile("cpu_gloo")
    profile = parse_profile(sweep.with_fits(base, points, 3, "a test").to_json())
    fit = sweep.fits_of(profile, 3)["all_reduce"]
    assert (fit.alpha_ns, fit.bandwidth) == (2000, 333_333_333)
    assert {item.group_size for item in profile.collectives} == {
        item.group_size for item in base.collectives
    } | {3}
    found = {"points": points, "load": [0, 0]}
    text = sweep.record("a network", "a command", 3, found, profile, ("a.png", "a.json"))
    assert "| all_gather | 0.002 | 333.3 | 3 sizes, worst point 0.0 % off the fit |" in text


def test_pictures_are_written_and_small(tmp_path):
    draw_steps({COMPUTE: (1, 1, 1), AUTO: (1, 2, 3)}, 1.0, "title", tmp_path / "a.png")
    draw_fits(
        {"all_gather": (10, 10**9)}, {"all_gather": [(10, 20), (100, 110)]}, "title", tmp_path / "b.png"
    )
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 100_000


def test_compile_costs_are_tabled_and_dedup_is_told():
    def cost(graphs, kernels):
        return Cost(2.0, 0.5, graphs, kernels), Cost(1.0, 0.1, graphs, 0)

    found = {
        NO_PASSES: {4: cost(1, 30), 8: cost(1, 33)},
        compile_cost.OURS_BY_BLOCK: {4: cost(1, 9), 8: cost(1, 9)},
        FSDP2_COMPILED: {4: cost(4, 9), 8: cost(8, 9), 16: "more than 9 s"},
    }
    text = compile_cost.record(Workload(), "a command", (0, 0), 8, found)
    assert f"| {NO_PASSES} | 4 | 2.0 | 1.0 | 0.50 | 0.10 | 1 | 30 |" in text
    assert f"| {FSDP2_COMPILED} | 16 | more than 9 s |" in text
    assert f"{NO_PASSES}, 4 to 8 layers: 1 to 1 graphs, 30 to 33 kernels: one graph holds every block" in text
    assert "1 to 1 graphs, 9 to 9 kernels: equal blocks are compiled once" in text
    assert "4 to 8 graphs, 9 to 9 kernels: equal blocks are compiled again" in text


def test_time_of_passes_is_that_of_every_call_and_ends_with_the_block():
    hook = compile_cost.JointHook
    original = hook.__call__
    with compile_cost.time_of_passes() as seconds:
        assert hook.__call__ is not original
        hook(())(torch.fx.Graph())
    assert len(seconds) == 1
    hook(())(torch.fx.Graph())
    assert len(seconds) == 1


def test_measured_medians_reach_the_targets():
    assert dataclasses.astuple(targets({COMPUTE: 2.0, COMMUNICATION: 1.0, AUTO: 2.0})[0])[1:3] == (1.10, 1.0)


def test_stock_passes_are_told_the_time_of_every_gather_that_buckets_become():
    profile = load_profile("h100_sxm")
    estimate = next(
        value
        for name, value in overlap_scheduling(profile, 8, MIB).items()
        if name.endswith("runtime_estimation")
    )
    ops = torch.ops._c10d_functional
    times = set()
    for target in (ops.all_gather_into_tensor.default, ops.all_gather_into_tensor_out.default):
        node = torch.fx.Graph().call_function(target)
        node.meta["val"] = torch.empty(8, MIB, device="meta")
        times.add(estimate(node))
    assert len(times) == 1
    assert times.pop() > 0.01  # 32 MiB in 450 GB/s take more than that many ms
