"""A pool of gloo worker processes that tests call functions on, every rank at once.

Owns: starting, calling, timing out and killing the processes. Must not know: what the functions do.

A test asks the `workers` fixture for a pool and runs a module-level function on it:

    def gathered(rank, world_size, scale):
        out = [torch.empty(1) for _ in range(world_size)]
        torch.distributed.all_gather(out, torch.tensor([rank * scale]))
        return torch.cat(out)

    def test_gathered(workers):
        for result in workers(2).run(gathered, 3.0):
            assert torch.equal(result, torch.tensor([0.0, 3.0]))

Processes outlive a call, because importing torch takes seconds; `worker._isolated` says what is reset in between. Use
`workers(n).run` for anything that returns; a test that kills ranks on purpose can too: the pool notices and starts afresh.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.helpers.worker import (
    STACK_DUMP_SIGNAL,
    Call,
    Listening,
    Raised,
    Ready,
    Returned,
    current_warning_filters,
)

REPOSITORY = Path(__file__).resolve().parents[2]

# Wall-clock limits in seconds, sized for a busy machine with two cores.
START_TIMEOUT_S = 150.0
RUN_TIMEOUT_S = 60.0
# gloo's own limit on one collective. Longer than any call, so that the pool's timeout, which dumps stacks, comes first.
COLLECTIVE_TIMEOUT_S = 600
# How long the other ranks get to report as well, once one rank failed. They may be stuck in a collective.
FAILURE_GRACE_S = 2.0
STACK_DUMP_WAIT_S = 1.0
EXIT_GRACE_S = 2.0
LOG_TAIL_CHARACTERS = 8000
# Every process group a test makes holds sockets until its process ends. Replace the processes well before the usual
# limit of 1024 open files.
MAX_OPEN_FILES = 512


class WorkerError(AssertionError):
    """A call failed on some rank: it raised, died, or ran out of time. The message holds every rank's account.

    Attributes:
        ranks: the ranks that failed, in ascending order.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:].strip()


class WorkerPool:
    """`world_size` processes in one gloo world, started at first use and again after a failure.

    Args:
        world_size: number of ranks, at least 1.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self._workers: list[_Worker] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; empty while no process runs."""
        return tuple(worker.process.pid for worker in self._workers)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = RUN_TIMEOUT_S) -> list[Any]:
        """Call `function(rank, world_size, *args)` on every rank, with the default process group initialised.

        The call sees seed 0, the warning filters of the calling test, and a reset compiler.

        Args:
            function: a function at the top level of an importable module.
            args: picklable arguments, the same for every rank.
            timeout: seconds all ranks together may take, process start not included.

        Returns:
            What each rank returned, by rank. Tensors come back as plain copies; a DTensor is refused.

        Raises:
            TypeError: `function` is a lambda, a closure or a method.
            WorkerError: a rank raised, died or did not finish in time. The processes are killed then.
        """
        if not callable(function) or getattr(function, "__qualname__", ".").count("."):
            raise TypeError(
                f"{function!r} cannot be sent to another process: define it with `def` at the top level of the test file"
            )
        message = pickle.dumps(Call(function, args, current_warning_filters()))
        try:
            if not self._workers:
                self._start()
            for worker in self._workers:
                worker.connection.send_bytes(message)
            replies = self._collect(Returned, timeout)
        except (
            BaseException
        ):  # also KeyboardInterrupt and the test's own timeout: the ranks are out of step now
            self._kill()
            raise
        results = [pickle.loads(replies[rank].payload) for rank in range(self.world_size)]
        if any(self._open_files(worker) > MAX_OPEN_FILES for worker in self._workers):
            self.close()
        return results

    def close(self) -> None:
        """End every process and delete their logs. The pool stays usable: the next run starts new ones."""
        for worker in self._workers:
            worker.connection.close()  # an idle worker sees end-of-file and leaves on its own
        deadline = time.monotonic() + EXIT_GRACE_S
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(
                    worker.process.pid, signal.SIGKILL
                )  # its own session: takes compiler children along
            worker.process.wait()
        self._workers = []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="workers-")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "GLOO_SOCKET_IFNAME": _loopback_interface(),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile in process: no pool of compiler children per rank
        }
        for rank in range(self.world_size):
            parent_end, child_end = socket.socketpair()
            log = Path(self._directory.name, f"rank{rank}.log")
            with log.open("wb") as output, child_end:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "tests.helpers.worker"),
                        *(
                            str(child_end.fileno()),
                            str(rank),
                            str(self.world_size),
                            str(COLLECTIVE_TIMEOUT_S),
                        ),
                    ],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=REPOSITORY,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[child_end.fileno()],
                    start_new_session=True,
                )
            self._workers.append(_Worker(rank, process, Connection(parent_end.detach()), log))
        deadline = time.monotonic() + START_TIMEOUT_S
        listening = self._collect(Listening, deadline - time.monotonic(), ranks=(0,))[0]
        for worker in self._workers[1:]:
            worker.connection.send(listening)
        self._collect(Ready, deadline - time.monotonic())

    def _collect(
        self, expected: type, timeout: float, ranks: tuple[int, ...] | None = None
    ) -> dict[int, Any]:
        """Wait for one message of type `expected` from each rank; return them by rank or raise `WorkerError`."""
        pending = {
            worker.connection: worker for worker in self._workers if ranks is None or worker.rank in ranks
        }
        replies: dict[int, Any] = {}
        accounts: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        timed_out = False
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                timed_out = not accounts
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                worker = pending.pop(connection)
                try:
                    reply = connection.recv()
                except (EOFError, ConnectionResetError):
                    accounts[worker.rank] = _account_of_death(worker)
                else:
                    if isinstance(reply, expected):
                        replies[worker.rank] = reply
                    else:
                        assert isinstance(reply, Raised)
                        accounts[worker.rank] = f"raised {reply.summary}\n{reply.traceback}"
            if accounts:
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
        if timed_out:
            accounts = _accounts_of_timeout(list(pending.values()), timeout)
        elif accounts:
            for worker in pending.values():
                accounts[worker.rank] = "had not finished; killed"
        if not accounts:
            return replies
        lines = [f"rank {rank} of {self.world_size} {accounts[rank]}" for rank in sorted(accounts)]
        raise WorkerError("\n".join(lines), tuple(sorted(accounts)))

    @staticmethod
    def _open_files(worker: _Worker) -> int:
        directory = Path(f"/proc/{worker.process.pid}/fd")
        return len(list(directory.iterdir())) if directory.exists() else 0


def _account_of_death(worker: _Worker) -> str:
    try:
        status = f"exit status {worker.process.wait(EXIT_GRACE_S)}"
    except subprocess.TimeoutExpired:
        status = "its pipe closed"
    return f"died ({status}); its output ends:\n{worker.log_tail()}"


def _accounts_of_timeout(workers: list[_Worker], timeout: float) -> dict[int, str]:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, STACK_DUMP_SIGNAL)
    time.sleep(STACK_DUMP_WAIT_S)
    return {
        worker.rank: f"did not finish within {timeout:g} s; its output and stacks end:\n{worker.log_tail()}"
        for worker in workers
    }


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
