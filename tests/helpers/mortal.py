"""Ranks that tests may stop and kill.

Owns: starting ranks in a gloo world of their own, their output, how they ended. Must not know: what they do.
`WorkerPool` is for functions that return; this is for processes that end.

    def body(rank, world_size, text): ...            # at the top level of an importable module

    ranks = MortalRanks(body, 2, tmp_path / "ranks", "argument")
    os.kill(ranks.pids[1], signal.SIGKILL)
    codes = ranks.wait()                              # [3, -9]; ranks.log(0) is what rank 0 wrote

Processes are forked from the same server process as a pool's, so each costs little.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers.pool import PRELOADED

# Wall-clock limit in seconds for ranks to write or to end, on a busy machine with two cores.
TIMEOUT_S = 60.0
POLL_S = 0.02


class MortalRanks:
    """Processes that join a default gloo group and call `function(rank, world_size, *args)`.

    Args:
        function: at the top level of an importable module.
        world_size: number of ranks.
        directory: for logs and the rendezvous; made here.
        args: picklable arguments, the same for every rank.
    """

    def __init__(self, function: Callable[..., object], world_size: int, directory: Path, *args: Any) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        context = get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._processes = []
        for rank in range(world_size):
            self._log(rank).touch()
            process = context.Process(
                target=_run, args=(function, rank, world_size, directory, self._log(rank), args), daemon=True
            )
            process.start()
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes if process.pid is not None]

    def log(self, rank: int) -> str:
        """Return what a rank has written to standard output and error so far."""
        return self._log(rank).read_text()

    def wait_for_line(self, start: str, ranks: Iterable[int] | None = None) -> None:
        """Wait until each of the ranks (None: all) has written a line that begins with `start`."""
        deadline = time.monotonic() + TIMEOUT_S
        for rank in range(len(self._processes)) if ranks is None else ranks:
            while f"\n{start}" not in f"\n{self.log(rank)}":
                if time.monotonic() > deadline:
                    raise AssertionError(f"rank {rank} has not written {start!r}:\n{self.log(rank)}")
                time.sleep(POLL_S)

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[int | None]:
        """Wait until the ranks have ended; kill those that have not by then.

        Returns:
            Exit codes by rank: -n for signal n, None for a rank that had to be killed.
        """
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        for process in self._processes:
            process.kill()
            process.join()
        return codes

    def _log(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.log"


def _run(
    function: Callable[..., object],
    rank: int,
    world_size: int,
    directory: Path,
    log: Path,
    args: tuple[Any, ...],
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server process ignores it
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME=loopback
    )
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    function(rank, world_size, *args)
