"""The picture of a run: its loss curve as a PNG.

Owns: drawing. Must not know: where the records come from, training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simplefsdp.llama.metrics import History

SMOOTHING_FRACTION = 0.02
"""Half the width of the smoothing window as a share of the run: short enough to keep the curve's shape."""
TRAIN_COLOUR = "#4c78a8"
EVAL_COLOUR = "#e45756"


def smooth(values: Sequence[float], half_width: int) -> list[float]:
    """Mean of each value and up to `half_width` neighbours on either side, as many on one as on the other.

    Symmetric, so that the smoothed curve does not lag behind a falling loss as a running average would.
    """
    smoothed = []
    for index in range(len(values)):
        reach = min(half_width, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        smoothed.append(sum(window) / len(window))
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
    axes.plot(
        steps,
        losses,
        color=TRAIN_COLOUR,
        alpha=0.3,
        linewidth=1,
        label=f"training, each step (last {losses[-1]:.2f})",
    )
    axes.plot(
        steps,
        smooth(losses, round(SMOOTHING_FRACTION * len(losses))),
        color=TRAIN_COLOUR,
        linewidth=2,
        label="training, smoothed",
    )
    if history.evals:
        axes.plot(
            [record.step for record in history.evals],
            [record.loss for record in history.evals],
            color=EVAL_COLOUR,
            marker="o",
            markersize=4,
            linewidth=1.5,
            label=f"held-out text (last {history.evals[-1].loss:.2f})",
        )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
