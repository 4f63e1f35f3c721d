"""The ranks of a run as one body: joining, deciding together, exchanging a few numbers per step.

Owns: the default process group and the collectives the trainer itself issues (parameters and gradients are not
its business). Must not know: models, data, files.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from simplefsdp.llama.agreement import Ranks
from simplefsdp.llama.launch import find_device_type, is_launched, open_rendezvous
from simplefsdp.llama.options import UsageError

RENDEZVOUS_TIMEOUT_S = 300.0
RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of `ru_maxrss`: bytes on macOS, KiB on Linux (getrusage(2))."""


@dataclass(frozen=True)
class World:
    """This rank, how many there are, and where it computes.

    Args:
        rank: from 0.
        size: number of ranks.
        device: this rank's device.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def synchronize(self) -> None:
        """Waits for everything issued to the device; ends a timed window."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        """Most memory in use so far: allocated on the GPU, or resident of this process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT_BYTES

    def agree(self, error: str | None) -> None:
        """Makes a user's mistake that any rank has found one that all ranks report; a collective.

        Args:
            error: what is wrong here, or `None`.

        Raises:
            UsageError: on every rank, with the text of the first rank that has one.
        """
        found = [(rank, text) for rank, text in enumerate(Ranks(None).gather(error)) if text is not None]
        if found:
            rank, text = found[0]
            raise UsageError(text if rank == 0 else f"rank {rank}: {text}")

    def gather_numbers(self, numbers: torch.Tensor) -> list[list[float]]:
        """Gathers a few numbers of each rank; a collective and the step's one wait for the device.

        Args:
            numbers: shape (n,), on this rank's device.

        Returns:
            One list of n numbers per rank.
        """
        rows = [torch.empty_like(numbers) for _ in range(self.size)]
        dist.all_gather(rows, numbers)
        values: list[list[float]] = torch.stack(rows).tolist()
        return values


@contextlib.contextmanager
def join(device: str) -> Iterator[World]:
    """Joins the process group that torchrun, or our own launcher, has prepared, and leaves it at the end.

    Args:
        device: as `--device`.

    Yields:
        This rank.

    Raises:
        UsageError: if the device is not there.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if find_device_type(device) == "cuda":
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if here.index >= torch.cuda.device_count():
            raise UsageError(
                f"rank {rank} needs GPU {here.index} and this machine has {torch.cuda.device_count()}: "
                "start one process per GPU"
            )
        torch.cuda.set_device(here)
        # Checkpoints and agreements between ranks go over the CPU and must not queue behind compute.
        backend = "cpu:gloo,cuda:nccl"
    else:
        here = torch.device("cpu")
        backend = "gloo"
    store = open_rendezvous(rank, size, RENDEZVOUS_TIMEOUT_S) if is_launched() else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    yield World(rank, size, here)
    # Not after an exception: the other ranks may be stuck in a collective, and so would this goodbye be.
    dist.destroy_process_group()
