"""The worker pool: results, failures, timeouts, isolation between calls."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers.pool import WorkerError, WorkerPool


def scaled_sum(rank: int, world_size: int, scale: float) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([scale * (rank + 1)])
    dist.all_reduce(total)
    return rank, world_size, total


def raise_on(rank: int, world_size: int, bad_rank: int | None) -> None:
    if rank == bad_rank:
        raise ValueError("a broken rank")
    dist.barrier()


def hang_on(rank: int, world_size: int, stuck_rank: int) -> None:
    if rank == stuck_rank:
        time.sleep(600)


def die_on(rank: int, world_size: int, dead_rank: int) -> None:
    if rank == dead_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def warn(rank: int, world_size: int) -> None:
    warnings.warn("something is odd", UserWarning, stacklevel=1)


def make_dtensor(rank: int, world_size: int) -> DTensor:
    return distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (world_size,)), [Shard(0)])


def leak_settings(rank: int, world_size: int) -> None:
    import torch._inductor.config as inductor_config

    os.environ["LEAKED"] = "1"
    torch.set_default_dtype(torch.float64)
    inductor_config.max_fusion_size = 3
    torch.manual_seed(rank + 17)


def observe_settings(rank: int, world_size: int) -> tuple[str | None, torch.dtype, int, float]:
    import torch._inductor.config as inductor_config

    return (
        os.environ.get("LEAKED"),
        torch.get_default_dtype(),
        inductor_config.max_fusion_size,
        torch.rand(()).item(),
    )


def test_results_come_back_by_rank(workers):
    pool = workers(2)
    results = pool.run(scaled_sum, 2.0)
    assert [(rank, size) for rank, size, _ in results] == [(0, 2), (1, 2)]
    for _, _, total in results:
        assert torch.equal(total, torch.tensor([6.0]))


def test_processes_are_kept_between_calls(workers):
    pool = workers(2)
    pool.run(scaled_sum, 1.0)
    before = pool.pids
    pool.run(scaled_sum, 1.0)
    assert pool.pids == before
    assert len(before) == 2


def test_settings_do_not_leak_into_the_next_call(workers):
    pool = workers(2)
    before = pool.run(observe_settings)
    pool.run(leak_settings)
    assert pool.run(observe_settings) == before
    assert before[0] == before[1]


def test_warnings_follow_the_filters_of_the_calling_test(workers):
    pool = workers(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        pool.run(warn)
    with pytest.raises(WorkerError, match="rank 0 of 2 raised UserWarning: something is odd"):
        pool.run(warn)


def test_functions_that_cannot_travel_are_refused(workers):
    with pytest.raises(TypeError, match="top level of the test file"):
        workers(2).run(lambda rank, world_size: None)


def test_a_raising_rank_is_named_and_the_pool_recovers(workers):
    pool = workers(2)
    with pytest.raises(WorkerError, match="rank 1 of 2 raised ValueError: a broken rank") as caught:
        pool.run(raise_on, 1)
    assert "in raise_on" in str(caught.value)
    assert "ranks [0] had not finished" in str(caught.value), "rank 0 waits in a barrier"
    assert caught.value.ranks == (1,)
    assert not pool.pids
    assert pool.run(scaled_sum, 1.0)[0][2].item() == 3.0


def test_values_that_only_mean_something_in_a_worker_are_refused():
    with WorkerPool(1) as pool, pytest.raises(WorkerError, match=r"returned a DTensor.*full_tensor"):
        pool.run(make_dtensor)


def test_a_dead_rank_is_reported_with_its_exit_status():
    with WorkerPool(1) as pool, pytest.raises(WorkerError, match=r"rank 0 of 1 died \(exit status -9\)"):
        pool.run(die_on, 0)


def test_a_stuck_rank_is_reported_with_its_stack_and_killed():
    with WorkerPool(1) as pool:
        pool.run(raise_on, None)  # the new process imports this file before the clock starts
        pids = pool.pids
        with pytest.raises(WorkerError, match="rank 0 of 1 did not finish within 1 s") as caught:
            pool.run(hang_on, 0, timeout=1)
        assert "in hang_on" in str(caught.value), "the stack of the stuck rank is missing"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
