"""Gradient accumulation: the sum is right in every mode, and no_sync sends nothing until the last micro-batch."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from simplefsdp import MixedPrecisionPolicy, no_sync, simple_fsdp
from tests.helpers.collectives import counts_by_kind, record_collectives
from tests.helpers.meshes import mesh
from tests.simplefsdp.models import batch, loss_of, make_net

MICRO_BATCHES = 4


def _reference_gradients(world: int, steps: int) -> list[list[torch.Tensor]]:
    """Mean over ranks of the summed gradients of each step's micro-batches, on one device."""
    model = make_net(layers=1)
    out = []
    for step in range(steps):
        model.zero_grad()
        for micro in range(MICRO_BATCHES):
            for rank in range(world):
                (loss_of(model, batch(10 * step + micro, rank)) / world).backward()
        out.append([p.grad.clone() for p in model.parameters()])
    return out


def _accumulate(rank: int, world: int, shape: tuple[int, ...], mode: str, backend: str):
    model = simple_fsdp(make_net(layers=1), mesh(*shape))
    run = model if backend == "eager" else torch.compile(model, backend=backend, fullgraph=True)
    expected = _reference_gradients(world, 2)
    counts = []
    for step in range(2):
        model.zero_grad()
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            tokens = batch(10 * step + micro, rank)
            with record_collectives() as seen:
                if mode == "plain" or last:
                    loss_of(run, tokens).backward()
                else:
                    with no_sync(model, replicas_only=mode == "replicas_only"):
                        loss_of(run, tokens).backward()
            counts.append(counts_by_kind(seen))
        for (name, param), grad in zip(model.named_parameters(), expected[step], strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), grad, msg=lambda m, n=name: f"{n}: {m}")
            assert param.grad.placements == param.placements
    return counts, sum(1 for _ in model.parameters())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_no_sync_defers_every_reduction(workers, backend):
    for counts, parameters in workers(2).run(_accumulate, (2,), "no_sync", backend, timeout=120):
        for step in (counts[:4], counts[4:]):
            for micro in step[:-1]:
                assert set(micro) == {"all_gather"}
            assert step[-1]["reduce_scatter"] == parameters


def test_plain_accumulation_reduces_every_time(workers):
    for counts, parameters in workers(2).run(_accumulate, (2,), "plain", "eager"):
        assert all(micro["reduce_scatter"] == parameters for micro in counts)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_replicas_only_defers_the_all_reduce(workers, backend):
    for counts, parameters in workers(4).run(_accumulate, (2, 2), "replicas_only", backend, timeout=150):
        for step in (counts[:4], counts[4:]):
            assert all(micro["reduce_scatter"] == parameters for micro in step)
            assert all("all_reduce" not in micro for micro in step[:-1])
            assert step[-1]["all_reduce"] == parameters


def test_no_sync_in_hybrid_and_replicated_meshes(workers):
    workers(4).run(_accumulate, (2, 2), "no_sync", "eager")


class Scale(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def _many_small(rank: int, world: int, storage: torch.dtype, stages: bool):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = simple_fsdp(Scale(storage), mesh(2, 2), mp_policy=policy)
    big, one = torch.full((4,), 256.0), torch.ones(4)
    for micro, x in enumerate([big] + [one] * 64):
        if micro == 64:
            model(x).backward()
        else:
            with no_sync(model, replicas_only=stages):
                model(x).backward()
    return model.weight.grad.full_tensor()


def test_small_gradients_are_not_lost_in_a_large_sum(workers):
    """256 + 64 x 1.0 is 320; added up in bf16 it stays 256."""
    for storage in (torch.float32, torch.bfloat16):
        for stages in (True, False):
            for grad in workers(4).run(_many_small, storage, stages):
                assert grad.tolist() == [320.0] * 4


def _unused_in_the_last(rank: int, world: int):
    model = simple_fsdp(nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}), mesh(2))
    x = torch.full((2, 3), float(rank + 1))
    with no_sync(model):
        (model["a"](x).sum() + model["b"](x).sum()).backward()
    model["a"](x).sum().backward()
    return model["a"].weight.grad.full_tensor(), model["b"].weight.grad.full_tensor()


def test_a_parameter_the_last_micro_batch_does_not_use_is_reduced_too(workers):
    for a, b in workers(2).run(_unused_in_the_last):
        assert torch.equal(a, torch.full((3, 3), 6.0))
        assert torch.equal(b, torch.full((3, 3), 3.0))


def _step_too_early(rank: int, world: int):
    model = simple_fsdp(nn.Linear(3, 3), mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with no_sync(model):
        model(torch.ones(2, 3)).sum().backward()
    assert model.weight.grad is None
    with pytest.raises(RuntimeError, match=r"'weight' waits for its reduction.*outside of no_sync"):
        optimizer.step()


def test_a_step_before_the_reduction_is_refused(workers):
    workers(2).run(_step_too_early)


def test_no_sync_of_an_unwrapped_module_is_refused():
    with pytest.raises(ValueError, match="no_sync: Linear holds no module wrapped"), no_sync(nn.Linear(2, 2)):
        pass


def _hooks(rank: int, world: int):
    model = simple_fsdp(nn.Linear(3, 3), mesh(2))
    weight = model._parameters["weight"]
    seen = []
    weight.register_hook(lambda grad: 2 * grad)
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.full_tensor()))
    x = torch.full((2, 3), float(rank + 1))
    for micro in range(3):
        with no_sync(model) if micro < 2 else contextlib.nullcontext():
            model(x).sum().backward()
        assert len(seen) == (micro == 2)
    return seen[0], weight.grad.full_tensor()


def test_hooks_on_parameters_run_once_with_the_reduced_gradient(workers):
    for seen, grad in workers(2).run(_hooks):
        assert torch.equal(seen, torch.full((3, 3), 2 * 3 * 3.0))  # mean of 2 and 4, three times, doubled
        assert torch.equal(grad, seen)


class Failing(torch.autograd.Function):
    """Identity whose backward raises while `fails` is set."""

    fails = False

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        if Failing.fails:
            raise ArithmeticError("no gradient")
        return grad


def _start_over(rank: int, world: int, failing: bool):
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = simple_fsdp(nn.ModuleDict({"first": first, "second": second}), mesh(2))
    x = torch.full((2, 3), float(rank + 1))

    def backward() -> None:
        model["second"](Failing.apply(model["first"](x))).sum().backward()

    Failing.fails = failing
    if failing:  # the accumulators of the second layer have their gradients, those of the first never get one
        with no_sync(model):
            pass
        with pytest.raises(ArithmeticError):
            backward()
    else:
        with no_sync(model):
            backward()
    Failing.fails = False
    model.zero_grad()
    with no_sync(model):
        backward()
    backward()
    return model["second"].bias.grad.full_tensor()


@pytest.mark.parametrize("failing", [False, True], ids=["abandoned", "backward raised"])
def test_zero_grad_drops_a_window_and_the_next_one_is_whole(workers, failing):
    for grad in workers(2).run(_start_over, failing):
        assert grad.tolist() == [4.0] * 3  # 2 rows, 2 micro-batches
