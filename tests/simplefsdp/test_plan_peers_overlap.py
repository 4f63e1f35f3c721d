"""The rules for Inductor's passes beside the passes themselves, run on the same graphs with the same times."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from benchmarks import stock
from inductor_passes import work
from inductor_passes._compat import CPU_ATTENTION
from inductor_passes.costs.collective import CollectiveModel
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.costs.profiles import load_profile
from inductor_passes.costs.topology import topology_of
from inductor_passes.plan import LowerBound, Role
from inductor_passes.planners import plan_collectives
from inductor_passes.planners.check import check_plan
from inductor_passes.planners.schedule import make_plan
from simplefsdp.planner.extend import TRACED_LAYERS, extend
from simplefsdp.planner.peers import (
    STOCK_OVERLAP,
    Sharing,
    bucket_cap,
    plan_stock_manual,
    plan_stock_overlap,
    ranks_of_shards,
)
from simplefsdp.planner.peers.stock_memory import LIMITS
from tests.helpers.effort import count_calls
from tests.simplefsdp.test_plan_peers import SILU_TOWER, report_of

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the rules are written from torch 2.13"
)

RANKS, BLOCKS = 16, ("layers.*",)
NO_CAP = 1  # bytes: no two parameters share a bucket before scheduling
RATE = 1  # time units per byte
EVERYTHING_AHEAD = 4000, 8000  # times of a product in which any collective of the tower can hide
CYCLE = "cyclic extra dep"


def passes():
    """The helper, which imports what other versions of torch do not have."""
    from tests.helpers import stock_passes

    return stock_passes


def look(sharding_factor, look, build=lambda: SILU_TOWER(TRACED_LAYERS), ranks=RANKS, tokens=(4, 32)):
    passes().look_at_graphs(
        build,
        (torch.zeros(tokens, dtype=torch.int64),),
        ranks=ranks,
        sharding_factor=sharding_factor,
        blocks=BLOCKS,
        look=look,
    )


def with_times(problem, alpha, product, choose):
    """The problem with one price per byte, and matrix products of one to two times a length."""
    times = [
        (product + choose.randrange(product)) if length and is_product else min(length, 100)
        for length, is_product in zip(problem.region_ns, choose.products, strict=True)
    ]
    items = tuple(
        dataclasses.replace(item, transfer_ns=RATE * item.size_bytes) for item in problem.collectives
    )
    return dataclasses.replace(
        problem, collectives=items, region_ns=tuple(times), alpha_ns=dict.fromkeys(problem.alpha_ns, alpha)
    )


@dataclasses.dataclass
class Trial:
    """One choice of times and limits: what the pass did, and what the rules say."""

    kind: str
    cap: int | None
    in_flight: int
    real: set
    rules: set


def run_trials(sharding_factor, count):
    """Schedules of the pass and of the rules for many choices of times and limits. Choices that the pass answers with
    an error of its own are left out."""
    trials = []

    def compare(traced):
        choose = random.Random(7)
        choose.products = [bool(region.flops) for region in traced.facts.regions]
        for _ in range(count):
            alpha, product = choose.choice((0, 100, 1000)), choose.choice((300, 1000, *EVERYTHING_AHEAD))
            cap = choose.choice((None, NO_CAP, 4000, 8000))
            in_flight = choose.choice((LIMITS.in_flight_bytes, 8192, 20480))
            problem = with_times(traced.facts.problem, alpha, product, choose)
            options = {"pre_bucketing_fsdp_collectives": cap is not None}
            if cap is not None:
                options["pre_bucketing_fsdp_collectives_bucket_cap_mb"] = cap / 2**20
            try:
                real = passes().schedule_overlap(
                    traced,
                    problem,
                    lambda kind, size, alpha=alpha: float(alpha + RATE * size),
                    max_in_flight_gb=in_flight / 2**30,
                    **options,
                )
            except RuntimeError as error:
                assert CYCLE in str(error)  # noqa: PT017
                continue
            facts = dataclasses.replace(traced.facts, problem=problem)
            limits = dataclasses.replace(LIMITS, in_flight_bytes=in_flight)
            planned = plan_stock_overlap(facts, cap, limits)
            check_plan(problem, planned.plan)
            trials.append(Trial(facts.kind, cap, in_flight, set(real), set(traced.planned(planned))))

    look(sharding_factor, compare)
    return trials


def share_alike(trials):
    """Share of the buckets of the pass that the rules have, at the same places."""
    return sum(len(trial.rules & trial.real) for trial in trials) / sum(len(trial.real) for trial in trials)


def test_rules_do_what_the_pass_does():
    """With the limits that the pass has, exactly. With a thousandth of them, waits are forced where nothing but the
    exact graph tells; forwards are alike even then."""
    trials = run_trials(RANKS, count=10)
    assert len(trials) >= 18
    for trial in trials:
        if trial.kind == "forward" or trial.in_flight == LIMITS.in_flight_bytes:
            assert trial.rules == trial.real
    assert share_alike(trials) >= 0.9


def test_rules_do_what_the_pass_does_with_replicated_parameters():
    trials = [trial for trial in run_trials(1, count=10) if trial.kind == "backward"]
    assert len(trials) == 10
    for trial in trials:
        assert trial.rules == trial.real
    assert any(len(travel.members) > 1 for trial in trials for travel in trial.real)


def test_rules_nearly_do_what_the_pass_does_between_replicas():
    """As above: exactly with the limits that the pass has, nearly with a thousandth of them."""
    trials = [trial for trial in run_trials(4, count=10) if trial.kind == "backward"]
    for trial in trials:
        if trial.in_flight == LIMITS.in_flight_bytes:
            assert trial.rules == trial.real
    assert share_alike(trials) >= 0.97
    assert sum(trial.rules == trial.real for trial in trials) >= 8


def test_reductions_that_stay_exposed_are_merged_after_a_refused_trial():
    """Where compute hides a part of each bucket only, the pass merges reductions that lie one behind the other, because
    it has forgotten that the one's gradient is made behind the other's start."""
    cap, alpha = 6000, 100
    merged = []

    def compare(traced):
        if traced.facts.kind == "forward":
            return
        choose = random.Random(3)
        choose.products = [bool(region.flops) for region in traced.facts.regions]
        for product in (300, 600):
            problem = with_times(traced.facts.problem, alpha, product, choose)
            real = passes().schedule_overlap(
                traced,
                problem,
                lambda kind, size: float(alpha + RATE * size),
                pre_bucketing_fsdp_collectives_bucket_cap_mb=cap / 2**20,
            )
            facts = dataclasses.replace(traced.facts, problem=problem)
            planned = plan_stock_overlap(facts, cap)
            check_plan(problem, planned.plan)
            assert set(traced.planned(planned)) == set(real)
            items = problem.collectives
            merged.extend(
                travel
                for travel in real
                if items[travel.members[0]].role is Role.REDUCE
                and sum(items[number].size_bytes for number in travel.members) > cap
            )

    look(RANKS, compare, build=lambda: SILU_TOWER(6))
    assert merged


@pytest.mark.parametrize("operator", ["product", "attention"])
def test_the_pass_expects_of_a_cpu_what_our_passes_do(monkeypatch, operator):
    """In benchmarks a profile takes the place of Triton's device numbers, and of the formulas torch does not have."""
    from torch._inductor.fx_passes.overlap_scheduling import estimate_roofline_runtime_ms, is_compute_node
    from torch.utils import _runtime_estimation
    from torch.utils.flop_counter import flop_registry

    for name in ("get_gpu_dram_gbps", "get_device_tflops"):
        monkeypatch.setattr(_runtime_estimation, name, None)
    for packet in CPU_ATTENTION:
        monkeypatch.setitem(flop_registry, packet, None)  # undone with the test
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    profile = load_profile("cpu_gloo")
    stock.give_device_numbers(profile)
    graph = torch.fx.Graph()
    with FakeTensorMode():
        if operator == "product":
            target, shapes = torch.ops.aten.mm.default, [(512, 512)] * 2
        else:
            target, shapes = next(iter(CPU_ATTENTION)).default, [(2, 8, 512, 64)] * 3
        values = [torch.empty(shape) for shape in shapes]
        inputs = [graph.placeholder(f"x{number}") for number in range(len(shapes))]
        for node, value in zip(inputs, values, strict=True):
            node.meta["val"] = value
        called = graph.call_function(target, tuple(inputs))
        called.meta["val"] = target(*values)
    ours_ns = work.time_ns([called], 1, ProfileCostModel(profile))
    assert is_compute_node(called)
    assert estimate_roofline_runtime_ms(called) * 1e6 == pytest.approx(ours_ns, rel=0.02)


class Block(nn.Module):
    """A block with the parameters of Llama 3 8B, without attention."""

    WIDTH, HIDDEN, KEYS = 4096, 14336, 1024

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = (nn.RMSNorm(self.WIDTH, eps=1e-6) for _ in range(2))
        self.q, self.o = (nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(2))
        self.k = nn.Linear(self.WIDTH, self.KEYS, bias=False)
        self.gate, self.up = (nn.Linear(self.WIDTH, self.HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(self.HIDDEN, self.WIDTH, bias=False)

    def forward(self, x):
        n = self.norm(x)
        x = x + self.o(self.q(n) * self.k(n).repeat(1, 1, self.WIDTH // self.KEYS))
        n = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(n)) * self.up(n))


class Blocks(nn.Module):
    """Checkpointed blocks between an embedding and a head."""

    def __init__(self, layers, words) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, Block.WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(Block.WIDTH, eps=1e-6)
        self.head = nn.Linear(Block.WIDTH, words, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def test_at_the_size_of_8b_the_step_of_the_rules_is_that_of_the_pass():
    """Norms and everything else between products have parameters and times here, so single buckets may differ."""
    profile, ranks = load_profile("h100_sxm"), 64
    topology, model = topology_of(range(ranks), 8), CollectiveModel(profile)
    lengths = {}

    def compare(traced):
        facts = traced.facts
        cap = bucket_cap(profile, ranks_of_shards(facts))
        real = passes().schedule_overlap(
            traced,
            facts.problem,
            lambda kind, size: float(model.time_ns(kind, topology, size)),
            pre_bucketing_fsdp_collectives_bucket_cap_mb=cap / 2**20,
        )
        before, items = traced.products_before(), facts.problem.collectives
        events = []
        for number, travel in enumerate(real):
            ready = max(items[member].earliest_issue for member in travel.members)
            needed = min(items[member].latest_wait for member in travel.members)
            start = min(max(ready, before.index(travel.start)), needed)
            last = len(before) - 1 - before[::-1].index(travel.wait)
            events += [(start, number, False), (max(min(needed, last), start), number, True)]
        members = [travel.members for travel in real]
        ordered = sorted(events, key=lambda event: (event[0], event[2]))
        plan = make_plan(facts.problem, "real", members, ordered, LowerBound(0, ""))
        rules = plan_stock_overlap(facts, cap).plan
        lengths[facts.kind] = (
            rules.step_ns,
            plan.step_ns,
            plan_collectives(facts.problem, "none").step_ns,
        )

    look(None, compare, build=lambda: Blocks(3, 32000), ranks=ranks, tokens=(1, 8192))
    assert set(lengths) == {"forward", "backward"}
    for rules, real, none in lengths.values():
        assert rules == pytest.approx(real, rel=0.03)
        assert none > 1.1 * real


def test_buckets_before_scheduling_are_as_large_as_the_pass_makes_them(monkeypatch):
    import torch._inductor.comm_analysis as analysis
    from torch._inductor.fx_passes.fsdp import compute_pre_bucket_cap_mb

    monkeypatch.setattr(analysis, "_has_nvlink", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # eight devices to a node
    for name, generation in (("h100_sxm", "HOPPER"), ("a100_sxm", "AMPERE"), ("b200_sxm", "BLACKWELL")):
        profile, found = load_profile(name), analysis.NVIDIA_GPU_TYPE[generation]
        monkeypatch.setattr(analysis, "get_gpu_type", lambda found=found: found)
        for ranks in (2, 8, 16, 64, 512):
            expected = compute_pre_bucket_cap_mb(ranks) * 2**20
            assert bucket_cap(profile, ranks) == pytest.approx(expected, abs=2)


@pytest.fixture(scope="module")
def report():
    return report_of(TRACED_LAYERS)


def test_prefetching_stays_within_memory_and_distance(report):
    forward = report.graphs[0]
    unbound = plan_stock_overlap(forward, NO_CAP)

    def ahead(facts):
        items = facts.problem.collectives
        return max(
            items[number].latest_wait - bucket.issue_slot
            for bucket in facts.plan.buckets
            for number in bucket.members
        )

    assert ahead(unbound) > 3
    near = plan_stock_overlap(forward, NO_CAP, dataclasses.replace(LIMITS, distance=1))
    tight = plan_stock_overlap(forward, NO_CAP, dataclasses.replace(LIMITS, growth_bytes=0, growth_share=0.0))
    assert ahead(near) < ahead(unbound)
    assert ahead(tight) < ahead(unbound)
    for facts in (unbound, near, tight):
        assert facts.plan.planner == STOCK_OVERLAP
        check_plan(facts.problem, facts.plan)


@pytest.mark.parametrize("cap", [NO_CAP, 4000])
def test_work_grows_with_the_number_of_layers(report, cap):
    calls = []
    for layers in (10, 20):
        graphs = [extend(facts, "layers", layers) for facts in report.graphs]
        calls.append(sum(count_calls(lambda facts=facts: plan_stock_overlap(facts, cap)) for facts in graphs))
    assert calls[1] < 3 * calls[0]


@pytest.mark.parametrize(
    ("sharding_factor", "sharing"),
    [(RANKS, Sharing.FULL), (RANKS // 4, Sharing.HYBRID)],
    ids=["full", "hybrid"],
)
def test_rules_by_block_do_what_the_manual_pass_does(sharding_factor, sharing):
    """Gathers exactly; reductions start in the traced graph up to one product after their gradients are there."""
    blocks = ["embedding", *(f"layers.{layer}" for layer in range(TRACED_LAYERS)), "head"]
    seen = []

    def compare(traced):
        items = traced.facts.problem.collectives
        rules = traced.planned(plan_stock_manual(traced.facts, sharing))
        real = passes().schedule_by_block(traced, blocks)
        # Seen from the real pass, each all-reduce of a block carries what their reduce-scatter carried together.
        together = {
            (number,): travel.members
            for travel in real
            for number in travel.members
            if items[number].key.kind == "all_reduce"
        }
        rules = sorted(
            (together.get(travel.members, travel.members), travel.start, travel.wait) for travel in rules
        )
        real = sorted((travel.members, travel.start, travel.wait) for travel in real)
        assert [members for members, _, _ in rules] == [members for members, _, _ in real]
        for (members, start, wait), (_, real_start, real_wait) in zip(rules, real, strict=True):
            late = 0 if items[members[0]].role is Role.GATHER else 1
            assert 0 <= real_start - start <= late
            assert 0 <= real_wait - wait <= late
        seen.append(traced.facts.kind)

    look(sharding_factor, compare)
    assert seen == ["forward", "backward"]
