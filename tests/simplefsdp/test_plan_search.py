"""`simplefsdp plan --search`: it finds what trying everything finds, with few traces, and says what does not fit."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from inductor_passes.costs.profiles import load_profile
from simplefsdp.cli import main
from simplefsdp.explainer.hardware import GIB, find_hardware
from simplefsdp.explainer.runs import once_each
from simplefsdp.planner.build import Parameter, Traced
from simplefsdp.planner.found import command_of, findings_text
from simplefsdp.planner.options import PlanOptions
from simplefsdp.planner.predict import predict
from simplefsdp.planner.request import Request
from simplefsdp.planner.rescale import World
from simplefsdp.planner.search import Search, Space, sharding_factors
from simplefsdp.planner.step import Family, Step
from tests.helpers.tower import Tower, explained

pytestmark = pytest.mark.timeout(500)  # a trace takes seconds, and many times that on a busy machine

PROFILE = load_profile("h100_sxm")
BASE = Request("tower", None, None, 1, "none", 16, 16, "bf16", 4.0, True, False, "none")
PLANNERS = ("none", "greedy")
SEQUENCE = 2048


@functools.cache
def traced(mode, batch, factor, reshard):
    """A step of one layer on 16 ranks."""
    torch.compiler.reset()
    make = functools.partial(Tower, 1, is_checkpointed=mode == "full")
    graphs = explained(
        make, batch=batch, sequence=SEQUENCE, sharding_factor=factor, reshard_after_forward=reshard
    ).graphs
    parameters = {name: Parameter.of(item) for name, item in make().named_parameters()}
    request = dataclasses.replace(BASE, ac=mode, batch=batch, factor=factor, reshard=reshard)
    return Step(
        request,
        "tower",
        Traced(graphs, once_each(facts.kind for facts in graphs), parameters, "", ()),
        SEQUENCE * batch,
        1e6,
    )


@pytest.fixture
def asked():
    """What a search has had traced."""
    return []


def search(asked, memory_bytes, **space):
    def trace(requests):
        asked.extend(requests)
        return [traced(item.ac, item.batch, item.factor, item.reshard) for item in requests]

    full = Space(
        **{
            "modes": ("none", "full"),
            "batch": None,
            "factors": (16, 8, 1),
            "reshards": (True,),
            "planners": PLANNERS,
        }
        | space
    )
    return Search(BASE, full, PROFILE, memory_bytes, trace, lambda text: None, 3).run()


def everything(memory_bytes, batches):
    """Rates of all that fits, by choice: computed from two batches of each mode."""
    rates = {}
    for mode in ("none", "full"):
        family = Family(traced(mode, 1, 16, True), traced(mode, 2, 16, True), PROFILE)
        for batch in batches:
            for factor in (16, 8):
                for planner in PLANNERS:
                    item = predict(
                        family.graphs(batch, World(16, factor)),
                        PROFILE,
                        family.high.traced.stored(factor),
                        planner=planner,
                        tokens=SEQUENCE * batch,
                    )
                    if item.memory.total_bytes <= 0.9 * memory_bytes:
                        rates[mode, batch, factor, planner] = item.tokens_per_s
    return rates


def test_the_winner_is_that_of_trying_everything(asked):
    memory = 40 * 2**20
    found = search(asked, memory, factors=(16, 8))
    rates = everything(memory, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
    best = max(rates, key=rates.__getitem__)
    first = found.best[0]
    assert (first.mode, first.batch, first.factor, first.prediction.planner) == best
    assert first.rate == pytest.approx(rates[best], rel=1e-3)
    assert [item.rate for item in found.best] == sorted((item.rate for item in found.best), reverse=True)
    assert len(found.best) == 3
    assert all(item.prediction.memory.total_bytes <= found.usable_bytes for item in found.best)


def test_few_traces_and_the_winner_among_them(asked):
    found = search(asked, 40 * 2**20)
    first = found.best[0]
    assert [(item.ac, item.batch, item.factor) for item in asked[:4]] == [
        ("none", 1, 16),
        ("none", 2, 16),
        ("full", 1, 16),
        ("full", 2, 16),
    ]
    assert first.is_traced
    assert (first.mode, first.batch, first.factor) in [(item.ac, item.batch, item.factor) for item in asked]
    assert len(asked) <= 4 + 4 + 2, "two batches of each mode, replicated ones, the best checked"


def test_what_does_not_fit_is_named_with_how_much(asked):
    found = search(asked, 4 * 2**20, modes=("none",), factors=(16,))
    (misfit,) = found.misfits
    assert misfit.total_bytes > found.usable_bytes
    fitting = max((item.batch for item in found.best), default=0)
    assert fitting < misfit.batch <= max(2, 2 * fitting)
    nothing = search(asked, 1000, modes=("none",), factors=(16,))
    assert not nothing.best
    options = PlanOptions(gpus=16)
    hardware = dataclasses.replace(find_hardware("h100"), memory_bytes=1000)
    said = findings_text(nothing, options, hardware)
    assert "checkpointing none, batch 1, sharded over 16: " in said
    assert "too many" in said
    assert "nothing fits" in said


def test_replicas_that_cannot_fit_are_not_traced(asked):
    held = traced("none", 1, 16, True).traced.stored(1).least
    found = search(asked, int(held / 0.9) - 1000, modes=("none",), batch=1)
    assert {item.factor for item in asked} == {16}
    assert not any(item.factor == 1 for item in found.best)


def test_factors_are_all_nodes_one_node_and_one():
    assert sharding_factors(64, 8) == (64, 32, 16, 8, 1)
    assert sharding_factors(4, 8) == (4, 2, 1)
    assert sharding_factors(12, 8) == (12, 6, 1)
    assert sharding_factors(7, 8) == (7, 1)


def test_the_command_repeats_the_winner(asked, capsys):
    options = PlanOptions(model="debug", gpus=16, seq=256, memory_gib=2.0, memory_budget_gb=1.0)
    winner = search(asked, 40 * 2**20, batch=2, factors=(8,), modes=("full",), reshards=(False,)).best[0]
    command = command_of(winner, options)
    assert command.startswith("simplefsdp plan --model debug --gpus 16 --hardware h100 --sharding-factor 8 ")
    assert "--local-batch 2 --ac full" in command
    assert command.endswith("--no-reshard-after-forward --seq 256 --memory-budget-gb 1.0 --memory-gib 2.0")


def test_the_command_line_searches_for_a_model_of_the_users(capsys):
    words = ["--model", "tests.simplefsdp.test_plan_scale:build", "--gpus", "16", "--sharding-factor", "16"]
    assert main(["plan", *words, "--search", "--planners", "greedy", "--no-reshard-after-forward"]) == 0
    said = capsys.readouterr().out
    assert f"may use 72.0 of {80 * GIB / GIB:.0f} GiB" in said
    found, _ = said.split("How far to trust this")
    assert "checkpointing" not in found
    assert found.rstrip().splitlines()[-1] == (
        "best: simplefsdp plan --model tests.simplefsdp.test_plan_scale:build --gpus 16 --hardware h100 "
        "--sharding-factor 16 --planners greedy --no-reshard-after-forward"
    )
