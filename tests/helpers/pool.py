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

Processes are forked from a server process that has imported torch, so a new pool costs tenths of a second.
They outlive a call (`worker._isolated` says what is reset in between) but neither their test file nor a failure:
then they are killed, and the next call gets new ones. Process groups and meshes live as long as their process;
`tests.helpers.meshes.mesh` makes each only once.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
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
    main,
)

# Wall-clock limits in seconds, sized for a busy machine with two cores.
START_TIMEOUT_S = 150.0
RUN_TIMEOUT_S = 60.0
# gloo's own limit on one collective, longer than any call: the pool's timeout comes first, and dumps stacks.
COLLECTIVE_TIMEOUT_S = 600
# How long the other ranks get to report as well, once one rank failed. They may be stuck in a collective.
FAILURE_GRACE_S = 2.0
STACK_DUMP_WAIT_S = 1.0
EXIT_GRACE_S = 2.0
LOG_TAIL_CHARACTERS = 8000
# What the server process imports before it forks: the slow modules, which must start no thread.
PRELOADED = ("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor")


class WorkerError(AssertionError):
    """A call raised, died or ran out of time on some rank. The message holds every rank's account.

    Attributes:
        ranks: the ranks that failed, in ascending order.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: BaseProcess
    connection: Connection
    log: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "the process has been started"
        return self.process.pid

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
        return tuple(worker.pid for worker in self._workers)

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
                f"{function!r} cannot be sent to another process: "
                "define it with `def` at the top level of the test file"
            )
        message = pickle.dumps(Call(function, args, current_warning_filters()))
        try:
            if not self._workers:
                self._start()
            for worker in self._workers:
                with contextlib.suppress(BrokenPipeError):  # it died since the last call: reported below
                    worker.connection.send_bytes(message)
            replies = self._collect(Returned, timeout)
        except BaseException:  # also KeyboardInterrupt and the test's timeout: ranks are out of step now
            self._kill()
            raise
        return [pickle.loads(replies[rank].payload) for rank in range(self.world_size)]

    def close(self) -> None:
        """End every process and delete their logs. The pool stays usable: the next run starts new ones."""
        for worker in self._workers:
            worker.connection.close()  # an idle worker sees end-of-file and leaves on its own
        deadline = time.monotonic() + EXIT_GRACE_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            if worker.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)  # a worker leads a group: its children go along
                worker.process.kill()  # in case it had not come to make that group
            worker.process.join()
            worker.process.close()
        self._workers = []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="workers-")
        context = get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "GLOO_SOCKET_IFNAME": _loopback_interface(),
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(self.world_size):
            parent_end, child_end = context.Pipe()
            log = Path(self._directory.name, f"rank{rank}.log")
            log.touch()
            own_environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(
                target=main, args=(child_end, log, own_environment, COLLECTIVE_TIMEOUT_S), daemon=True
            )
            process.start()
            child_end.close()
            self._workers.append(_Worker(rank, process, parent_end, log))
        deadline = time.monotonic() + START_TIMEOUT_S
        listening = self._collect(Listening, deadline - time.monotonic(), ranks=(0,))[0]
        for worker in self._workers[1:]:
            worker.connection.send(listening)
        self._collect(Ready, deadline - time.monotonic())

    def _collect(
        self, expected: type, timeout: float, ranks: tuple[int, ...] | None = None
    ) -> dict[int, Any]:
        """Wait for one message of type `expected` from each rank; return them by rank."""
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
        if not accounts:
            return replies
        lines = [f"rank {rank} of {self.world_size} {accounts[rank]}" for rank in sorted(accounts)]
        unfinished = sorted(worker.rank for worker in pending.values() if worker.rank not in accounts)
        if unfinished:
            lines.append(f"ranks {unfinished} had not finished and were killed")
        raise WorkerError("\n".join(lines), tuple(sorted(accounts)))


def _account_of_death(worker: _Worker) -> str:
    worker.process.join(EXIT_GRACE_S)
    code = worker.process.exitcode
    status = "its pipe closed" if code is None else f"exit status {code}"
    return f"died ({status}); its output ends:\n{worker.log_tail()}"


def _accounts_of_timeout(workers: list[_Worker], timeout: float) -> dict[int, str]:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, STACK_DUMP_SIGNAL)
    time.sleep(STACK_DUMP_WAIT_S)
    return {
        worker.rank: f"did not finish within {timeout:g} s; its output and stacks end:\n{worker.log_tail()}"
        for worker in workers
    }


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
