"""Ranks that compile for inputs of different sizes learn while they compile that their plans differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simplefsdp
from inductor_passes import PassConfig, aot_eager_backend
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


def train(rank, world_size, rows, config, dynamic=None, explained=0):
    """Losses of some steps.

    Args:
        rows: of each step, the rows of each rank's input.
        config: of the passes; none is used twice in this file, because its tests share a store.
        explained: rows of an input for which the first rank, alone, asks what the passes do.
    """
    torch.compiler.reset()
    model = simple_fsdp(Net(), passes=config)
    if explained and rank == 0:
        simplefsdp.explain(model, torch.ones(explained, WIDTH))
    compiled = torch.compile(model, backend=aot_eager_backend(config), dynamic=dynamic)
    losses = []
    for step in rows:
        loss = compiled(torch.ones(step[rank], WIDTH))
        loss.backward()
        losses.append(loss.item())
    return losses


def test_plans_that_differ_end_the_run_with_a_way_out(workers):
    with pytest.raises(Exception, match="would wait for one another for ever") as caught:
        workers(2).run(train, [(SMALL, LARGE)], PassConfig(memory_budget_gb=1))
    text = str(caught.value)
    assert "PlansDifferError" in text
    assert "dynamic=True" in text
    assert "forward graph differently" in text


@pytest.mark.parametrize(
    ("rows", "config", "more"),
    [
        ([(SMALL, LARGE)] * 2, PassConfig(memory_budget_gb=2), (True,)),
        ([(SMALL, LARGE)], PassConfig(planner="block", blocks=("layers.*",)), ()),
        ([(SMALL, SMALL), (LARGE, LARGE)], PassConfig(memory_budget_gb=3), (False,)),
        ([(SMALL, SMALL)], PassConfig(memory_budget_gb=5), (None, LARGE)),
    ],
    ids=["symbolic sizes", "one bucket per block", "all ranks change together", "one rank explains"],
)
def test_ranks_that_start_equal_collectives_are_left_alone(workers, rows, config, more):
    first, second = workers(2).run(train, rows, config, *more)
    assert first == pytest.approx(second)
    assert len(first) == len(rows)
