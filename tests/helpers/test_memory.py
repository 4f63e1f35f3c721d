"""Live bytes follow tensors, views, wrappers and storages that are resized."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.helpers.memory import LiveBytes
from tests.helpers.worlds import fake_process_group


def test_tensors_count_until_they_die():
    with LiveBytes() as live:
        first = torch.empty(100)
        view = first[10:]
        assert live.current_bytes == 400
        second = torch.empty(50)
        assert live.current_bytes == 600
        del first
        assert live.current_bytes == 600, "the view keeps the storage"
        del view, second
        assert live.current_bytes == 0
    assert live.peak_bytes == 600


def test_tensors_from_before_count_when_given_or_read():
    given, read, unread = torch.empty(10), torch.empty(20), torch.empty(30)
    with LiveBytes([given]) as live:
        assert live.current_bytes == 40
        assert torch.equal(read, read)
        assert live.current_bytes == 120
    assert unread.numel() == 30


def test_a_storage_at_the_address_of_a_dead_one_counts():
    with LiveBytes() as live:
        for _ in range(20):
            tensor = torch.empty(100)
            assert live.current_bytes == 400
            del tensor


def test_resized_storages_count_as_they_are():
    with LiveBytes() as live:
        tensor = torch.empty(100)
        tensor.untyped_storage().resize_(0)
        assert live.current_bytes == 0
        tensor.untyped_storage().resize_(400)
        tensor.zero_()
        assert live.current_bytes == 400


def test_a_dtensor_counts_as_its_shard():
    with fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (4,))
        weight = distribute_tensor(torch.ones(8, 5), mesh, [Shard(0)])
        with LiveBytes([weight]) as live:
            assert live.current_bytes == 2 * 5 * 4
            doubled = weight * 2
            assert live.current_bytes == 2 * (2 * 5 * 4)
            del doubled
            full = weight.full_tensor()
            assert live.current_bytes == 2 * 5 * 4 + 8 * 5 * 4
            del full


def test_fsdp2_frees_what_it_gathered():
    layers, width = 8, 64
    full_bytes = layers * width * width * 4

    def peak_bytes(reshard_after_forward: bool) -> int:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
        x = torch.ones(1, width)
        with LiveBytes(model.parameters()) as live:
            model(x)
        return live.peak_bytes

    with fake_process_group(0, 4):
        mesh = init_device_mesh("cpu", (4,))
        kept, freed = peak_bytes(False), peak_bytes(True)
    shards_bytes = full_bytes / 4
    assert kept > shards_bytes + full_bytes
    assert freed < shards_bytes + full_bytes / 2
