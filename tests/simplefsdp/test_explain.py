"""`simplefsdp.explain`: what the report says of a model, and that asking changes nothing."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from torch import nn

import simplefsdp
from inductor_passes.plan import Role
from simplefsdp import MixedPrecisionPolicy, PassConfig, simple_fsdp
from simplefsdp.explainer.facts import BEFORE, Memory
from simplefsdp.explainer.schedule import make_timeline
from tests.inductor_passes.toy import BF16, Mlp, ToyLlama, tokens, world

RANKS = 8


class Net(nn.Module):
    """Two linear layers of different width."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24, bias=False)
        self.down = nn.Linear(24, 8, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Broken(Net):
    """The same, with a graph break between the layers."""

    def forward(self, x):
        x = torch.relu(self.up(x))
        torch._dynamo.graph_break()
        return self.down(x)


@torch.compiler.disable
def outside(x, weight):
    return torch.relu(x) + weight.sum()


class Uncompiled(Net):
    """The same, with an operation that never is compiled, on what a graph made and a parameter."""

    def forward(self, x):
        return self.down(outside(self.up(x), self.up.weight))


class Counting(Net):
    """The same, scaled by the number of calls, which Dynamo takes for a constant."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.fixture(scope="module")
def report():
    config = PassConfig(planner="block", blocks=("layers.*",))
    with torch.device("meta"):
        model = ToyLlama(2)
    return simplefsdp.explain(
        model, tokens(), ranks=64, profile="h100_sxm", wrap={"mp_policy": BF16, "passes": config}
    )


def test_timelines_take_the_time_of_the_plan(report):
    assert [facts.kind for facts in report.graphs] == ["forward", "backward"]
    for facts, timeline in zip(report.graphs, report.timelines, strict=True):
        assert timeline.step_ns == facts.plan.step_ns
        assert timeline.exposed_ns == facts.plan.exposed_ns > 0
        busy = [span for span in timeline.spans if span.row == "compute"]
        assert sum(span.duration_ns for span in busy) == timeline.step_ns
        assert timeline.rows == ("compute", "group0")


def test_every_collective_is_in_one_row_of_the_table(report):
    for facts, rows in zip(report.graphs, report.tables, strict=True):
        carried = sorted(name for row in rows for name in row.members)
        assert carried == sorted(item.name for item in facts.problem.collectives)
    forward = report.tables[0]
    block = next(row for row in forward if len(row.members) == 9 and row.members[0].startswith("layers.1"))
    assert (block.kind, block.dtype, block.size_bytes) == ("all_gather", "bfloat16", 82176)
    assert block.issued.startswith("before layers.0.")
    assert block.awaited.startswith("before layers.1.")
    assert all(row.why_exposed for row in forward if row.exposed_ns)
    assert all(row.why_alone for row in forward if len(row.members) == 1)


def test_memory_follows_the_tensors(report):
    forward, backward = report.timelines
    activations = list(Memory).index(Memory.ACTIVATIONS)
    # What forward leaves, logits included, is what backward finds, the equally large gradient of the logits included.
    found = sum(value.size_bytes for value in report.graphs[1].values if value.born == BEFORE)
    assert forward.memory[-1].by_use[activations] == found
    logits = 2 * 16 * 128 * 4  # batch x sequence x vocabulary x float32
    assert logits < found <= backward.memory[0].by_use[activations]
    end = dict(zip(Memory, backward.memory[-1].by_use, strict=True))
    shards = sum(
        -(-parameter.shape[0] // 64) * parameter[0].numel() * 4 for parameter in ToyLlama(2).parameters()
    )
    assert end == {
        Memory.ACTIVATIONS: 0,
        Memory.GATHERED: 0,
        Memory.GRADIENTS: shards,
        Memory.COMMUNICATION: 0,
    }


@pytest.mark.parametrize("factor", [2, 8])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_gradients_stay_in_the_dtype_of_their_parameters(stored, factor):
    model = Net().to(stored)
    policy = MixedPrecisionPolicy(
        torch.bfloat16, torch.float32 if stored is torch.bfloat16 else torch.bfloat16
    )
    wrap = {"mp_policy": policy, "sharding_factor": factor}
    report = simplefsdp.explain(
        model, torch.ones(2, 8, dtype=stored), ranks=RANKS, profile="h100_sxm", wrap=wrap, eager=True
    )
    shards = 2 * (8 * 24 // factor) * stored.itemsize
    for backward in (report.graphs[1], report.eager[1]):
        left = dict(zip(Memory, make_timeline(backward).memory[-1].by_use, strict=True))
        assert left[Memory.GRADIENTS] == shards
        assert left[Memory.ACTIVATIONS] == 0


def test_gathered_bytes_are_held_while_they_are_needed():
    """One gather, held from start to last use; its gradient is the only thing left."""
    model = nn.Linear(16, 16, bias=False)
    report = simplefsdp.explain(
        model, torch.ones(4, 16), ranks=RANKS, profile="h100_sxm", wrap={"passes": PassConfig(planner="none")}
    )
    forward = report.timelines[0]
    gathered = [point.by_use[list(Memory).index(Memory.GATHERED)] for point in forward.memory]
    assert max(gathered) == 16 * 16 * 4
    assert gathered[-1] == 0


def test_every_output_says_modelled_and_names_the_profile(report, tmp_path):
    for old in ("forward3.bucket.diff", "notes.txt"):
        (tmp_path / old).write_text("of a report with more graphs, and of the user")
    files = {path.name: path for path in report.save(tmp_path)}
    assert not (tmp_path / "forward3.bucket.diff").exists()
    assert (tmp_path / "notes.txt").exists()
    for name in ("report.txt", "schedule.html", "trace.json"):
        text = files[name].read_text()
        assert "modelled" in text
        assert "h100_sxm" in text
    assert files["schedule.png"].read_bytes().startswith(b"\x89PNG")
    assert str(report.verdict).startswith("modelled on h100_sxm: step ")


def test_the_page_stands_alone(report):
    page = report.to_html()
    assert "http" not in page
    assert page.count("<script>") == page.count("</script>") == 1
    assert all(name in page for row in report.tables[0] for name in row.members)


def test_the_trace_holds_every_span_on_its_row(report):
    trace = json.loads(json.dumps(report.trace()))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == sum(len(timeline.spans) for timeline in report.timelines)
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "C", "M"}
    end_us = max(event["ts"] + event["dur"] for event in spans)
    assert end_us == pytest.approx(sum(timeline.step_ns for timeline in report.timelines) / 1000)
    threads = {
        (event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"
    }
    assert {(event["pid"], event["tid"]) for event in spans} == threads


def test_dumps_show_what_a_pass_changed(report):
    lines = report.diff("forward").splitlines()
    name = "layers.1.wq.weight"
    removed = [line for line in lines if line.startswith("-start") and line.endswith(f": {name} [recompute]")]
    assert len(removed) == 1
    assert any(line.startswith("+start") and f"+{name}+" in line for line in lines)
    assert "+start   all_gather bfloat16 0.01 MiB: layers.1.wq.weight [recompute]" in report.diff("joint")
    assert "compute layers.1.wq: mm" in report.dumps[1].after


def test_equal_models_give_equal_reports():
    reports = [simplefsdp.explain(Net(), torch.ones(2, 8), ranks=4, profile="h100_sxm") for _ in range(2)]
    assert reports[0] == reports[1]


def test_a_wrapped_model_is_explained_on_its_process_group_and_left_as_it_was():
    with world(RANKS):
        model = simple_fsdp(Mlp(), passes=PassConfig(planner="none", profile="h100_sxm"))
        simple_fsdp(Mlp(), passes=PassConfig(profile="cpu_gloo"))  # another one, installed later
        before = dict(model.named_parameters())
        report = simplefsdp.explain(model, torch.ones(4, 16))
        assert dict(model.named_parameters()) == before
        assert all(parameter.grad is None for parameter in before.values())
    assert report.profile == "h100_sxm"
    assert f"on {RANKS} ranks" in report.caption
    assert len(report.tables[0]) == 6


def test_a_last_layer_that_an_inner_wrap_keeps_is_not_gathered_again():
    with world(RANKS):
        with torch.device("meta"):
            model = ToyLlama(3)
        simple_fsdp(model.layers[-1], reshard_after_forward=False, mp_policy=BF16)
        simple_fsdp(model, mp_policy=BF16)
        forward, backward = simplefsdp.explain(model, tokens(), profile="h100_sxm").graphs

    def gathered(facts):
        return {
            item.name.rpartition(".")[0] for item in facts.problem.collectives if item.role is Role.GATHER
        }

    layers = [{name for name in gathered(forward) if name.startswith(f"layers.{at}.")} for at in range(3)]
    assert all(layers)
    assert gathered(backward) >= layers[0] | layers[1]
    assert not gathered(backward) & layers[2]
    keys = {item.key for item in forward.problem.collectives}
    assert len(keys) == 1, "both wraps share buckets"


def test_an_unwrapped_model_stays_unwrapped():
    model = Net()
    kinds = [type(module) for module in model.modules()]
    simplefsdp.explain(model, torch.ones(2, 8), ranks=2, profile="h100_sxm")
    assert [type(module) for module in model.modules()] == kinds
    assert all(type(parameter.data) is torch.Tensor for parameter in model.parameters())


def test_a_graph_break_is_pointed_out_with_its_place():
    report = simplefsdp.explain(Broken(), torch.ones(2, 8), ranks=2, profile="h100_sxm")
    assert [facts.kind for facts in report.graphs] == ["forward", "forward", "backward", "backward"]
    (line,) = report.warnings
    place = Broken.forward.__code__.co_firstlineno + 2
    assert line.startswith(f"graph break at {__file__}:{place}: ")
    assert line in str(report)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_code_between_graphs_runs_on_what_they_made(device):
    with contextlib.nullcontext() if device is None else torch.device(device):
        report = simplefsdp.explain(Uncompiled(), torch.ones(2, 8), ranks=4, profile="h100_sxm")
    places = [item.place for item in report.interruptions]
    assert any("test_explain.py:" in place for place in places)
    names = [item.name for facts in report.graphs for item in facts.problem.collectives]
    assert [facts.kind for facts in report.graphs] == ["forward", "forward", "backward", "backward"]
    assert {name.rpartition(".")[2] for name in names} == {"weight"}


def test_a_recompile_is_pointed_out_although_dynamo_forgets_what_it_compiled():
    torch._dynamo.utils.set_compilation_metrics_limit(2)
    try:
        for _ in range(2):
            report = simplefsdp.explain(Counting(), torch.ones(2, 8), ranks=2, profile="h100_sxm")
            assert [line for line in report.warnings if "recompile" in line and "calls" in line]
    finally:
        torch._dynamo.utils.set_compilation_metrics_limit(
            torch._dynamo.utils.DEFAULT_COMPILATION_METRICS_LIMIT
        )


def test_one_class_is_explained_more_often_than_dynamo_compiles_one_code():
    with torch._dynamo.config.patch(recompile_limit=1):
        for ranks in (2, 4):
            report = simplefsdp.explain(Net(), torch.ones(2, 8), ranks=ranks, profile="h100_sxm")
            assert [facts.kind for facts in report.graphs] == ["forward", "backward"]


def test_hybrid_sharding_has_a_row_for_each_group():
    report = simplefsdp.explain(
        Net(), torch.ones(2, 8), ranks=8, profile="h100_sxm", wrap={"sharding_factor": 4}
    )
    kinds = {(row.kind, row.group) for row in report.tables[1]}
    assert {kind for kind, _ in kinds} == {"all_gather", "reduce_scatter avg", "all_reduce avg"}
    assert len({group for _, group in kinds}) == 2


def test_mistakes_are_named():
    net, x = Net(), torch.ones(2, 8)
    with pytest.raises(ValueError, match="give ranks="):
        simplefsdp.explain(net, x)
    with pytest.raises(ValueError, match="h100_sxm"):
        simplefsdp.explain(net, x, ranks=2, profile="abacus")
    with pytest.raises(ValueError, match="possible here: 1, 2, 3, 6"):
        simplefsdp.explain(net, x, ranks=6, profile="h100_sxm", wrap={"sharding_factor": 4})
    with world(RANKS):
        wrapped = simple_fsdp(Net(), mp_policy=MixedPrecisionPolicy())
        with pytest.raises(ValueError, match="leave out ranks"):
            simplefsdp.explain(wrapped, x, ranks=2)
        with pytest.raises(RuntimeError, match="a process group of 8 ranks runs"):
            simplefsdp.explain(net, x, ranks=2)
