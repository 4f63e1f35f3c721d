"""What runs in each process of a `WorkerPool`: join the gloo world, then serve one call at a time.

Owns: process set-up (threads, rendezvous, stack dumps), isolation between calls, and turning results and
exceptions into bytes. Must not know: which tests exist, or how the parent schedules them.

Messages on the pipe are pickles of the dataclasses below, in this order:

    worker 0 -> parent   Listening(port)           the rendezvous store is up
    parent  -> others    Listening(port)           where to join
    worker  -> parent    Ready()                   the process group is up
    parent  -> worker    Call(function, ...)       any number of times, answered by
    worker  -> parent    Returned(payload) | Raised(summary, traceback)
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import os
import pickle
import random
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Sent by the parent to a worker that ran out of time: the worker writes the stacks of all threads to its log.
STACK_DUMP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Listening:
    """Rank 0 serves the rendezvous store on this loopback port."""

    port: int


@dataclass(frozen=True)
class Ready:
    """The process group is initialised on this rank."""


@dataclass(frozen=True)
class Call:
    """Call `function(rank, world_size, *args)` under the warning filters of the calling test."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    warning_filters: tuple[WarningFilter, ...]


@dataclass(frozen=True)
class WarningFilter:
    """One entry of `warnings.filters`, with patterns as text."""

    action: str
    message: str | None
    category: type[Warning]
    module: str | None
    lineno: int


@dataclass(frozen=True)
class Returned:
    """The call returned; `payload` is the pickled value."""

    payload: bytes


@dataclass(frozen=True)
class Raised:
    """The call raised; both fields are text, because not every exception can be pickled."""

    summary: str
    traceback: str


class _ResultPickler(pickle.Pickler):
    """Pickler that refuses values which mean something only inside the worker's process group."""

    def persistent_id(self, obj: object) -> None:
        if isinstance(obj, DTensor):
            raise TypeError(
                "a worker function returned a DTensor, which has no meaning in the parent process: "
                "return tensor.to_local() or tensor.full_tensor()"
            )
        if isinstance(obj, DeviceMesh):
            raise TypeError("a worker function returned a DeviceMesh, which has no meaning in the parent")


def current_warning_filters() -> tuple[WarningFilter, ...]:
    """Return the warning filters in force here, in a form another process can install."""

    def text(pattern: re.Pattern[str] | str | None) -> str | None:
        return pattern.pattern if isinstance(pattern, re.Pattern) else pattern

    return tuple(
        WarningFilter(action, text(message), kind, text(module), lineno)
        for action, message, category, module, lineno in warnings.filters
        for kind in (category if isinstance(category, tuple) else (category,))
    )


def _install_warning_filters(filters: tuple[WarningFilter, ...]) -> None:
    warnings.resetwarnings()
    for item in filters:
        warnings.filterwarnings(
            item.action,  # type: ignore[arg-type]  # came out of warnings.filters, hence a valid action
            message=item.message or "",
            category=item.category,
            module=item.module or "",
            lineno=item.lineno,
            append=True,
        )


@contextmanager
def _isolated() -> Iterator[None]:
    """Give one call a fixed seed and fresh compiler state; put process-wide settings back afterwards."""
    configs = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
    saved_configs = [config.get_config_copy() for config in configs]
    saved_environment = dict(os.environ)
    saved_dtype = torch.get_default_dtype()
    saved_threads = torch.get_num_threads()
    random.seed(0)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        torch._dynamo.reset()
        for config, saved in zip(configs, saved_configs, strict=True):
            # Only what changed: assigning every entry would touch deprecated aliases.
            for key, value in config.get_config_copy().items():
                if key in saved and saved[key] is not value and saved[key] != value:
                    setattr(config, key, saved[key])
        os.environ.clear()
        os.environ.update(saved_environment)
        torch.set_default_dtype(saved_dtype)
        torch.set_num_threads(saved_threads)
        torch.set_grad_enabled(True)
        gc.collect()


def _serve(call: Call, rank: int, world_size: int) -> Returned | Raised:
    try:
        with _isolated():
            _install_warning_filters(call.warning_filters)
            value = call.function(rank, world_size, *call.args)
            buffer = io.BytesIO()
            _ResultPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
            del value
            # A rank that is ahead must not start the next call's collectives while another is in this one.
            dist.barrier()
    except BaseException as error:  # pytest's own outcomes derive from BaseException
        return Raised(f"{type(error).__name__}: {error}", traceback.format_exc())
    return Returned(buffer.getvalue())


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies: an interrupted run leaves no worker behind."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(connection: Connection, log: Path, environment: dict[str, str], collective_timeout_s: int) -> None:
    """Join the world that `environment` describes and serve calls until the parent closes the pipe.

    Args:
        connection: this rank's end of the pipe to the parent.
        log: file that takes this rank's standard output and error.
        environment: all environment variables, RANK and WORLD_SIZE included.
        collective_timeout_s: seconds after which gloo gives up on a collective.
    """
    os.setsid()  # one signal to the group reaches children too
    _die_with_parent()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_DUMP_SIGNAL, file=2, all_threads=True)
    gc.freeze()  # the imports: collections between calls need not walk them

    torch.set_num_threads(1)
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    timeout = timedelta(seconds=collective_timeout_s)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False, timeout=timeout)
        connection.send(Listening(store.port))
    else:
        port = connection.recv().port
        store = TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timeout)
    os.environ["MASTER_PORT"] = str(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    connection.send(Ready())

    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            break
        try:
            call = pickle.loads(message)
        except Exception as error:  # the module of the function does not import here
            reply: Returned | Raised = Raised(f"{type(error).__name__}: {error}", traceback.format_exc())
        else:
            reply = _serve(call, rank, world_size)
            del call
        connection.send(reply)
    dist.destroy_process_group()
