"""Fake process groups and in-process ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers.worlds import fake_process_group, local_tensor_ranks, values_by_rank


def test_any_rank_can_be_played():
    for rank in (0, 255):
        with fake_process_group(rank, 256):
            assert (dist.get_rank(), dist.get_world_size()) == (rank, 256)
        assert not dist.is_initialized()


def test_a_second_process_group_is_refused():
    with (
        fake_process_group(0, 2),
        pytest.raises(RuntimeError, match="without a process group"),
        fake_process_group(0, 2),
    ):
        pass


def test_equal_meshes_of_different_worlds_keep_their_own_groups():
    for other_groups in (0, 3):
        with fake_process_group(0, 4):
            for _ in range(other_groups):
                dist.new_group([0])
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            local = DTensor.from_local(torch.ones(2, 3), mesh["shard"], [Shard(0)])
            doubled = local + local
            assert dist.get_process_group_ranks(doubled.device_mesh.get_group()) == [0, 1]


def test_local_ranks_compute_real_values():
    weight = torch.arange(15.0).reshape(5, 3)  # uneven over 4 ranks
    with local_tensor_ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        sharded = distribute_tensor(weight, mesh, [Shard(0)])
        shards = values_by_rank(sharded.to_local())
        full = values_by_rank(sharded.full_tensor())
        with pytest.raises(TypeError, match="got DTensor"):
            values_by_rank(sharded)
    assert torch.equal(torch.cat(shards), weight)
    assert [len(shard) for shard in shards] == [2, 2, 1, 0]
    assert len(full) == 4
    for value in full:
        assert torch.equal(value, weight)
