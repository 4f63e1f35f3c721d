"""Training equals FSDP2's, bit for bit.

gloo sums the elements of a message in an order that depends on where they stand in it. With two ranks in a reduction
that changes nothing; with four, FSDP2 is given the same messages as ours: one group for each parameter.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from simplefsdp import MixedPrecisionPolicy, simple_fsdp
from tests.helpers.meshes import mesh
from tests.simplefsdp.models import batch, loss_of

STEPS = 20


class OneParameterEach(nn.Module):
    """Modules of one parameter each, with rows that four ranks share unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.norm = nn.LayerNorm(12, bias=False)
        self.up = nn.Linear(12, 21, bias=False)
        self.down = nn.Linear(21, 12, bias=False)
        self.head = nn.Linear(12, 11, bias=False)

    @property
    def block(self) -> tuple[nn.Module, ...]:
        return self.norm, self.up, self.down

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def _train(
    rank: int, world: int, ours: bool, shape: tuple[int, ...], backend: str, policy: MixedPrecisionPolicy
):
    torch.manual_seed(7)
    model = OneParameterEach()
    device_mesh = mesh(*shape)
    if ours:
        simple_fsdp(model, device_mesh, mp_policy=policy)
    else:
        for module in model.children() if shape == (4,) else model.block:
            fully_shard(module, mesh=device_mesh, mp_policy=policy)
        fully_shard(model, mesh=device_mesh, mp_policy=policy)
    step_model = model if backend == "eager" else torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(step_model, batch(step, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().full_tensor() for p in model.parameters()]


def _compare(
    rank: int, world: int, shape: tuple[int, ...], policy: MixedPrecisionPolicy, backends: tuple[str, ...]
):
    expected_losses, expected = _train(rank, world, False, shape, "eager", policy)
    for backend in backends:
        losses, parameters = _train(rank, world, True, shape, backend, policy)
        assert losses == expected_losses, f"{backend}: {losses} differs from FSDP2's {expected_losses}"
        for ours, theirs in zip(parameters, expected, strict=True):
            assert torch.equal(ours, theirs), backend
    return expected_losses


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_twenty_adamw_steps_equal_fsdp2_bit_for_bit(workers, shape):
    world = shape[0] * (shape[1] if len(shape) == 2 else 1)
    losses = workers(world).run(_compare, shape, MixedPrecisionPolicy(), ("aot_eager",), timeout=150)
    assert losses[0] != losses[1], "ranks saw the same data, so a missing reduction would not show"
    assert losses[0][-1] < losses[0][0]


def test_mixed_precision_equals_fsdp2_bit_for_bit(workers):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    workers(2).run(_compare, (2,), policy, ("eager",), timeout=100)
