"""Scaling as a picture.

Owns its look. Must not know how points are predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from simplefsdp.explainer.draw import INSTALL_HINT
from simplefsdp.planner.scale import ScalePoint

COLOURS = (
    "#4c78a8",
    "#e45756",
    "#54a24b",
    "#f58518",
    "#b279a2",
    "#72b7b2",
    "#eeca3b",
    "#ff9da6",
    "#9d755d",
    "#bab0ac",
    "#333333",
)
"""One for each way to shard that `scale` knows: Vega's "tableau10", and a grey."""


def plot_scaling(
    series: Mapping[str, Sequence[ScalePoint]], title: str, memory_bytes: int | None, path: Path
) -> None:
    """Draw speed per device and exposed communication over the number of devices, one line per way to shard.

    Points that do not fit the device are hollow.

    Args:
        series: points by what the line is called.
        title: above the picture; says that all is modelled, and with what.
        memory_bytes: of a device, None where it is not known.
        path: file to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib: {INSTALL_HINT}") from error
    has_tokens = all(point.tokens_per_s is not None for points in series.values() for point in points)
    figure = Figure(figsize=(8, 6), dpi=130, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    ticks = sorted({point.load.world.devices for points in series.values() for point in points})
    for (name, points), colour in zip(series.items(), itertools.cycle(COLOURS), strict=False):
        devices = [point.load.world.devices for point in points]
        heights = [(point.tokens_per_s or 0) if has_tokens else point.step_ns / 1e6 for point in points]
        exposed = [100 * point.exposed_ns / point.step_ns for point in points]
        for axes, values, label in ((upper, heights, name), (lower, exposed, None)):
            axes.plot(devices, values, color=colour, label=label, linewidth=1.5)
            for x, y, point in zip(devices, values, points, strict=True):
                full = point.fit(memory_bytes) != "no"
                axes.plot(x, y, "o", color=colour, markerfacecolor=colour if full else "white", markersize=5)
    upper.set_title(title, loc="left", fontsize=9, wrap=True)
    upper.set_ylabel("tokens/s/device (modelled)" if has_tokens else "step (ms, modelled)")
    upper.set_ylim(bottom=0)
    lower.set_ylabel("exposed (%, modelled)")
    lower.set_ylim(bottom=0)
    lower.set_xscale("log", base=2)
    lower.set_xticks(ticks, [str(number) for number in ticks])
    lower.set_xlabel("devices (hollow: does not fit)")
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.minorticks_off()
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=min(len(series), 6))
    figure.savefig(path)
