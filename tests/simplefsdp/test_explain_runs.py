"""The graphs of a step in the order in which they run: what belongs together, what one holds for another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simplefsdp
from simplefsdp.explainer.facts import Memory
from simplefsdp.explainer.runs import Recorder, Run, held_by_others, once_each, peak_by_use
from simplefsdp.explainer.schedule import Holding, MemoryPoint, Timeline
from simplefsdp.explainer.verdict import make_verdict

RANKS = 8


def test_the_backward_of_a_run_is_that_of_the_last_run_without_one():
    recorder = Recorder()
    recorder.forward(0)
    recorder.forward(0)
    recorder.forward(2)
    recorder.backward(3, None)
    recorder.backward(1, 0)
    recorder.backward(1, 0)
    recorder.backward(1, 0)
    assert recorder.runs[3:] == [Run(3), Run(1, forward=1), Run(1, forward=0), Run(1)]
    assert once_each(["forward", "forward", "backward", "backward"])[2:] == (Run(2, 1), Run(3, 0))
    assert once_each(["forward", "inference", "backward"])[2] == Run(2, 0)


def timeline(kind: str, *totals: tuple[int, int]) -> Timeline:
    """A graph that holds so many bytes of activations and gradients, one after the other."""
    points = tuple(MemoryPoint(at, (size, 0, gradients, 0)) for at, (size, gradients) in enumerate(totals))
    holdings = tuple(Holding(Memory.GRADIENTS, size, 0, 1) for _, size in totals if size)
    return Timeline(kind, (), points, (), 0, 0, holdings)


FORWARD = timeline("forward", (30, 0), (20, 0))
BACKWARD = timeline("backward", (25, 0), (10, 4), (2, 4))
MASK = timeline("inference", (7, 0), (5, 0))


def activations_and_gradients(held):
    return [(item[0], item[2]) for item in held]


def test_what_a_forward_saved_is_held_until_its_backward_and_gradients_stay():
    runs = [Run(0), Run(0), Run(1, forward=1), Run(1, forward=0)]
    held = held_by_others([FORWARD, BACKWARD], runs)
    assert activations_and_gradients(held) == [(0, 0), (20, 0), (20, 0), (0, 4)]
    assert sum(peak_by_use([FORWARD, BACKWARD], runs)) == 20 + 30
    assert peak_by_use([], []) == (0, 0, 0, 0)


def test_what_a_graph_without_backward_makes_is_held_for_the_next_run():
    runs = [Run(2), Run(0), Run(2), Run(1, forward=1)]
    held = held_by_others([FORWARD, BACKWARD, MASK], runs)
    assert activations_and_gradients(held) == [(0, 0), (5, 0), (20, 0), (5, 0)]


def test_on_one_device_gradients_stay_though_nothing_reduces_them():
    alone = timeline("backward", (25, 0), (12, 0))
    runs = [Run(0), Run(0), Run(1, forward=1), Run(1, forward=0)]
    assert activations_and_gradients(held_by_others([FORWARD, alone], runs))[-1] == (12, 0)


class Half(nn.Module):
    """A layer in two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = torch.relu(self.up(x))
        torch._dynamo.graph_break()
        return x + self.down(x)


@pytest.fixture(scope="module")
def report():
    """Five layers that share the graphs of their pieces."""
    return simplefsdp.explain(
        nn.Sequential(*(Half() for _ in range(5))), torch.zeros(32, 64), ranks=RANKS, profile="h100_sxm"
    )


def test_a_shared_graph_is_shown_once_and_counted_as_often_as_it_runs(report):
    times = [sum(run.graph == number for run in report.runs) for number in range(len(report.graphs))]
    assert sum(times) == 4 * 5
    assert max(times) > 1
    assert f"{report.graphs[times.index(max(times))].kind}, {max(times)} times a step: modelled" in str(
        report
    )
    assert report.verdict.step_ns == sum(report.timelines[run.graph].step_ns for run in report.runs)
    assert report.verdict.step_ns > sum(timeline.step_ns for timeline in report.timelines)


def test_the_trace_holds_the_whole_step(report):
    events = report.trace()["traceEvents"]
    held = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    assert max(held) * 2**20 == pytest.approx(report.verdict.peak_bytes)
    end = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert end * 1000 == pytest.approx(report.verdict.step_ns, rel=0.01)


def test_advice_is_about_what_costs_most_in_all_runs(report):
    two = report.graphs[:2], report.timelines[:2]
    assert "in 50 runs" in make_verdict(*two, [Run(0), *[Run(1)] * 50], "h100_sxm").change
    assert "runs" not in make_verdict(*two, [Run(0)], "h100_sxm").change
