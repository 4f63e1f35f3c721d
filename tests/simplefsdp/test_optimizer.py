"""Optimizers and clipping: fused, foreach and retargeted ones train as the unsharded model does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor

from simplefsdp import clip_grad_norm_, simple_fsdp
from tests.helpers.meshes import mesh
from tests.helpers.worlds import fake_process_group
from tests.simplefsdp.models import Block, batch, loss_of, make_net


def _reference(world: int, make_optimizer, steps: int = 3) -> list[torch.Tensor]:
    model = make_net(layers=1)
    optimizer = make_optimizer(list(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model, batch(step, rank)) for rank in range(world)) / world).backward()
        optimizer.step()
    return [p.data for p in model.parameters()]


def _adamw(params, **options):
    return torch.optim.AdamW(params, lr=0.01, **options)


_OPTIMIZERS = {
    "default": _adamw,
    "fused": lambda params: _adamw(params, fused=True),
    "foreach": lambda params: _adamw(params, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def _train(rank: int, world: int):
    for name, make in _OPTIMIZERS.items():
        model = simple_fsdp(make_net(layers=1), mesh(world))
        optimizer = make(list(model.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            optimizer.step()
        for param, expected in zip(model.parameters(), _reference(world, make), strict=True):
            torch.testing.assert_close(param.full_tensor(), expected, msg=lambda m, n=name: f"{n}: {m}")
            for value in optimizer.state[param].values():
                if value.dim():
                    assert isinstance(value, DTensor), name
                    assert value.to_local().shape == param.to_local().shape


def test_optimizers_equal_the_unsharded_ones(workers):
    workers(2).run(_train)


def _built_before(rank: int, world: int):
    """Two steps unsharded, then wrapped: the optimizer goes on with the shards, momentum included."""
    model = make_net(layers=1)
    optimizer = _adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    reference = make_net(layers=1)
    reference_optimizer = _adamw(reference.parameters())
    reference_scheduler = torch.optim.lr_scheduler.StepLR(reference_optimizer, 1, 0.5)
    for step in range(4):
        if step == 2:
            optimizer.zero_grad()
            simple_fsdp(model, mesh(world))
        for run, opt, lr, ranks in (
            (model, optimizer, scheduler, [rank] if step >= 2 else range(world)),
            (reference, reference_optimizer, reference_scheduler, range(world)),
        ):
            opt.zero_grad()
            (sum(loss_of(run, batch(step, r)) for r in ranks) / len(ranks)).backward()
            opt.step()
            lr.step()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected.data)
    params = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))


def test_an_optimizer_built_before_wrapping_trains_the_shards(workers):
    workers(2).run(_built_before)


class OneTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self) -> torch.Tensor:
        return (self.weight * torch.tensor([1.0, 2.0])).sum()


def _clip(rank: int, world: int):
    model = simple_fsdp(OneTwo(), mesh(world))
    model().backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    assert not isinstance(norm, DTensor)
    clipped = model.weight.grad.full_tensor()
    model.zero_grad()
    model().backward()
    theirs = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    largest = clip_grad_norm_(model.parameters(), 100.0, math.inf)
    with torch.no_grad():
        model.weight.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match=r"gradient norm of order 2\.0 is nan"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    return norm.item(), clipped, theirs.item(), largest.item()


def test_the_norm_is_over_all_ranks_and_equal_on_each(workers):
    for norm, clipped, theirs, largest in workers(2).run(_clip):
        assert norm == pytest.approx(math.sqrt(5), rel=1e-7)
        assert theirs == pytest.approx(math.sqrt(5), rel=1e-7)
        torch.testing.assert_close(clipped, torch.tensor([1.0, 2.0]) / math.sqrt(5))
        assert largest == pytest.approx(2.0 / math.sqrt(5), rel=1e-5)
    assert float(clip_grad_norm_([], 1.0)) == 0.0


def _mixed(rank: int, world: int):
    """Parameters on two meshes and an ignored one: clipping and the default optimizers take them together."""
    torch.manual_seed(2)
    expected = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    ignored = list(model[2].parameters())
    simple_fsdp(model[0], mesh(world))
    simple_fsdp(model, mesh(world), sharding_factor=1, ignored_params=ignored)
    assert list(model[2].parameters()) == ignored
    x = torch.ones(2, 3)
    for make in (_adamw, lambda params: torch.optim.SGD(params, lr=0.1)):
        optimizer, expected_optimizer = make(model.parameters()), make(expected.parameters())
        for run, opt in ((model, optimizer), (expected, expected_optimizer)):
            opt.zero_grad()
            run(x).square().sum().backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5))
        optimizer.step()
        expected_optimizer.step()
    for param, reference in zip(model.parameters(), expected.parameters(), strict=True):
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        torch.testing.assert_close(whole.data, reference.data)


def test_parameters_on_two_meshes_and_ignored_ones(workers):
    workers(2).run(_mixed)


def test_mixed_groups_do_not_use_multi_tensor_loops(workers):
    workers(2).run(_foreach_off)


def _foreach_off(rank: int, world: int):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    simple_fsdp(model[0], mesh(world))
    mixed, pure = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    mixed.step()
    pure.step()
    assert mixed.param_groups[0]["foreach"] is False
    assert pure.param_groups[0]["foreach"] is None


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.a(x) if left else self.b(x)


def _apart(rank: int, world: int, backend: str | None, shape: tuple[int, ...]) -> str:
    model = simple_fsdp(Fork(), mesh(*shape))
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(torch.ones(1, 2), left=rank == 0).sum().backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_ranks_that_use_different_parameters_are_told_at_the_first_step(workers, backend):
    """Equal shapes let the collectives pair up: without the check, a silent wrong gradient."""
    for message in workers(2).run(_apart, backend, (2,)):
        assert "rank 0: gather of 'a.weight', rank 1: gather of 'b.weight'" in message


def test_all_ranks_of_a_hybrid_mesh_are_told(workers):
    """The ranks that agree with their own replica and shard group must not wait for those that do not."""
    for message in workers(4).run(_apart, None, (2, 2)):
        assert "rank 0: gather of 'a.weight', rank 1: gather of 'b.weight', rank 2: gather of 'b" in message


def _other_of_two_equal_blocks(rank: int, world: int) -> str:
    """Both blocks run the code that was compiled for the first one, so only the gradients tell them apart."""
    model = simple_fsdp(nn.ModuleList([Block() for _ in range(3)]), mesh(world))
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1 + rank](model[0](torch.ones(1, 12, requires_grad=True))).sum().backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


def test_equal_blocks_that_share_code_are_told_apart(workers):
    for message in workers(2).run(_other_of_two_equal_blocks):
        assert "rank 0: gradient of '1.norm.weight', rank 1: gradient of '2.norm.weight'" in message


def _unlike_code(rank: int, world: int) -> None:
    """Rank 0 compiles twice and in one graph, rank 1 breaks the graph: the same parameters in the same order."""
    model = simple_fsdp(make_net(layers=1), mesh(world))
    if rank == 1:
        model.blocks[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    run = torch.compile(model, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro in range(2):
        tokens = batch(0, rank)
        loss_of(run, tokens[:, : 5 - micro * (1 - rank)]).backward()
    optimizer.step()


def test_ranks_may_compile_differently_as_long_as_they_use_the_same(workers):
    workers(2).run(_unlike_code)


def test_a_compiled_step_trains_the_same_without_a_warning():
    """The optimizer is built before wrapping: the hook exchanges its parameters before the compiled code runs."""
    trained = []
    with fake_process_group(0, 1):
        for compiled in (False, True):
            model = make_net(layers=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            counter = CompileCounter()
            step = torch.compile(optimizer.step, backend=counter) if compiled else optimizer.step
            simple_fsdp(model)
            for i in range(3):
                optimizer.zero_grad()
                loss_of(model, batch(i, 0)).backward()
                step()
            assert (counter.op_count > 0) is compiled
            trained.append([p.to_local().clone() for p in model.parameters()])
    torch._dynamo.reset()
    for ours, expected in zip(*trained, strict=True):
        torch.testing.assert_close(ours, expected)


def _hooks(rank: int, world: int):
    model = simple_fsdp(make_net(layers=1), mesh(world))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    seen = []
    model.head._parameters["weight"].register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad)))
    for step in range(2):
        loss_of(run, batch(step, rank)).backward()
    assert seen == [DTensor, DTensor]


def test_post_accumulate_hooks_fire_once_with_the_reduced_gradient(workers):
    workers(2).run(_hooks)
