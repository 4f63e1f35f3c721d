"""Many ranks without many processes: a fake process group, and ranks simulated in one process.

`fake_process_group` traces: collectives do nothing, any rank can be played, values are meaningless.
`local_tensor_ranks` computes: each tensor holds one value per rank and collectives exchange them. It suits
numerics of eager code; what depends on processes (failures, time, caches) needs a `WorkerPool`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from simplefsdp._compat import fake_world


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Play rank `rank` of `world_size` in a process group whose collectives do nothing.

    Raises:
        RuntimeError: a process group exists already, for instance because the code runs in a worker.
    """
    if dist.is_initialized():
        raise RuntimeError("fake_process_group needs a process without a process group")
    with fake_world(world_size, rank):
        yield


@contextmanager
def local_tensor_ranks(world_size: int) -> Iterator[LocalTensorMode]:
    """Run the block as all `world_size` ranks at once; `values_by_rank` reads the results."""
    with fake_process_group(0, world_size), LocalTensorMode(world_size) as mode:
        yield mode


def values_by_rank(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return each rank's value of a tensor computed under `local_tensor_ranks`, inside or after the block.

    Args:
        tensor: a local tensor; of a DTensor, its `to_local()` or `full_tensor()`.

    Raises:
        TypeError: the tensor was not computed under `local_tensor_ranks`, or is a DTensor.
    """
    if not isinstance(tensor, LocalTensor):
        raise TypeError(f"expected a tensor computed under local_tensor_ranks, got {type(tensor).__name__}")
    return [tensor._local_tensors[rank] for rank in sorted(tensor._local_tensors)]
