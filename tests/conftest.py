"""Fixtures and process-wide settings every test shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Before torch is imported anywhere: one thread per process, because ranks share few cores.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from tests.helpers.pool import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], WorkerPool]]:
    """Return the pool of `world_size` gloo ranks as `workers(world_size)`; pools live until the session ends."""
    pools: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        if world_size not in pools:
            pools[world_size] = WorkerPool(world_size)
        return pools[world_size]

    yield pool
    for item in pools.values():
        item.close()
