"""Workarounds for faults of torch: each still needed, each still working."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from simplefsdp import simple_fsdp

# Without the workaround a rank of torch 2.13 died after 800 to 9,000 gathers.
GATHERS = 24_000
IN_FLIGHT = 8


def gather_many(rank: int, world: int) -> None:
    simple_fsdp(nn.Linear(2, 2))
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    shard = torch.full((64,), float(rank))
    full = torch.arange(world).repeat_interleave(64)
    for _ in range(GATHERS // IN_FLIGHT):
        started = [ops.all_gather_into_tensor(shard, world, group) for _ in range(IN_FLIGHT)]
        gathered = [ops.wait_tensor(item) for item in started]
    for item in gathered:
        assert torch.equal(item, full)
    several = ops.all_gather_into_tensor(torch.full((1, 2), complex(rank, 1)), world, group)
    assert ops.wait_tensor(several).tolist() == [[complex(r, 1)] * 2 for r in range(world)]


def test_many_gathers_in_flight_leave_the_heap_whole(workers):
    workers(2).run(gather_many)
