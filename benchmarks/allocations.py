"""How much memory a program holds at its peak: tensors by the allocator's account, and the process as a whole.

Owns the reading of torch's profiler and of /proc. Must not know what runs.

The allocator's account sees compiled code too, whose buffers no operator makes.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_KIB = 1024


def peak_above_start(step: Callable[[], object]) -> int:
    """Most bytes of CPU tensors that `step` held at once beyond what was alive when it began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        events = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["traceEvents"]
    return peak_of(events)


def peak_of(events: Iterable[dict[str, Any]]) -> int:
    """The largest sum of allocations less frees in the memory events of a trace; 0 where nothing was allocated."""
    memory = [
        event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]
    memory.sort(key=lambda event: (event["ts"], event["args"]["Ev Idx"]))
    sums = itertools.accumulate((event["args"]["Bytes"] for event in memory), initial=0)
    return int(max(sums))


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each storage counted once; of DTensors, those of the local tensors."""
    plain = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in plain}
    return sum(storages.values())


def forget_peak() -> None:
    """Give freed memory back to the system, and let the peak of this process count from now. Linux."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def peak_resident_set() -> int:
    """Most bytes of memory that this process had since `forget_peak`. Linux."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * _KIB for line in lines if line.startswith("VmHWM:"))
