"""Ranks that were given different models."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from simplefsdp import simple_fsdp, trail
from simplefsdp.parametrize import module_state
from tests.helpers.meshes import mesh


def layers(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, width))


def wrap_different_values(rank: int, world: int) -> None:
    for shape in ((world,), (2, world // 2)):
        torch.manual_seed(0)
        model = layers()
        with torch.no_grad():
            model[1].bias[0] += rank == world - 1
        with pytest.warns(RuntimeWarning, match=r"different values of 1 parameters, '1\.bias' first"):
            simple_fsdp(model, mesh(*shape))


def wrap_different_shapes(rank: int, world: int) -> None:
    with pytest.raises(
        RuntimeError, match=r"parameter 2 is rank 0: '1\.weight' \(6, 6\).*, rank 1: '1\.weight' \(7, 6\)"
    ):
        simple_fsdp(layers(6 + rank), mesh(world))
    # The ranks are still in step, and a model that is alike everywhere works.
    torch.manual_seed(0)
    simple_fsdp(layers(), mesh(world))


def wrap_without_values(rank: int, world: int) -> None:
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("error")
        simple_fsdp(layers(), mesh(world))


def read_without_steps(rank: int, world: int) -> None:
    trail.MOST_STEPS = 10
    model = simple_fsdp(layers(), mesh(world))
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
    assert len(module_state(model).wrap.trail.steps) == 10
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert module_state(model).wrap.trail is None


def wrap_sparse_buffer(rank: int, world: int) -> None:
    model = layers()
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    simple_fsdp(model, mesh(world))(torch.ones(2, 4)).sum().backward()


def test_different_values_are_named(workers):
    workers(4).run(wrap_different_values)


def test_different_shapes_are_refused_on_every_rank(workers):
    workers(2).run(wrap_different_shapes)


def test_models_without_values_are_alike(workers):
    workers(2).run(wrap_without_values)


def test_models_that_no_optimizer_steps_note_a_bounded_number_of_reads(workers):
    workers(2).run(read_without_steps)


def test_a_sparse_buffer_shares_no_memory_with_parameters(workers):
    workers(2).run(wrap_sparse_buffer)
