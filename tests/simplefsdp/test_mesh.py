"""Sharding factors and meshes: which ranks share a copy, which hold the same shard, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from simplefsdp import simple_fsdp
from simplefsdp.mesh import DataParallelMesh, make_mesh
from tests.helpers.worlds import fake_process_group


def ranks(dp: DataParallelMesh, dim: int | None) -> list[int]:
    return [] if dim is None else dist.get_process_group_ranks(dp.mesh.get_group(dim))


def layout(dp: DataParallelMesh) -> tuple[list[int], list[int], int]:
    """Ranks that share a copy with this one, ranks that hold its shard, and its place in the first."""
    shared, same = ranks(dp, dp.shard_dim), ranks(dp, dp.replicate_dim)
    assert (0 if dp.shard_group is None else dp.shard_group.size) == len(shared)
    assert (0 if dp.replicate_group is None else dp.replicate_group.size) == len(same)
    return shared, same, dp.shard_rank


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("given", ["nothing", "a mesh", "a mesh without names"])
def test_every_factor_places_every_rank(world, given):
    """F neighbours share a copy; ranks F apart hold the same shard."""
    factors = [None, *(n for n in range(1, world + 1) if world % n == 0)]
    for rank in range(world):
        with fake_process_group(rank, world):
            names = ("data",) if given == "a mesh" else None
            mesh = None if given == "nothing" else init_device_mesh("cpu", (world,), mesh_dim_names=names)
            for factor in factors:
                shared, same, place = layout(make_mesh(mesh, factor))
                f = world if factor is None else factor
                group = list(range(rank - rank % f, rank - rank % f + f))
                replicas = list(range(rank % f, world, f))
                assert same == ([] if f == world else replicas)
                assert shared == ([] if f == 1 < world else group)
                assert place == (rank % f if shared else 0)


def test_a_two_dimensional_mesh_is_replicate_then_shard():
    for rank in range(8):
        with fake_process_group(rank, 8):
            mesh = init_device_mesh("cpu", (2, 4))
            for factor in (None, 4):
                shared, same, place = layout(make_mesh(mesh, factor))
                assert shared == list(range(rank - rank % 4, rank - rank % 4 + 4))
                assert same == [rank % 4, rank % 4 + 4]
                assert place == rank % 4


def test_a_mesh_given_is_the_mesh_used():
    with fake_process_group(0, 4):
        for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))):
            assert make_mesh(mesh, None).mesh is mesh
        assert make_mesh(init_device_mesh("cpu", (4,)), 1).shard_dim is None


def test_a_factor_on_a_slice_stays_inside_the_slice():
    """The dims beside the slice (tensor parallel here) keep their ranks, and the hybrid can be joined with them."""
    for rank in range(8):
        with fake_process_group(rank, 8):
            mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
            dp = make_mesh(mesh["dp"], 2)
            shared, same, _ = layout(dp)
            slice_ranks = range(rank % 2, 8, 2)
            assert rank in shared
            assert rank in same
            assert set(shared) | set(same) < set(slice_ranks)
            assert shared == [r for r in slice_ranks if r // 4 == rank // 4]
            assert DeviceMesh._concatenate([dp.mesh, mesh["tp"]]).mesh.tolist() == [
                [[0, 1], [2, 3]],
                [[4, 5], [6, 7]],
            ]


def _factor_on_slices(rank: int, world: int) -> list[float]:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    dp = make_mesh(mesh["dp"], 2)
    sums = []
    for dim in (0, 1):
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=dp.mesh.get_group(dim))
        sums.append(value.item())
    return sums


def test_a_factor_on_slices_makes_groups_that_work(workers):
    """Two slices of four ranks: process groups are made by all ranks together, or they wait for ever."""
    for rank, (same, shared) in enumerate(workers(8).run(_factor_on_slices)):
        assert same == rank % 4 + (rank % 4 + 4)
        assert shared == sum(r for r in range(8) if r % 2 == rank % 2 and r // 4 == rank // 4)


def test_without_a_process_group_the_way_to_start_one_is_named():
    assert not dist.is_initialized()
    with pytest.raises(
        RuntimeError,
        match=r"torchrun --nproc-per-node N script\.py.*init_process_group\(\) first, or pass mesh=",
    ):
        simple_fsdp(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("mesh", "factor", "error", "message"),
    [
        (
            None,
            3,
            ValueError,
            r"sharding_factor 3 must divide the 8 .*possible here: 1, 2, 4, 8 \(1 replicates",
        ),
        (None, 0, ValueError, r"sharding_factor 0 must divide"),
        (None, -2, ValueError, r"sharding_factor -2 must divide"),
        (None, 16, ValueError, r"sharding_factor 16 must divide the 8"),
        (None, True, TypeError, r"must be an int or None, got True"),
        (None, 2.0, TypeError, r"must be an int or None, got 2\.0"),
        ((8,), 5, ValueError, r"sharding_factor 5 must divide the 8"),
        ((2, 4), 2, ValueError, r"sharding_factor 2 contradicts the 2-D mesh \(2, 4\).*over 4 ranks"),
        (
            (2, 2, 2),
            None,
            ValueError,
            r"got 3 dims of sizes \(2, 2, 2\); slice.*mesh\['dp_replicate', 'dp_shard'\]",
        ),
        ("cpu", None, TypeError, r"mesh must be a torch\.distributed\.DeviceMesh or None, got str"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(mesh, factor, error, message):
    with fake_process_group(0, 8):
        if isinstance(mesh, tuple):
            mesh = init_device_mesh("cpu", mesh)
        model = nn.Linear(2, 2)
        with pytest.raises(error, match=message):
            simple_fsdp(model, mesh, sharding_factor=factor)
        assert type(model) is nn.Linear


def test_a_mesh_without_this_rank_is_refused():
    with fake_process_group(5, 8):
        elsewhere = DeviceMesh("cpu", [0, 1, 2, 3])
        with pytest.raises(ValueError, match="rank 5 is not part of the mesh"):
            make_mesh(elsewhere, None)


def test_cutting_a_nameless_part_of_the_world_is_refused():
    with fake_process_group(0, 8):
        part = DeviceMesh("cpu", [0, 1, 2, 3])
        assert make_mesh(part, None).shard_group.size == 4
        with pytest.raises(ValueError, match=r"4 of 8 ranks in two dims.*pass mesh_dim_names"):
            make_mesh(part, 2)
