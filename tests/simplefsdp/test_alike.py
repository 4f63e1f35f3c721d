"""Ranks that were given different models."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from simplefsdp import simple_fsdp
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


def test_different_values_are_named(workers):
    workers(4).run(wrap_different_values)


def test_different_shapes_are_refused_on_every_rank(workers):
    workers(2).run(wrap_different_shapes)


def test_models_without_values_are_alike(workers):
    workers(2).run(wrap_without_values)
