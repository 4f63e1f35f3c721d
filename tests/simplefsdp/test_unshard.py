"""Gather and reduce by themselves: values of every shape, the bytes that travel, what eager mode gathers again."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from simplefsdp import MixedPrecisionPolicy, simple_fsdp
from simplefsdp.mesh import DataParallelMesh, make_mesh
from simplefsdp.placement import ShardSpec, make_spec, shard_of
from simplefsdp.policy import GradientSync
from simplefsdp.unshard import gather, reduce_gradient, unshard
from tests.helpers.collectives import Collective, record_collectives
from tests.helpers.meshes import mesh

SHAPES = ((8, 3), (7, 3), (3, 2, 5), (1,), (4,), (5,), (1, 1), (2, 4, 3), (), (0, 3), (2, 0))
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
)
FULL, SHARD_GROUP, NONE = GradientSync.FULL, GradientSync.SHARD_GROUP, GradientSync.NONE


def layouts(world: int) -> list[DataParallelMesh]:
    """Every way to spread parameters over `world` ranks."""
    found = [make_mesh(mesh(world), None), make_mesh(mesh(world), 1)]
    if world == 4:
        found.append(make_mesh(mesh(2, 2), None))
    return found


def spec_for(full: torch.Tensor, dp: DataParallelMesh, dim: int, policy: Any = None) -> ShardSpec:
    param = nn.Parameter(full, requires_grad=False)
    choose = (lambda _: Shard(dim)) if dim else None
    return make_spec("weight", param, dp, policy or MixedPrecisionPolicy(), True, choose)[0]


def every_shape(world: int) -> Any:
    """(mesh, shape, dim) of every combination that exists."""
    for dp, shape in itertools.product(layouts(world), SHAPES):
        for dim in range(max(len(shape), 1)):
            yield dp, shape, dim


# -- values ---------------------------------------------------------------------------------------------------


def _gathers(rank: int, world: int) -> None:
    for dp, shape, dim in every_shape(world):
        full = torch.arange(torch.Size(shape).numel()).reshape(shape).double()
        spec = spec_for(full, dp, dim)
        shard = shard_of(full, spec, dp.shard_rank).clone()
        assert torch.equal(gather(shard, spec), full), (dp, shape, dim)
        if not shape:
            continue
        # A shard that comes as a view, with strides of its own.
        strided = shard.movedim(0, -1).contiguous().movedim(-1, 0)
        assert torch.equal(gather(strided, spec), full)
    for dp, dtype in itertools.product(layouts(world), DTYPES):
        full = (torch.arange(15).reshape(5, 3) % 7).to(dtype)
        spec = spec_for(full, dp, 1)
        out = gather(shard_of(full, spec, dp.shard_rank).contiguous(), spec)
        assert out.dtype == dtype
        assert torch.equal(out.to(torch.complex128), full.to(torch.complex128)), dtype


def test_a_gather_undoes_sharding(workers):
    for world in (1, 2, 4):
        workers(world).run(_gathers)


def _reduces(rank: int, world: int) -> None:
    for dp, shape, dim in every_shape(world):
        numbers = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).double()
        mean = numbers * sum(r + 1 for r in range(world)) / world
        spec = spec_for(numbers, dp, dim)
        expected = shard_of(mean, spec, dp.shard_rank)
        grad = numbers * (rank + 1)
        for expanded in (grad, grad.clone().mT.contiguous().mT if grad.dim() > 1 else grad):
            reduced = reduce_gradient(expanded, expected.shape, spec, NONE, FULL)
            assert torch.equal(reduced, expected), (dp, shape, dim)
        # In two steps, or three: the same.
        waiting = reduce_gradient(grad, expected.shape, spec, NONE, NONE)
        assert torch.equal(waiting, grad)
        waiting = reduce_gradient(waiting, expected.shape, spec, NONE, SHARD_GROUP)
        assert torch.equal(reduce_gradient(waiting, expected.shape, spec, SHARD_GROUP, FULL), expected)


def test_a_reduction_gives_each_rank_its_part_of_the_mean(workers):
    for world in (1, 2, 4):
        workers(world).run(_reduces)


def _differentiates(rank: int, world: int) -> None:
    dp = make_mesh(mesh(world), None)
    full = torch.randn(5, 3, dtype=torch.complex128)
    spec = spec_for(full, dp, 0)
    weight = torch.randn(5, 3, dtype=torch.complex128)
    for output in (
        lambda w: w.conj() * weight,  # its gradient is a lazy conjugate
        lambda w: w.conj().imag * weight.real,  # and this one a lazy negative
        lambda w: w.mH.sum(0),
        lambda w: w.expand(2, 5, 3).sum(),
    ):
        plain = full.clone().requires_grad_()
        output(plain).abs().sum().backward()
        shard = shard_of(full, spec, dp.shard_rank).clone().requires_grad_()
        output(unshard(shard, None, spec, FULL)).abs().sum().backward()
        torch.testing.assert_close(shard.grad, shard_of(plain.grad, spec, dp.shard_rank).resolve_conj())
        assert not shard.grad.is_conj()


def test_gradients_that_are_lazy_views_are_reduced_by_value(workers):
    for world in (1, 2):
        workers(world).run(_differentiates)


def _half_mean(rank: int, world: int, value: float) -> list[float]:
    spec = spec_for(torch.zeros(4, dtype=torch.float16), make_mesh(mesh(world), None), 0)
    grad = torch.full((4,), value, dtype=torch.float16)
    return reduce_gradient(grad, torch.Size([1]), spec, NONE, FULL).tolist()


def test_a_mean_in_half_precision_neither_overflows_nor_vanishes(workers):
    """Four times 30000 is more than fp16 holds; a quarter of 2^-23 is less."""
    for value in (30000.0, 2.0**-23):
        assert workers(4).run(_half_mean, value) == [[value]] * 4


# -- what travels ----------------------------------------------------------------------------------------------


def _traffic(rank: int, world: int, shape: tuple[int, ...], factor: int | None) -> list[Collective]:
    model = simple_fsdp(nn.Linear(6, 10), mesh(*shape), sharding_factor=factor)
    with record_collectives() as collectives:
        model(torch.ones(2, 6)).sum().backward()
    return collectives


@pytest.mark.parametrize(
    ("shape", "factor", "kinds"),
    [
        ((4,), None, {"all_gather": 4, "reduce_scatter": 4}),
        ((4,), 1, {"all_reduce": 4}),
        ((2, 2), None, {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2}),
        ((4, 1), None, {"all_reduce": 4}),
        ((1, 4), None, {"all_gather": 4, "reduce_scatter": 4}),
    ],
)
def test_bytes_of_one_step(workers, shape, factor, kinds):
    """Weight (10, 6) and bias (10,) in fp32. No gather in backward: without a gradient of the input none is needed.

    In hybrid sharding the reduce-scatter comes first and only the shard crosses between replicas.
    """
    ranks_per_copy = kinds.get("all_gather", 1)
    padded_rows = -(-10 // ranks_per_copy) * ranks_per_copy
    whole_bytes = {padded_rows * 6 * 4, padded_rows * 4}
    shard_bytes = {size // ranks_per_copy for size in whole_bytes}
    reductions = [kind for kind in ("reduce_scatter", "all_reduce") if kind in kinds]
    order = ["all_gather"] * 2 * ("all_gather" in kinds) + reductions * 2
    for collectives in workers(4).run(_traffic, shape, factor):
        assert [c.kind for c in collectives] == order
        for c in collectives:
            assert c.group_size == kinds[c.kind]
            assert c.size_bytes in (shard_bytes if c.kind == "all_reduce" else whole_bytes)
            assert c.reduce_op == (None if c.kind == "all_gather" else "avg")


# -- eager mode's re-gather -------------------------------------------------------------------------------------


class Conjugating(nn.Module):
    """Saves a lazy conjugate of its weight for backward."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 3, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.conj()


def _regathers_conjugates(rank: int, world: int) -> None:
    for rows in (4, 5):
        model = Conjugating(rows)
        x = torch.randn(2, rows, dtype=torch.complex128, requires_grad=True)
        model(x).abs().sum().backward()
        expected, x.grad = x.grad, None
        model.zero_grad()
        simple_fsdp(model, mesh(world))
        with record_collectives() as collectives:
            model(x).abs().sum().backward()
        assert [c.kind for c in collectives] == ["all_gather", "all_gather", "reduce_scatter"]
        torch.testing.assert_close(x.grad, expected)


def test_a_conjugated_weight_is_gathered_again_as_such(workers):
    workers(2).run(_regathers_conjugates)


class Writing(nn.Module):
    """Writes to its weight in forward, where autograd watches or where it does not."""

    def __init__(self, rows: int, watched: bool) -> None:
        super().__init__()
        self.weight, self.watched = nn.Parameter(torch.ones(rows, 3)), watched

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        with torch.set_grad_enabled(self.watched):
            weight.mul_(2)
        return x @ weight


def _writes(rank: int, world: int) -> None:
    for rows, watched, reshard in itertools.product((4, 5), (True, False), (True, False)):
        model = simple_fsdp(Writing(rows, watched), mesh(world), reshard_after_forward=reshard)
        with pytest.raises(RuntimeError, match="is a view and"):
            model(torch.ones(2, rows))


def test_a_write_in_forward_is_an_error(workers):
    """It would change the gathered copy and be lost."""
    for world in (1, 2):
        workers(world).run(_writes)


class Counting(nn.Module):
    """Keeps a count in a parameter, which autograd does not guard."""

    def __init__(self, rows: int, frozen: bool) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(rows), requires_grad=not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count.add_(1)
        return x * self.count


def _counts(rank: int, world: int) -> None:
    for rows, frozen in ((4, True), (5, False)):
        model = simple_fsdp(nn.Sequential(nn.Linear(rows, rows), Counting(rows, frozen)), mesh(world))
        for guard in (contextlib.nullcontext, torch.no_grad):
            with (
                pytest.raises(RuntimeError, match=r"has written to parameter '1\.count'.*in a buffer"),
                guard(),
            ):
                model(torch.ones(2, rows))
        assert model[0](torch.ones(2, rows)).shape == (2, rows)


def test_a_write_that_autograd_does_not_see_is_an_error(workers):
    for world in (1, 2):
        workers(world).run(_counts)


def _infers(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = simple_fsdp(nn.Sequential(nn.Linear(3, 5), nn.LSTM(5, 3)), mesh(world))
    with torch.no_grad():
        expected = model(torch.ones(2, 3))[0]
    with torch.inference_mode():
        assert torch.equal(model(torch.ones(2, 3))[0], expected)
        torch.manual_seed(0)
        inside = simple_fsdp(nn.Sequential(nn.Linear(3, 5), nn.LSTM(5, 3)), mesh(world))
        assert torch.equal(inside(torch.ones(2, 3))[0], expected), "made in inference mode itself"
    model(torch.ones(2, 3))[0].sum().backward()


def test_inference_mode_reads_the_same(workers):
    workers(2).run(_infers)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)


def _sparse(rank: int, world: int, factor: int | None) -> torch.Tensor:
    model = simple_fsdp(Sparse(), mesh(world), sharding_factor=factor)
    model(torch.tensor([rank, 4])).sum().backward()
    return model.embed.weight.grad.full_tensor()


def test_sparse_gradients_become_dense_means(workers):
    for factor in (None, 1):
        for grad in workers(2).run(_sparse, factor):
            assert grad[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0, 1.0]
