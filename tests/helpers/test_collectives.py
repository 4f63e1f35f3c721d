"""Collectives recorded from eager, compiled and traced programs describe the same traffic the same way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.helpers.collectives import Collective, counts_by_kind, graph_collectives, record_collectives
from tests.helpers.graphs import GraphRecorder
from tests.helpers.meshes import mesh
from tests.helpers.worlds import fake_process_group


def gather_and_reduce(full: torch.Tensor, half: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run three collectives and nothing that needs a C++ compiler."""
    ops = torch.ops._c10d_functional
    group, size = dist.group.WORLD.group_name, dist.get_world_size()
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(full, size, group))
    reduced = ops.wait_tensor(ops.all_reduce(gathered, "sum", group))
    return reduced, ops.wait_tensor(ops.reduce_scatter_tensor(half, "avg", size, group))


def expected(world_size: int) -> list[Collective]:
    ranks = tuple(range(world_size))
    return [
        Collective("all_gather", world_size, torch.float32, 24 * world_size, ranks, None),
        Collective("all_reduce", world_size, torch.float32, 24 * world_size, ranks, "sum"),
        Collective("reduce_scatter", world_size, torch.bfloat16, 256, ranks, "avg"),
    ]


def record_everywhere(rank: int, world_size: int) -> dict[str, list[Collective]]:
    inputs = torch.full((6,), float(rank)), torch.ones(128, dtype=torch.bfloat16)
    recorder = GraphRecorder()
    found = {}
    for name, function in {
        "eager": gather_and_reduce,
        "aot_eager": torch.compile(gather_and_reduce, backend=recorder, fullgraph=True),
        "inductor": torch.compile(gather_and_reduce, backend="inductor", fullgraph=True),
    }.items():
        with record_collectives() as found[name]:  # cold: compiles inside
            function(*inputs)
        with record_collectives() as found[name + ", second call"]:
            function(*inputs)
    found["graph"] = graph_collectives(recorder.inference[0].graph)
    return found


def record_c10d(rank: int, world_size: int) -> list[Collective]:
    shard, full = torch.ones(3), torch.ones(3 * world_size)
    with record_collectives() as found:
        dist.all_gather_into_tensor(full, shard)
        dist.reduce_scatter_tensor(shard, full)
        dist.all_gather([torch.empty(3) for _ in range(world_size)], shard)
        dist.all_reduce(full, group=mesh(world_size).get_group())
        dist.broadcast(full, 0)
        dist.barrier()
    return found


def test_every_way_to_run_a_program_gives_the_same_record(workers):
    for by_name in workers(2).run(record_everywhere):
        assert len(by_name) == 7
        for name, found in by_name.items():
            assert found == expected(2), name
            assert [str(item) for item in found] == [
                "all_gather float32 48 B over 2",
                "all_reduce sum float32 48 B over 2",
                "reduce_scatter avg bfloat16 256 B over 2",
            ]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_c10d_operators_are_recorded(workers):
    for found in workers(2).run(record_c10d):
        assert counts_by_kind(found) == {
            "all_gather": 2,
            "all_reduce": 1,
            "broadcast": 1,
            "reduce_scatter": 1,
        }
        assert [item.size_bytes for item in found] == [24, 24, 24, 24, 24]
        assert all(item.ranks == (0, 1) for item in found)


def test_graphs_of_any_rank_can_be_read_without_processes():
    inputs = torch.ones(6), torch.ones(128, dtype=torch.bfloat16)
    found = []
    for rank in (0, 63):
        recorder = GraphRecorder()
        with fake_process_group(rank, 64):
            torch.compile(gather_and_reduce, backend=recorder, fullgraph=True)(*inputs)
            found.append(graph_collectives(recorder.inference[0].graph))
        torch._dynamo.reset()
    assert found == [expected(64), expected(64)]


def test_recorder_separates_forward_and_backward():
    recorder = GraphRecorder()
    compiled = torch.compile(lambda x: (x * x).sin(), backend=recorder, fullgraph=True)
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        compiled(x).sum().backward()
        assert torch.equal(x.grad, 2 * torch.cos(torch.ones(2)))
    assert (recorder.compile_count, len(recorder.forward), len(recorder.backward)) == (1, 1, 1)
    assert not recorder.inference
    with torch.no_grad():
        compiled(torch.ones(2))
    assert (recorder.compile_count, len(recorder.inference)) == (2, 1)
    torch._dynamo.reset()
