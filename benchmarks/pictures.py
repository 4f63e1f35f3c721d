"""Pictures of results: bars of step times, fits beside measurements.

Owns drawing. Must not know how anything was measured. matplotlib comes with `pip install 'simplefsdp[train]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping, Sequence

_DOTS_PER_INCH = 110
_COLORS = {"ours": "#2a6f97", "stock": "#8d99ae", "alone": "#d9a441"}
_OTHER = "#bfc7d1"


def draw_steps(
    times: Mapping[str, tuple[float, float, float]], floor: float, title: str, path: pathlib.Path
) -> None:
    """Bars of step times, from the lowest to the highest, and a line at what no contestant without shortcuts can beat.

    Args:
        times: lowest, median and highest in seconds, by contestant.
        floor: seconds of the longer of compute alone and communication alone.
        title: above the picture.
        path: PNG to write.
    """
    figure, axes = _figure(7.0, 0.9 + 0.32 * len(times))
    names = list(times)[::-1]
    medians = [times[name][1] for name in names]
    spread = [
        [middle - times[name][0] for name, middle in zip(names, medians, strict=True)],
        [times[name][2] - middle for name, middle in zip(names, medians, strict=True)],
    ]
    axes.barh(
        names, medians, xerr=spread, color=[_color(name) for name in names], ecolor="#444444", capsize=2
    )
    for name, middle in zip(names, medians, strict=True):
        axes.text(times[name][2], name, f"  {middle:.2f}", va="center", fontsize=8)
    axes.axvline(
        floor, color="#b23a48", linewidth=1, linestyle="--", label="max(compute alone, communication alone)"
    )
    axes.set_xlim(right=1.12 * max(high for _, _, high in times.values()))
    figure.legend(loc="outside lower left", fontsize=8, frameon=False)
    axes.set_xlabel("seconds per step (median, lowest to highest)")
    figure.suptitle(title, fontsize=9)
    _save(figure, path)


def draw_fits(
    fits: Mapping[str, tuple[int, int]],
    points: Mapping[str, Sequence[tuple[int, int]]],
    title: str,
    path: pathlib.Path,
) -> None:
    """Measured times of collectives by traffic, and the fitted lines.

    Args:
        fits: alpha in ns and bandwidth in byte/s, by kind.
        points: traffic in bytes and time in ns, by kind.
        title: above the picture.
        path: PNG to write.
    """
    figure, axes = _figure(6.5, 4.2)
    for kind, measured in points.items():
        alpha, bandwidth = fits[kind]
        (line,) = axes.plot(
            [traffic for traffic, _ in measured],
            [(alpha + traffic * 10**9 / bandwidth) / 1e6 for traffic, _ in measured],
            label=f"{kind}: {alpha / 1e6:.2f} ms + bytes / {bandwidth / 1e6:.0f} MB/s",
        )
        axes.scatter(
            [traffic for traffic, _ in measured],
            [time / 1e6 for _, time in measured],
            color=line.get_color(),
            s=14,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("traffic per rank, bytes")
    axes.set_ylabel("ms (points measured, lines fitted)")
    figure.suptitle(title, fontsize=9)
    axes.legend(fontsize=8)
    _save(figure, path)


def _color(name: str) -> str:
    return next((color for word, color in _COLORS.items() if word in name), _OTHER)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'simplefsdp[train]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Any, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
