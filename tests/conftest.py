"""Fixtures and process-wide settings every test shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Before torch is imported anywhere: one thread per process, because ranks share few cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Inductor compiles in the process that asks, without a pool of helper processes per rank.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import pytest

from tests.helpers.pool import WorkerPool


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[[int], WorkerPool]]:
    """Return `workers(world_size)`: the pool of that many gloo ranks, shared by the tests of one file."""
    pools: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        return pools.setdefault(world_size, WorkerPool(world_size))

    yield pool
    for item in pools.values():
        item.close()
