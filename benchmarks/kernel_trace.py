"""What ran on a GPU, when, and how much of its communication nothing covered: read from a torch profiler trace.

Owns the reading of traces. Must not know what was traced. Times are microseconds, as in traces.

A modelled collective is what runs on the stream of its lane (`lanes.Stream`): a copy that fills the output, and the
kernel that spins to its end. Everything on other streams is work of the program.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SPIN_KERNEL = "spin_kernel"
"""Part of the name of the kernel of `torch.cuda._sleep` (torch 2.11 to 2.14)."""
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclasses.dataclass(frozen=True)
class Activity:
    """One kernel or copy on a GPU; microseconds from the start of the trace's first."""

    name: str
    stream: int
    begin_us: float
    end_us: float


@dataclasses.dataclass(frozen=True)
class Covered:
    """One collective and what ran beside it.

    Args:
        begin_us, end_us: when it held its lane.
        exposed_us: the part of it in which no other stream ran anything.
        kernels: kernels of the program that began beside it.
    """

    begin_us: float
    end_us: float
    exposed_us: float
    kernels: int


def activities(events: Iterable[dict[str, Any]]) -> list[Activity]:
    """The kernels and copies of a trace, by begin."""
    found = [
        Activity(
            event["name"],
            int(event["args"]["stream"]),
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_CATEGORIES
    ]
    found.sort(key=lambda item: (item.begin_us, item.end_us))
    first = found[0].begin_us if found else 0.0
    return [
        dataclasses.replace(item, begin_us=item.begin_us - first, end_us=item.end_us - first)
        for item in found
    ]


def collectives(found: Sequence[Activity]) -> list[Covered]:
    """The modelled collectives, in the order in which they ran."""
    lanes = {item.stream for item in found if SPIN_KERNEL in item.name}
    program = [item for item in found if item.stream not in lanes]
    busy = merged((item.begin_us, item.end_us) for item in program)
    out = []
    for stream in sorted(lanes):
        begin: float | None = None
        for item in found:
            if item.stream != stream:
                continue
            begin = item.begin_us if begin is None else begin  # of the copy that fills the output
            if SPIN_KERNEL in item.name:
                beside = sum(begin <= other.begin_us < item.end_us for other in program)
                out.append(Covered(begin, item.end_us, uncovered(begin, item.end_us, busy), beside))
                begin = None
    return sorted(out, key=lambda item: item.begin_us)


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as disjoint ones in order."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def uncovered(begin: float, end: float, busy: Sequence[tuple[float, float]]) -> float:
    """How much of an interval lies outside of disjoint others."""
    inside = sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in busy)
    return end - begin - inside
