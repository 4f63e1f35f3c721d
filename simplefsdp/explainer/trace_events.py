"""Timelines as Chrome trace events, which Perfetto and chrome://tracing open.

Owns the format ("Trace Event Format", Google 2016: complete events "X", counters "C", metadata "M"; times in
microseconds). One process per graph, one thread per row; the runs of graphs follow each other in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simplefsdp.explainer.facts import Memory
from simplefsdp.explainer.runs import Run, held_by_others
from simplefsdp.explainer.schedule import Timeline

_NS_PER_US = 1000
_MIB = 2**20


def trace_events(timelines: Sequence[Timeline], runs: Sequence[Run], caption: str) -> dict[str, object]:
    """The trace as a value for `json.dump`.

    Args:
        timelines: of every graph.
        runs: of the step.
        caption: kept with the trace.
    """
    events: list[dict[str, Any]] = []
    threads = [{row: thread for thread, row in enumerate(timeline.rows)} for timeline in timelines]
    for process, timeline in enumerate(timelines):
        events.append(_name("process_name", f"{timeline.kind} (modelled)", process))
        events += [_name("thread_name", row, process, thread) for row, thread in threads[process].items()]
    start_ns = 0
    for run, others in zip(runs, held_by_others(timelines, runs), strict=True):
        process, timeline, rows = run.graph, timelines[run.graph], threads[run.graph]
        for span in timeline.spans:
            arguments: dict[str, Any] = {} if span.bucket is None else {"bucket": span.bucket}
            events.append(
                {
                    "name": span.name,
                    "cat": span.activity.value,
                    "ph": "X",
                    "ts": (start_ns + span.begin_ns) / _NS_PER_US,
                    "dur": span.duration_ns / _NS_PER_US,
                    "pid": process,
                    "tid": rows[span.row],
                    "args": arguments,
                }
            )
        for point in timeline.memory:
            held = {
                use.value: (size + other) / _MIB
                for use, size, other in zip(Memory, point.by_use, others, strict=True)
            }
            events.append(
                {
                    "name": "memory (MiB)",
                    "ph": "C",
                    "ts": (start_ns + point.time_ns) / _NS_PER_US,
                    "pid": process,
                    "args": held,
                }
            )
        start_ns += timeline.step_ns
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"caption": caption}}


def _name(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
