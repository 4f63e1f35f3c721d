"""Where the pieces of a parameter live: the arithmetic of shards, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from simplefsdp import full_parameters, simple_fsdp
from simplefsdp.mesh import DataParallelMesh, Group, make_mesh
from simplefsdp.placement import ShardSpec, contiguous_stride, make_spec, shard_of, to_sharded
from simplefsdp.policy import MixedPrecisionPolicy
from tests.helpers.worlds import fake_process_group, local_tensor_ranks, values_by_rank

BF16_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def spec_of(
    param: nn.Parameter, dp: DataParallelMesh, policy: MixedPrecisionPolicy | None = None, fn: Any = None
):
    return make_spec("block.weight", param, dp, policy or MixedPrecisionPolicy(), True, fn)


# -- arithmetic -----------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)


@given(data=st.data(), shape=shapes, ranks=st.integers(1, 17))
def test_shards_of_all_ranks_make_the_whole(data, shape, ranks):
    dim = data.draw(st.integers(0, len(shape) - 1))
    spec = ShardSpec(
        name="weight",
        shape=shape,
        shard_dim=dim,
        gather_group=Group("shard", ranks) if ranks > 1 else None,
        mean_groups=(),
        replica_groups=(),
        storage_dtype=torch.float32,
        compute_dtype=torch.float32,
        reduce_dtype=None,
        reshard_after_forward=True,
        tensor_parallel=None,
    )
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    shards = [shard_of(full, spec, rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(shards, dim), full)
    assert all(shard.shape[dim] <= spec.padded_rows for shard in shards)
    assert shards[0].shape[dim] == min(spec.padded_rows, shape[dim])  # the first is never a short one
    # The same as torch.chunk, which is what DTensor means by Shard.
    chunks = list(torch.chunk(full, ranks, dim)) if shape[dim] else [full]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, chunks[rank]) if rank < len(chunks) else shard.shape[dim] == 0


@given(shape=st.lists(st.integers(1, 9), max_size=5).map(tuple))
def test_strides_are_those_of_a_contiguous_tensor(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()


SHAPES = [(8, 3), (7, 3), (3, 2), (1, 5), (0, 3), (2, 0), (5,)]


@pytest.mark.parametrize(
    ("shape", "dim"), [((), 0), *((shape, dim) for shape in SHAPES for dim in range(-1, len(shape)))]
)
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_stored_shards_are_what_dtensor_makes_of_the_placements(shape, dim, factor):
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    for rank in range(4):
        with fake_process_group(rank, 4):
            dp = make_mesh(None, factor)
            param = nn.Parameter(full.clone())
            spec, mesh, placements = spec_of(param, dp, fn=lambda _: Shard(dim))
            stored = to_sharded(param, spec, mesh, placements, dp.shard_rank)
            expected = distribute_tensor(full, mesh, placements, src_data_rank=None)
            assert torch.equal(stored.to_local(), expected.to_local())
            assert stored.to_local().is_contiguous()
            assert (stored.shape, stored.stride()) == (expected.shape, contiguous_stride(shape))
            assert stored.placements == placements
            # A copy: the unsharded parameter can go.
            assert stored.to_local().numel() == 0 or stored.to_local().data_ptr() != param.data_ptr()


@pytest.mark.parametrize("factor", [None, 2, 1])
def test_all_ranks_in_one_process_cut_unevenly_and_gather_again(factor):
    """LocalTensorMode: the rank is a symbolic int, and a tensor has one value for each rank."""
    whole = torch.arange(21.0).reshape(7, 3)
    with local_tensor_ranks(4):
        model = nn.Linear(3, 7, bias=False)
        with torch.no_grad():
            model.weight.copy_(whole)
        simple_fsdp(model, sharding_factor=factor)
        shards = values_by_rank(model.weight.to_local())
        cut = [whole] if factor == 1 else whole.chunk(factor or 4)
        assert all(torch.equal(shard, cut[rank % len(cut)]) for rank, shard in enumerate(shards))
        model(torch.ones(2, 3)).sum().backward()
        with full_parameters(model):
            gathered = values_by_rank(model.weight)
        assert all(torch.equal(value, whole) for value in gathered)
        for gradient in values_by_rank(model.weight.grad.full_tensor()):
            assert torch.equal(gradient, torch.full((7, 3), 2.0))


def test_transposed_storage_becomes_contiguous_shards():
    transposed = torch.arange(12.0).reshape(3, 4).t()
    with fake_process_group(1, 2):
        dp = make_mesh(None, None)
        spec, mesh, placements = spec_of(nn.Parameter(transposed), dp)
        stored = to_sharded(transposed, spec, mesh, placements, dp.shard_rank)
    assert torch.equal(stored.to_local(), transposed[2:])
    assert stored.to_local().is_contiguous()


# -- decisions ------------------------------------------------------------------------------------------------

WHOLE = (Replicate(), Replicate())
HALF = (Replicate(), Shard(0))


@pytest.mark.parametrize(
    ("param", "placements", "gathers", "means", "replicas"),
    [
        (torch.zeros(8, 3), HALF, True, 0, 1),
        (torch.zeros(3), HALF, True, 0, 1),
        (torch.zeros(1), HALF, True, 0, 1),
        (torch.zeros(()), WHOLE, False, 1, 1),  # cannot be cut: both groups average its gradient
        (torch.zeros(0, 4), WHOLE, False, 0, 0),  # nothing to send
        (torch.zeros(4, 0), WHOLE, False, 0, 0),
        (torch.zeros(5, dtype=torch.int64), HALF, True, 0, 1),
    ],
)
def test_what_is_cut_and_what_is_kept_whole(param, placements, gathers, means, replicas):
    with fake_process_group(0, 4):
        dp = make_mesh(None, 2)
        spec, mesh, stored = spec_of(nn.Parameter(param, requires_grad=False), dp)
        assert stored == placements
        assert mesh is dp.mesh
        assert (spec.gather_group is not None, len(spec.mean_groups), len(spec.replica_groups)) == (
            gathers,
            means,
            replicas,
        )


def test_groups_of_one_rank_take_part_in_nothing():
    with fake_process_group(0, 1):
        for factor in (None, 1):
            spec, _, _ = spec_of(nn.Parameter(torch.zeros(4)), make_mesh(None, factor))
            assert (spec.gather_group, spec.mean_groups, spec.replica_groups) == (None, (), ())
    with fake_process_group(0, 4):
        one_replica = make_mesh(init_device_mesh("cpu", (1, 4)), None)
        spec, _, stored = spec_of(nn.Parameter(torch.zeros(4)), one_replica)
        assert (spec.replica_groups, stored) == ((), HALF)
        one_shard = make_mesh(init_device_mesh("cpu", (4, 1)), None)
        spec, _, _ = spec_of(nn.Parameter(torch.zeros(4)), one_shard)
        assert spec.gather_group is None
        assert [group.size for group in spec.replica_groups] == [4]


@pytest.mark.parametrize(
    ("dtype", "compute", "reduce"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.complex64, torch.complex64, None),
        (torch.int32, torch.int32, None),
        (torch.bool, torch.bool, None),
    ],
)
def test_the_policy_casts_floating_parameters_only(dtype, compute, reduce):
    with fake_process_group(0, 2):
        param = nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        spec, _, _ = spec_of(param, make_mesh(None, None), BF16_FP32)
    assert (spec.storage_dtype, spec.compute_dtype, spec.reduce_dtype) == (dtype, compute, reduce)


def test_equal_parameters_have_equal_specs():
    """Equal blocks share compiled code only if what the graph depends on compares equal."""
    with fake_process_group(0, 4):
        dp = make_mesh(None, 2)
        specs = [
            make_spec(f"blocks.{n}.weight", nn.Parameter(torch.zeros(3, 2)), dp, BF16_FP32, True, None)[0]
            for n in (0, 1)
        ]
        assert specs[0] == specs[1]
        assert hash(specs[0]) == hash(specs[1])
        assert dataclasses.replace(specs[0], compute_dtype=torch.float16) != specs[1]


# -- tensor parallel ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6,), (10, 3), (5, 4), (3, 2), (1, 1)])
@pytest.mark.parametrize("tp_placement", [Shard(0), Shard(-1), Replicate()])
@pytest.mark.parametrize("factor", [None, 1])
def test_tensor_parallel_shards_are_cut_again(shape, tp_placement, factor):
    full = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    shards: dict[int, torch.Tensor] = {}
    for rank in range(4):
        with fake_process_group(rank, 4):
            world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            param = nn.Parameter(distribute_tensor(full, world["tp"], [tp_placement], src_data_rank=None))
            before = param.to_local().detach().clone()
            dp = make_mesh(world["dp"], factor)
            spec, mesh, placements = spec_of(param, dp)
            stored = to_sharded(param, spec, mesh, placements, dp.shard_rank)
            assert (tuple(stored.shape), stored.placements) == (shape, placements)
            assert mesh.shape == (2, 2)
            assert spec.shape == tuple(before.shape)
            assert torch.equal(shard_of(before, spec, dp.shard_rank), stored.to_local())
            same_dim = isinstance(tp_placement, Shard) and tp_placement.dim % len(shape) == 0
            if factor is None:
                assert placements[0] == (_StridedShard(0, split_factor=2) if same_dim else Shard(0))
            else:
                assert placements[0] == Replicate()
            shards[rank] = stored.to_local()
    if factor is None:  # every element is somewhere, as often as tensor-parallel ranks replicate it
        copies = 2 if tp_placement == Replicate() else 1
        elements = torch.cat([shard.flatten() for shard in shards.values()]).sort().values
        assert torch.equal(elements, full.flatten().repeat_interleave(copies))


def _whole_again(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = make_mesh(mesh["dp"], None)
    for shape in ((6,), (10, 3), (5, 4), (3, 3), (1, 2)):
        for placement in (Shard(0), Shard(len(shape) - 1), Replicate()):
            full = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
            param = nn.Parameter(distribute_tensor(full, mesh["tp"], [placement], src_data_rank=None))
            spec, joined, placements = spec_of(param, dp)
            stored = to_sharded(param, spec, joined, placements, dp.shard_rank)
            assert torch.equal(stored.full_tensor(), full), (shape, placement)


def test_full_tensor_of_a_nested_sharding_is_the_original(workers):
    workers(4).run(_whole_again)


# -- refusals -------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def _lazy() -> nn.Parameter:
    return nn.LazyLinear(3).weight


def _sparse() -> nn.Parameter:
    return nn.Parameter(torch.eye(3).to_sparse())


def _subclass() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3).as_subclass(Subclass))


@pytest.mark.parametrize(
    ("param", "fn", "error", "message"),
    [
        (_lazy, None, ValueError, r"'block\.weight' is not initialised yet .*run one forward"),
        (
            _sparse,
            None,
            TypeError,
            r"'block\.weight' has layout torch\.sparse_coo: only dense.*ignored_params",
        ),
        (_subclass, None, TypeError, r"'block\.weight' is a Subclass, a tensor subclass"),
        (
            lambda: nn.Parameter(torch.zeros(4, 5)),
            lambda _: Shard(2),
            ValueError,
            r"chose dim 2 for parameter 'block\.weight', which has shape \(4, 5\)",
        ),
        (lambda: nn.Parameter(torch.zeros(4, 5)), lambda _: Shard(-3), ValueError, r"chose dim -3 for"),
        (
            lambda: nn.Parameter(torch.zeros(4, 5)),
            lambda _: 1,
            TypeError,
            r"returned 1 for parameter 'block\.weight' of shape \(4, 5\); return .*Shard\(dim\), or None",
        ),
        (
            lambda: nn.Parameter(torch.zeros(4)),
            lambda _: Replicate(),
            TypeError,
            r"returned Replicate\(\) for",
        ),
    ],
)
def test_a_parameter_that_cannot_be_sharded_is_refused_by_name(param, fn, error, message):
    with fake_process_group(0, 2), pytest.raises(error, match=message):
        spec_of(param(), make_mesh(None, None), fn=fn)


def test_dtensors_that_cannot_be_joined_are_refused_with_their_meshes():
    with fake_process_group(0, 4):
        world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
        dp = make_mesh(world["dp"], None)

        def on(mesh: Any, placement: Any) -> nn.Parameter:
            return nn.Parameter(DTensor.from_local(torch.zeros(4, 2), mesh, [placement], run_check=False))

        for param, message in (
            (
                on(world["dp"], Replicate()),
                r"'block\.weight' is a DTensor on the mesh .*dp=2.*slice both out of one mesh",
            ),
            (
                on(other["y"], Replicate()),
                r"'block\.weight' is a DTensor on the mesh .*y=2.*cannot be joined with .*dp=2",
            ),
            (on(world["tp"], Partial()), r"'block\.weight' .*a partial sum cannot be sharded; redistribute"),
        ):
            with pytest.raises(ValueError, match=message):
                spec_of(param, dp)
