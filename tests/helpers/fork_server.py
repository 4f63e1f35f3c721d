"""Ranks that tests may kill: forked from one process that has imported torch, so that each costs little.

Owns: forking ranks into a gloo world of their own, and collecting how they ended. Must not know: what they do.
`WorkerPool` is for functions that return; this is for processes that die.

    def body(rank, world_size, text): ...            # at the top level of an importable module

    with ForkServer() as server:
        ranks = server.start(body, 2, tmp_path, "argument")
        os.kill(ranks.pids[1], signal.SIGKILL)
        codes = ranks.wait()                          # [3, -9]; ranks.log(0) is what rank 0 wrote
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
# Wall-clock limit in seconds for ranks to end, on a busy machine with two cores.
WAIT_TIMEOUT_S = 90.0
POLL_S = 0.02


class ForkServer:
    """A process that forks ranks on request. One set of ranks at a time. A context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            text=True,
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()  # its ranks die with it
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def start(
        self, function: Callable[..., object], world_size: int, directory: Path, *args: Any
    ) -> ForkedRanks:
        """Fork the ranks; each joins the default process group and calls `function(rank, world_size, *args)`.

        Args:
            function: at the top level of an importable module.
            world_size: number of ranks.
            directory: for logs and the rendezvous; not used by another start.
            args: values that JSON can hold.
        """
        directory.mkdir(parents=True)
        reply = self._ask(
            function=[function.__module__, function.__name__],
            world_size=world_size,
            directory=str(directory),
            args=args,
        )
        return ForkedRanks(self, tuple(reply["pids"]), directory)

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class ForkedRanks:
    """Running ranks: process ids by rank, and what they wrote to stdout and stderr."""

    def __init__(self, server: ForkServer, pids: tuple[int, ...], directory: Path) -> None:
        self._server = server
        self.pids = pids
        self._directory = directory

    def log(self, rank: int) -> str:
        """Return what a rank has written so far."""
        return (self._directory / f"rank{rank}.log").read_text()

    def wait_for_line(self, line: str, ranks: range | None = None) -> None:
        """Wait until each of the ranks (None: all) has written a line that begins with `line`."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        for rank in ranks or range(len(self.pids)):
            while f"\n{line}" not in f"\n{self.log(rank)}":
                if time.monotonic() > deadline:
                    raise AssertionError(f"rank {rank} has not written {line!r}:\n{self.log(rank)}")
                time.sleep(POLL_S)

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> list[int | None]:
        """Wait until the ranks have ended and kill what has not by then.

        Returns:
            Exit codes by rank: -n for signal n, None for a rank that had to be killed.
        """
        codes: list[int | None] = self._server._ask(wait=timeout_s)["codes"]
        return codes

    def kill(self) -> None:
        """Kill all ranks, as by kill -9."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)


def _serve() -> None:
    pids: list[int] = []
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            reply: dict[str, Any] = {"codes": _wait(pids, request["wait"])}
        else:
            pids = [_fork(rank, request) for rank in range(request["world_size"])]
            reply = {"pids": pids}
        print(json.dumps(reply), flush=True)


def _wait(pids: list[int], timeout_s: float) -> list[int | None]:
    deadline = time.monotonic() + timeout_s
    codes: dict[int, int | None] = {}
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    for pid in set(pids) - codes.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[pid] = None
    return [codes[pid] for pid in pids]


def _fork(rank: int, request: dict[str, Any]) -> int:
    log = os.open(Path(request["directory"], f"rank{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    pid = os.fork()
    if pid == 0:
        os.dup2(log, 1)
        os.dup2(log, 2)
        _run(rank, request)
    os.close(log)
    return pid


def _run(rank: int, request: dict[str, Any]) -> NoReturn:
    import torch.distributed as dist

    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    world_size = request["world_size"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    code: Any = 0
    try:
        store = dist.FileStore(f"{request['directory']}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        module, name = request["function"]
        getattr(importlib.import_module(module), name)(rank, world_size, *request["args"])
    except SystemExit as exit_:
        code = exit_.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401  # imported once, for all ranks

    os.environ.update(
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=next(n for _, n in socket.if_nameindex() if n[:2] == "lo")
    )
    _serve()
