"""Fixtures and process-wide settings all tests share. Imports no torch: pure planner tests start at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.pool import WorkerPool

_compile_cache = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    # All of this before torch is imported anywhere; worker processes inherit it.
    os.environ["OMP_NUM_THREADS"] = "1"  # ranks share few cores
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compiler processes per rank
    # A cache of the run's own: compiled code of an earlier run must not answer for this one.
    cache = tempfile.TemporaryDirectory(prefix="inductor-cache-", ignore_cleanup_errors=True)
    config.stash[_compile_cache] = cache
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_compile_cache].cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[[int], WorkerPool]]:
    """Return `workers(world_size)`: the pool of that many gloo ranks, shared by the tests of one file."""
    from tests.helpers.pool import WorkerPool

    pools: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        return pools.setdefault(world_size, WorkerPool(world_size))

    yield pool
    for item in pools.values():
        item.close()
