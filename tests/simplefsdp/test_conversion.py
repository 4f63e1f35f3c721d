"""Converting a wrapped model (`bfloat16`, `double`, `to`, `cpu`) does what it does to a plain one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from simplefsdp import MixedPrecisionPolicy, no_sync, simple_fsdp
from simplefsdp.optimizer import find_slot
from tests.helpers.collectives import record_collectives
from tests.helpers.meshes import mesh
from tests.helpers.worlds import fake_process_group
from tests.simplefsdp.models import batch, loss_of, make_net

CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "to a dtype and back": lambda model: model.to(torch.float64).to(torch.float32),
    "nothing": lambda model: model.cpu().to("cpu").float().to(torch.float32),
}


def _step(model: nn.Module, runs: list[Callable[[], torch.Tensor]], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for run in runs:
        (run() / len(runs)).backward()
    optimizer.step()


def _train(rank: int, world: int, convert: Callable[[nn.Module], nn.Module], backend: str | None) -> None:
    """Two steps, the conversion, two more, in step with a plain model that sees every rank's batch."""
    model, plain = simple_fsdp(make_net(layers=1, tied=True), mesh(world)), make_net(layers=1, tied=True)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (model, plain))
    before = list(model.parameters())
    for step in range(4):
        if step == 2:
            convert(model)
            convert(plain)
        tokens = [batch(step, r) for r in range(world)]
        mine = tokens[rank]
        _step(model, [lambda t=mine: loss_of(run, t)], ours)
        _step(plain, [lambda t=t: loss_of(plain, t) for t in tokens], theirs)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True)), "optimizers hold them"
    for (name, param), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert find_slot(param) is not None
        for value, expected in ((param, reference), (param.grad, reference.grad)):
            assert isinstance(value, DTensor)
            assert value.dtype == expected.dtype
            # bf16 and fp16 sums round in another order: a few units in the last place of the largest element.
            bound = 8 * torch.finfo(expected.dtype).eps * expected.abs().max().item()
            torch.testing.assert_close(
                value.detach().full_tensor(),
                expected.detach(),
                rtol=0,
                atol=max(bound, 1e-6),
                msg=lambda m, n=name: f"{n}: {m}",
            )


def _train_all(rank: int, world: int, backend: str | None, names: list[str]) -> None:
    for name in names:
        torch._dynamo.reset()
        _train(rank, world, CONVERSIONS[name], backend)


def test_training_goes_on_as_in_a_plain_model(workers):
    workers(2).run(_train_all, None, list(CONVERSIONS))


def test_compiled_training_goes_on_as_in_a_plain_model(workers):
    workers(2).run(_train_all, "aot_eager", ["double", "bfloat16"])


def _dtypes_after_conversion(rank: int, world: int) -> list[torch.dtype]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = simple_fsdp(nn.Linear(3, 4, bias=False), mesh(world), mp_policy=policy)
    model.double()
    with record_collectives() as seen:
        model(torch.ones(2, 3)).sum().backward()
    assert model.weight.grad.dtype == torch.float64
    return [collective.dtype for collective in seen]


def test_the_policy_still_decides_the_dtypes_of_collectives(workers):
    for dtypes in workers(2).run(_dtypes_after_conversion):
        assert dtypes == [torch.bfloat16, torch.float32]


def test_gradients_that_wait_refuse_a_conversion_and_nothing_changes():
    with fake_process_group(0, 2):
        model = simple_fsdp(make_net(layers=1))
        with no_sync(model):
            with pytest.raises(RuntimeError, match=r"cannot be converted .*gradients are about to wait"):
                model.double()
            loss_of(model, batch(0, 0)).backward()
        for part in (model, model.blocks):
            with pytest.raises(
                RuntimeError, match=r"gradient of 'embed\.weight' waits for its reduction: convert"
            ):
                part.double()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        loss_of(model, batch(0, 0)).backward()
        model.double()
        with no_sync(model):
            loss_of(model, batch(0, 0)).backward()
        loss_of(model, batch(0, 0)).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


def test_attributes_of_parameters_outlive_a_conversion():
    with fake_process_group(0, 2):
        with torch.device("meta"):
            model = nn.Linear(3, 4)
        model.weight.decay = False
        simple_fsdp(model)
        model.to_empty(device="cpu")
        model.bfloat16()
        assert model.weight.decay is False
        assert find_slot(model.weight).fqn == "weight"


def test_an_assigned_shard_of_another_dtype_decides_the_dtype():
    with fake_process_group(0, 2):
        model = simple_fsdp(nn.Linear(3, 4))
        model.weight = nn.Parameter(model.weight.detach().double())
        model.bias = nn.Parameter(model.bias.detach().double())
        assert model(torch.ones(1, 3, dtype=torch.float64)).dtype == torch.float64
        assert find_slot(model.weight).fqn == "weight"
