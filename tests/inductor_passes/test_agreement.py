"""Ranks that compile for inputs of different sizes: the second to plan ends with an error where their plans differ."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import simplefsdp
from inductor_passes import PassConfig, agreement, aot_eager_backend
from inductor_passes.agreement import Agreement, PlansDifferError
from inductor_passes.costs.profiles import load_profile
from inductor_passes.plan import GroupKey, Role
from inductor_passes.setups import Setup
from simplefsdp import simple_fsdp

WIDTH = 64
SMALL, LARGE = 8, 16384
"""Rows of an input: with few, nothing hides communication; with many, everything does."""


class Net(nn.Module):
    """Six layers, each with compute whose time follows the size of the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
            x = x + torch.sin(x) @ torch.ones(WIDTH, WIDTH) / WIDTH
        return x.square().mean()


def train(rank, world_size, rows, config=None, dynamic=None, explained=(0, 0)):
    """Losses of some steps.

    Args:
        rows: of each step, the rows of each rank's input.
        config: of the passes.
        explained: of each rank, rows of an input for which it asks what the passes do; 0 asks nothing.
    """
    torch.compiler.reset()
    model = simple_fsdp(Net(), passes=config or PassConfig())
    if explained[rank]:
        simplefsdp.explain(model, torch.ones(explained[rank], WIDTH))
    compiled = torch.compile(model, backend=aot_eager_backend(config), dynamic=dynamic)
    losses = []
    for step in rows:
        loss = compiled(torch.ones(step[rank], WIDTH))
        loss.backward()
        losses.append(loss.item())
    return losses


def test_plans_that_differ_end_the_run_with_a_way_out(workers):
    with pytest.raises(Exception, match="would wait for one another for ever") as caught:
        workers(2).run(train, [(SMALL, LARGE)])
    text = str(caught.value)
    assert "PlansDifferError" in text
    assert "dynamic=True" in text
    assert "forward graph differently" in text


@pytest.mark.parametrize(
    ("rows", "config", "more"),
    [
        ([(SMALL, LARGE)] * 2, None, (True,)),
        ([(SMALL, LARGE)], PassConfig(planner="block", blocks=("layers.*",)), ()),
        ([(SMALL, SMALL), (LARGE, LARGE)], None, (False,)),
        (
            [(SMALL, SMALL)],
            None,
            (None, (SMALL, LARGE)),
        ),  # first: what a rank has stored is not compared again
        ([(SMALL, SMALL)], None, (None, (LARGE, 0))),
    ],
    ids=[
        "symbolic sizes",
        "one bucket per block",
        "all ranks change together",
        "both explain",
        "one rank explains",
    ],
)
def test_ranks_that_start_equal_collectives_are_left_alone(workers, rows, config, more):
    first, second = workers(2).run(train, rows, config, *more)
    assert first == pytest.approx(second)
    assert len(first) == len(rows)


class Ranks:
    """Some ranks of one store, each planning as a test says, without processes."""

    def __init__(self, monkeypatch) -> None:
        self.store, self.rank, self.hits = dist.HashStore(), 0, 0
        monkeypatch.setattr(agreement, "fxg", SimpleNamespace(group_of=lambda start: start))
        compat = SimpleNamespace(
            group_ranks=lambda group: group, default_store=lambda: self.store, cache_hits=lambda: self.hits
        )
        monkeypatch.setattr(agreement, "_compat", compat)
        monkeypatch.setattr(agreement, "work", SimpleNamespace(symbols_of=lambda graph: ()))
        monkeypatch.setattr(
            agreement, "dist", SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: self.rank)
        )

    def plan(self, rank, buckets, *, run="run", outputs=1, failure="", groups=None, size=4, hits=0):
        """One rank plans three gathers; `groups` are the ranks of each."""
        self.rank, self.hits = rank, hits
        starts = groups or [(0, 1)] * 3
        labels = list(dict.fromkeys(starts))
        items = [
            SimpleNamespace(
                name="w",
                key=GroupKey("all_gather", f"group{labels.index(start)}", "float32"),
                role=Role.GATHER,
                size_bytes=size,
            )
            for start in starts
        ]
        found = SimpleNamespace(
            plan=SimpleNamespace(buckets=[SimpleNamespace(members=members) for members in buckets]),
            program=SimpleNamespace(starts=starts, problem=SimpleNamespace(collectives=items)),
        )
        graph = SimpleNamespace(output_node=lambda: SimpleNamespace(all_input_nodes=[None] * outputs))
        setup = Setup(PassConfig(), load_profile("h100_sxm"), run)
        Agreement("forward", graph, setup, found).check(failure)


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


TOGETHER, APART = [(0, 1, 2)], [(0,), (1, 2)]


def test_only_first_plans_for_equal_collectives_of_one_run_are_compared(ranks):
    ranks.plan(0, TOGETHER)
    ranks.plan(0, APART)  # sizes change on both
    ranks.plan(1, TOGETHER)
    ranks.plan(1, APART)
    ranks.plan(1, APART, outputs=2)  # evaluation
    ranks.plan(1, APART, size=8)
    ranks.plan(1, APART, run="another wrap, or the job started again")
    ranks.plan(1, APART, run="")
    for more in ({"outputs": 2}, {"size": 8}, {"run": "another wrap, or the job started again"}):
        with pytest.raises(PlansDifferError, match="ranks 1 and 0 would wait"):
            ranks.plan(0, TOGETHER, **more)


def test_ranks_agree_on_the_groups_they_share(ranks):
    """Two copies of shards, on ranks 0, 1 and 2, 3: only what goes between copies has to be alike on them."""
    for rank, shards, copies in ((0, (0, 1), (0, 2)), (2, (2, 3), (0, 2))):
        ranks.plan(rank, [(0, 1), (2,)] if rank else [(0,), (1,), (2,)], groups=[shards, shards, copies])
    with pytest.raises(PlansDifferError):
        ranks.plan(3, [(0,), (1,), (2,)], groups=[(2, 3), (2, 3), (1, 3)])


def test_a_pass_that_failed_on_one_rank_is_named(ranks):
    ranks.plan(0, APART)
    with pytest.raises(PlansDifferError, match="On rank 1 the pass failed: no room"):
        ranks.plan(1, APART, failure="no room")


def test_where_compile_caches_serve_some_ranks_a_difference_is_a_warning(ranks):
    ranks.plan(0, TOGETHER)
    with pytest.warns(RuntimeWarning, match="Or compile caches hold this graph for some of the ranks alone"):
        ranks.plan(1, APART, hits=1)


def test_a_store_that_cannot_be_asked_ends_nothing(ranks):
    ranks.store = None
    ranks.plan(0, TOGETHER)
    ranks.plan(1, APART)


def test_the_name_of_a_run_is_in_no_cache_key():
    profile = load_profile("h100_sxm")
    first, second = (Setup(PassConfig(), profile, run) for run in ("first", "second"))
    assert first == second
    assert first.key == second.key
    assert pickle.dumps(first) == pickle.dumps(second)
