"""Several traces at once, each in a process of its own, with a line of progress.

Owns the processes. Must not know what is traced for which purpose.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence

import torch

from simplefsdp.explainer.hardware import Hardware
from simplefsdp.planner.request import Request
from simplefsdp.planner.step import Step, trace_step

Say = Callable[[str], None]
TraceAll = Callable[[Sequence[Request]], list[Step]]


def trace_fresh(request: Request, hardware: Hardware) -> Step:
    """Trace a step as if it were the first: Dynamo compiles the same code only so often, and remembers other sizes."""
    torch.compiler.reset()
    return trace_step(request, hardware)


def trace_all(requests: Sequence[Request], hardware: Hardware, say: Say) -> list[Step]:
    """Trace steps, on as many cores as there are.

    Args:
        requests: what to trace.
        hardware: what to model.
        say: told what is going on.

    Returns:
        The steps, in the order of the requests.

    Raises:
        UsageError, TraceError: as `trace_step`; the first one that occurs.
    """
    workers = min(len(requests), len(os.sched_getaffinity(0)))
    if workers <= 1:
        steps = []
        for number, request in enumerate(requests):
            say(f"tracing {number + 1} of {len(requests)}: {_describe(request)}")
            steps.append(trace_fresh(request, hardware))
        return steps
    # Not fork: torch has started threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(trace_fresh, request, hardware) for request in requests]
        say(f"tracing {len(requests)} variants in {workers} processes")
        try:
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                future.result()
                say(f"traced {done} of {len(requests)}: {_describe(requests[futures.index(future)])}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def say_on_terminal(text: str) -> None:
    """Show a line of progress in place of the one before, if somebody watches; "" removes it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _describe(request: Request) -> str:
    words = ["" if ":" in request.model else f"checkpointing {request.ac}, batch {request.batch}"]
    words.append("" if request.reshard else "not resharded")
    words.append("replicated" if request.factor == 1 else "")
    return ", ".join(filter(None, words)) or request.model
