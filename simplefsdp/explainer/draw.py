"""Timelines as a picture, drawn with matplotlib.

Owns the look. Must not know graphs or plans. matplotlib is imported when a picture is asked for.

    forward      compute  | ==== ==== ----- ==== |      one column per graph, widths in proportion to their time
                 group0   |  ~~~~~~~~~~  ~~~~    |
                 memory   |   stacked by use     |
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simplefsdp.explainer.facts import Memory
from simplefsdp.explainer.schedule import COMPUTE_ROW, Activity, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACTIVITY_COLOURS = {
    Activity.COMPUTE: "#4c78a8",
    Activity.COPY: "#9ecae9",
    Activity.EXPOSED: "#e45756",
    Activity.GATHER: "#54a24b",
    Activity.REDUCE: "#f58518",
    Activity.OTHER: "#b279a2",
}
MEMORY_COLOURS = {
    Memory.ACTIVATIONS: "#4c78a8",
    Memory.GATHERED: "#54a24b",
    Memory.GRADIENTS: "#f58518",
    Memory.COMMUNICATION: "#b279a2",
}
"""Colour-blind safe hues of the Tableau palette (Vega's "tableau10"); one hue for one thing in both parts."""

INSTALL_HINT = "pip install 'simplefsdp[train]'"
_GIB = 2**30
_MIB = 2**20
_NARROWEST_LABEL = 0.06  # of the width of a column: below it a name does not fit beside its span's edges
_SMALLEST_COLUMN = 0.3  # of the width of the widest column, so that a short graph stays readable


def draw(timelines: Sequence[Timeline], caption: str, path: Path) -> None:
    """Write the picture.

    Args:
        timelines: at least one.
        caption: above the picture; says that all is modelled, and with what.
        path: file to write; its ending names the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no timeline.
    """
    if not timelines:
        raise ValueError(
            "there is no schedule to draw: the model has no compiled graph with sharded parameters"
        )
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib: {INSTALL_HINT}") from error

    longest = max(timeline.step_ns for timeline in timelines) or 1
    widths = [max(timeline.step_ns / longest, _SMALLEST_COLUMN) for timeline in timelines]
    rows = max(len(timeline.rows) for timeline in timelines)
    figure = Figure(figsize=(14, 2.6 + 0.55 * rows + 2.2), dpi=130, layout="constrained")
    axes = figure.subplots(
        2,
        len(timelines),
        squeeze=False,
        sharex="col",
        width_ratios=widths,
        height_ratios=(0.55 * rows + 0.3, 1.9),
    )
    top = max(timeline.peak.total_bytes for timeline in timelines)
    unit, unit_name = (_GIB, "GiB") if top >= _GIB else (_MIB, "MiB")
    for column, timeline in enumerate(timelines):
        _draw_rows(axes[0][column], timeline)
        _draw_memory(axes[1][column], timeline, unit, unit_name, 1.12 * top / unit)
    axes[1][0].set_ylabel(f"memory ({unit_name})")
    used = dict.fromkeys(span.activity for timeline in timelines for span in timeline.spans)
    handles = [Patch(color=ACTIVITY_COLOURS[item], label=item.value) for item in Activity if item in used]
    held = [
        sum(point.by_use[at] for line in timelines for point in line.memory) for at, _ in enumerate(Memory)
    ]
    uses = [
        Patch(color=MEMORY_COLOURS[use], alpha=0.75, label=f"memory: {use.value}")
        for use, size in zip(Memory, held, strict=True)
        if size
    ]
    figure.legend(
        handles=[*handles, *uses],
        loc="outside lower center",
        ncols=len(handles) + len(uses),
        frameon=False,
        fontsize=8,
    )
    figure.suptitle("\n".join(textwrap.wrap(caption, 150)), fontsize=10, x=0.01, ha="left")
    figure.savefig(path)


def _draw_rows(axes: Axes, timeline: Timeline) -> None:
    rows = timeline.rows
    for height, row in enumerate(reversed(rows)):
        spans = [span for span in timeline.spans if span.row == row]
        for activity, colour in ACTIVITY_COLOURS.items():
            bars = [
                (span.begin_ns / 1e6, span.duration_ns / 1e6) for span in spans if span.activity is activity
            ]
            if bars:
                axes.broken_barh(
                    bars, (height - 0.38, 0.76), facecolors=colour, edgecolors="white", linewidth=0.3
                )
        for span in spans:
            if span.duration_ns > _NARROWEST_LABEL * timeline.step_ns and span.activity is not Activity.COPY:
                _write(axes, span, height, timeline.step_ns)
    axes.set_yticks(range(len(rows)), [_row_name(row) for row in reversed(rows)], fontsize=9)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, timeline.step_ns / 1e6)
    share = timeline.exposed_ns / timeline.step_ns if timeline.step_ns else 0.0
    title = f"{timeline.kind}: {timeline.step_ns / 1e6:.2f} ms modelled, {share:.1%} exposed"
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _write(axes: Axes, span: Span, height: int, step_ns: int) -> None:
    letters = int(
        110 * span.duration_ns / step_ns
    )  # about 110 letters of this size fit in a full-width column
    name = span.name if span.activity is not Activity.EXPOSED else "waits for " + span.name
    text = name if len(name) <= letters else name[: max(letters - 2, 1)] + "…"
    axes.text(
        (span.begin_ns + span.end_ns) / 2e6,
        height,
        text,
        ha="center",
        va="center",
        fontsize=6.5,
        color="white",
        clip_on=True,
    )


def _draw_memory(axes: Axes, timeline: Timeline, unit: int, unit_name: str, top: float) -> None:
    times = [point.time_ns / 1e6 for point in timeline.memory] + [timeline.step_ns / 1e6]
    points = [*timeline.memory, timeline.memory[-1]]
    series: list[Any] = [[point.by_use[at] / unit for point in points] for at, _ in enumerate(Memory)]
    axes.stackplot(
        times, series, colors=[MEMORY_COLOURS[use] for use in Memory], alpha=0.75, step="post", linewidth=0
    )
    peak = timeline.peak
    height = peak.total_bytes / unit
    right = peak.time_ns > 0.6 * timeline.step_ns
    axes.plot([peak.time_ns / 1e6], [height], marker="v", color="#333333", markersize=5)
    axes.annotate(
        f"peak {height:.2f} {unit_name}",
        (peak.time_ns / 1e6, height),
        xytext=(-6 if right else 6, 3),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=8,
    )
    axes.set_ylim(0, top or 1)
    axes.set_xlabel("ms")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _row_name(row: str) -> str:
    return row if row == COMPUTE_ROW else f"network\n{row}"
