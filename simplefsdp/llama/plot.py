"""The picture of a run: its loss curve as a PNG.

Owns: drawing. Must not know: where the records come from, training.
"""

from __future__ import annotations

from pathlib import Path

from simplefsdp.llama.metrics import History

SMOOTHING_FRACTION = 0.03
"""Time constant of the smoothed curve as a share of the run: short enough to keep its shape."""
TRAIN_COLOUR = "#4c78a8"
EVAL_COLOUR = "#e45756"


def smooth(values: list[float], time_constant: float) -> list[float]:
    """Exponential moving average, corrected for its start so that the first value is not favoured.

    Args:
        values: one per step.
        time_constant: steps after which a value's weight has fallen to about 1/e; up to 1 changes nothing.
    """
    keep = 1.0 - 1.0 / max(time_constant, 1.0)
    mean, weight, smoothed = 0.0, 0.0, []
    for value in values:
        mean = keep * mean + (1.0 - keep) * value
        weight = keep * weight + (1.0 - keep)
        smoothed.append(mean / weight)
    return smoothed


def plot_loss(history: History, path: Path, title: str) -> None:
    """Draws training loss, its smoothed course and the evaluations over the steps.

    Args:
        history: at least one training record.
        path: the PNG to write.
        title: above the picture.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    steps = [record.step for record in history.train]
    losses = [record.loss for record in history.train]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color=TRAIN_COLOUR, alpha=0.3, linewidth=1, label="training, each step")
    axes.plot(
        steps,
        smooth(losses, SMOOTHING_FRACTION * len(losses)),
        color=TRAIN_COLOUR,
        linewidth=2,
        label=f"training, smoothed (ends at {losses[-1]:.2f})",
    )
    if history.evals:
        axes.plot(
            [record.step for record in history.evals],
            [record.loss for record in history.evals],
            color=EVAL_COLOUR,
            marker="o",
            markersize=4,
            linewidth=1.5,
            label=f"held-out text (ends at {history.evals[-1].loss:.2f})",
        )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
