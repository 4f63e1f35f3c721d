"""Training with the passes gives bitwise the numbers of training without, on real ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from inductor_passes import PassConfig, aot_eager_backend, options
from simplefsdp import simple_fsdp
from tests.helpers.meshes import mesh
from tests.inductor_passes.toy import Mlp

STEPS = 5
DIM = 10  # uneven on 4 ranks


def train(model: nn.Module, run: Any, rank: int) -> list[torch.Tensor]:
    """Losses and last parameters of a few SGD steps on batches of this rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(STEPS):
        torch.manual_seed(100 * rank + step)
        loss = run(torch.randn(6, DIM)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    return [*results, *(p.detach().full_tensor() for p in model.parameters())]


def make(mode: str, shape: tuple[int, ...], reshard: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return simple_fsdp(Mlp(mode, DIM), mesh(*shape), reshard_after_forward=reshard)


def differences(
    rank: int, world_size: int, shape: tuple[int, ...], planner: str, reshard: bool, mode: str
) -> tuple[int, list[str]]:
    """Number of values compared, and what was wrong: unequal values, failed passes, no merged collective."""
    reference = make("none", shape, reshard)
    expected = train(reference, reference, rank)
    model = make(mode, shape, reshard)
    backend = aot_eager_backend(PassConfig(planner=planner, blocks=("layers.*",), profile="h100_sxm"))
    got = train(model, torch.compile(model, backend=backend, fullgraph=True), rank)
    wrong = [f"value {i}" for i, pair in enumerate(zip(got, expected, strict=True)) if not torch.equal(*pair)]
    wrong += [record.failure for record in backend.records if record.failure]
    merged = any("+" in line for record in backend.records for line in record.after)
    if planner != "none" and not merged:
        wrong.append("nothing was merged")
    return len(got), wrong


@pytest.mark.parametrize(
    ("shape", "planner", "reshard", "mode"),
    [
        ((2,), "block", True, "none"),
        ((2,), "auto", False, "full"),
        ((2,), "auto", True, "selective"),
        ((2, 1), "block", True, "full"),
        ((4,), "auto", True, "none"),
        ((2, 2), "block", True, "none"),
    ],
)
def test_debug_backend(workers, shape, planner, reshard, mode):
    ranks = torch.Size(shape).numel()
    for count, wrong in workers(ranks).run(differences, shape, planner, reshard, mode):
        assert count == STEPS + 6
        assert wrong == []


class Products(nn.Module):
    """Matrix products and ReLUs: TorchInductor's kernels for them round as eager kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def inductor_differences(rank: int, world_size: int) -> list[str]:
    """TorchInductor with all passes against eager mode: what was wrong."""
    passes = options(PassConfig(planner="block", blocks=("Products",), profile="h100_sxm"))
    torch.manual_seed(0)
    plain = Products()
    model = copy.deepcopy(plain)
    simple_fsdp(plain, mesh(2))
    expected = train(plain, plain, rank)
    simple_fsdp(model, mesh(2))
    got = train(model, torch.compile(model, fullgraph=True, options=passes), rank)
    values = [item for value in passes.values() for item in (value if isinstance(value, list) else [value])]
    records = [record for item in values if hasattr(item, "records") for record in item.records]
    wrong = [f"value {i}" for i, pair in enumerate(zip(got, expected, strict=True)) if not torch.equal(*pair)]
    wrong += [record.failure for record in records if record.failure]
    seen = sorted((record.name, record.graph) for record in records)
    passed = [(name, graph) for name in ("bucket", "reorder") for graph in ("backward", "forward")]
    if seen != [*passed, ("reshard", "joint")]:
        wrong.append(f"the passes saw {seen}")
    return wrong


def test_inductor(workers):
    assert workers(2).run(inductor_differences, timeout=170) == [[], []]
