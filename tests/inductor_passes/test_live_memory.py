"""The modelled peak of TorchInductor's code against the bytes that are alive when it runs.

The model is matrix products and collectives alone: nothing has to be built, and every buffer is seen by an operator.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._inductor import config

from inductor_passes import PassConfig, _compat, aot_eager_backend, options
from inductor_passes.reorder import ReorderReport
from simplefsdp import simple_fsdp
from tests.helpers.memory import LiveBytes
from tests.helpers.worlds import fake_process_group

LAYERS, DIM, TOKENS, FLOAT_BYTES = 8, 256, 512, 4
WEIGHT_BYTES = FLOAT_BYTES * DIM * DIM
ACTIVATION_BYTES = FLOAT_BYTES * TOKENS * DIM


@dataclass
class Peak:
    """Peaks of one graph, in bytes: modelled for the order found and the order chosen, and live."""

    found: int
    chosen: int
    live: int
    in_flight: int


def peaks(monkeypatch, budget_gb: float) -> dict[str, Peak]:
    """Compile and run forward and backward under a memory budget."""
    modelled: dict[object, list[int]] = {}  # by graph: before and after, for each order that was considered
    peak_bytes = _compat.peak_bytes

    def note(snodes):
        found = peak_bytes(snodes)
        modelled.setdefault(snodes[0].scheduler, []).append(found)
        return found

    monkeypatch.setattr(_compat, "peak_bytes", note)
    torch._dynamo.reset()
    with fake_process_group(0, 4), config.patch(fx_graph_cache=False):
        torch.manual_seed(0)
        model = simple_fsdp(nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS))))
        passes = options(PassConfig(planner="none", profile="h100_sxm", memory_budget_gb=budget_gb))
        compiled = torch.compile(model, fullgraph=True, options=passes)
        x = torch.randn(TOKENS, DIM)
        compiled(x).sum().backward()  # compiles
        model.zero_grad()
        with LiveBytes([*model.parameters(), x]) as live:
            y = compiled(x)
            forward = live.peak_bytes
            live.peak_bytes = live.current_bytes
            y.sum().backward()
            backward = live.peak_bytes
    (hook,) = passes["reorder_for_compute_comm_overlap_passes"]
    plans = {}
    ends: dict[str, list[int]] = {}
    for record, found in zip(hook.records, modelled.values(), strict=True):
        (report,) = record.items
        assert isinstance(report, ReorderReport)
        assert (record.failure, report.kept) == ("", "")
        ends[record.graph] = found[2:4] if report.restored else found[:2]
        plans[record.graph] = report.placed.plan.peak_in_flight_bytes
    return {
        "forward": Peak(*ends["forward"], forward, plans["forward"]),
        "backward": Peak(*ends["backward"], backward, plans["backward"]),
    }


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # importing TorchInductor
@pytest.mark.parametrize("budget_bytes", [2 * WEIGHT_BYTES, 4 * 10**9])
def test_the_modelled_peak_is_the_live_peak_and_the_budget_holds(monkeypatch, budget_bytes):
    found = peaks(monkeypatch, budget_bytes / 10**9)
    # What the caller holds throughout, and the model leaves out: shards, the input; after forward its result.
    held = LAYERS * WEIGHT_BYTES // 4 + ACTIVATION_BYTES
    for graph, extra in (("forward", 0), ("backward", ACTIVATION_BYTES)):
        peak = found[graph]
        assert peak.chosen + held + extra == pytest.approx(peak.live, rel=0.1), (graph, peak)
        assert peak.chosen <= peak.found + budget_bytes
        assert peak.in_flight <= budget_bytes
    if budget_bytes > 10**9:
        assert found["backward"].in_flight > 2 * WEIGHT_BYTES


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_without_gradients_holds_one_bucket_more_than_it_uses(compiled):
    torch._dynamo.reset()
    with fake_process_group(0, 4), torch.no_grad():
        model = simple_fsdp(nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS))))
        backend = aot_eager_backend(PassConfig(planner="block", blocks=("Linear",), profile="h100_sxm"))
        run = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        x = torch.randn(4, DIM)
        run(x)  # compiles
        with LiveBytes([*model.parameters(), x]) as live:
            held = live.current_bytes
            run(x)
    assert WEIGHT_BYTES <= live.peak_bytes - held <= 2.1 * WEIGHT_BYTES  # a tenth for activations
    torch._dynamo.reset()
