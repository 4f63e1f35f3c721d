"""The learning rate as a pure function of the step.

Owns: warm-up and decay curves. Must not know: optimizers, checkpoints, the trainer. Because nothing here has
state, a resumed run needs only its step number to continue the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

WSD_DECAY_FRACTION = 0.2
"""Share of the run that warm-up-stable-decay spends decaying; 10 to 20 % is enough (arXiv 2405.18392)."""


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return 1.0 - progress


def _wsd(progress: float) -> float:
    return min(1.0, (1.0 - progress) / WSD_DECAY_FRACTION)


def _constant(progress: float) -> float:
    return 1.0


DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
    "constant": _constant,
}
"""Decay curves by name: each maps progress in [0, 1] after warm-up to a factor in [0, 1]."""


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to the peak rate, then a decay to a fraction of it.

    Args:
        peak_lr: learning rate at the end of warm-up.
        steps: optimizer steps of the whole run; the floor is reached in the last one.
        warmup: steps of linear warm-up; step 1 uses ``peak_lr / warmup``, step ``warmup`` the peak.
        decay: a key of ``DECAYS``.
        min_lr_ratio: floor of the decay as a fraction of the peak, in [0, 1].
    """

    peak_lr: float
    steps: int
    warmup: int = 0
    decay: str = "cosine"
    min_lr_ratio: float = 0.1

    def lr(self, step: int) -> float:
        """Returns the learning rate of optimizer step ``step``, counted from 1.

        Steps past the end of the run stay at the floor.
        """
        if step < self.warmup:
            return self.peak_lr * step / self.warmup
        span = self.steps - self.warmup
        progress = min(1.0, (step - self.warmup) / span) if span > 0 else 0.0
        factor = DECAYS[self.decay](progress)
        return self.peak_lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * factor)
