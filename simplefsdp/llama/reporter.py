"""Tells a run's story, to the screen and to files at once.

Owns: what goes where, the lines that open and close a run, the files' names in the run's directory. Must not know:
the training loop, ranks: on all ranks but 0 it is made with a silent display and without a directory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simplefsdp.llama.display import Display, Silent, format_duration
from simplefsdp.llama.metrics import EvalRecord, MetricsLog, TrainRecord, read_history
from simplefsdp.llama.options import INSTALL_HINT
from simplefsdp.llama.plot import plot_loss
from simplefsdp.llama.rundir import METRICS_FILE

PLOT_FILE = "loss.png"
TENSORBOARD_DIRECTORY = "tensorboard"


class Reporter:
    """Writes and shows what the trainer reports.

    Args:
        display: the screen.
        directory: where the files go; `None` writes none.
        tensorboard: whether TensorBoard events are wanted.
    """

    def __init__(
        self, display: Display | None = None, directory: Path | None = None, *, tensorboard: bool = False
    ) -> None:
        self._display = display if display is not None else Silent()
        self._directory = directory
        self._tensorboard = tensorboard
        self._log: MetricsLog | None = None
        self._began = time.monotonic()
        self._last_eval: EvalRecord | None = None
        self._first_train: TrainRecord | None = None
        self._last_train: TrainRecord | None = None

    def begin(self, facts: Mapping[str, str], settings: Mapping[str, Any], start_step: int) -> None:
        """The run starts or resumes.

        Args:
            facts: for the screen, name to value.
            settings: for the file, as JSON values.
            start_step: optimizer steps done before.
        """
        self._display.header("simplefsdp train", facts)
        if self._directory is None:
            return
        self._log = MetricsLog(
            self._directory / METRICS_FILE,
            start_step=start_step,
            tensorboard_dir=self._directory / TENSORBOARD_DIRECTORY if self._tensorboard else None,
        )
        self._log.write("run", {"time": time.time(), "start_step": start_step, **settings})
        if self._tensorboard and not self._log.has_tensorboard:
            self.note(f"no TensorBoard events: {INSTALL_HINT}")

    def note(self, text: str) -> None:
        """One line that stays on the screen."""
        self._display.note(text)

    def compiling(self, active: bool) -> None:
        """The step that compiles begins or has ended."""
        self._display.compiling(active)

    def compiled(self, compile_s: float, first_step_s: float, second_step_s: float) -> None:
        """How long compilation took, known after the second step."""
        self.note(
            f"compiled in {compile_s:.1f} s (first step {first_step_s:.1f} s, second {second_step_s:.2f} s)"
        )
        if self._log is not None:
            self._log.write("compile", {"compile_s": compile_s, "first_step_s": first_step_s})

    def train(self, record: TrainRecord, *, final: bool) -> None:
        """One optimizer step; `final` if the run ends with it."""
        self._first_train = self._first_train or record
        self._last_train = record
        if self._log is not None:
            self._log.write_train(record)
        self._display.step(record, final=final)

    def evaluation(self, record: EvalRecord) -> None:
        """One evaluation."""
        self._last_eval = record
        if self._log is not None:
            self._log.write_eval(record)
        self._display.evaluation(record)

    def close(self) -> None:
        """Nothing more comes, whether the run succeeded or not: closes the files, frees the terminal."""
        self._display.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def conclude(self, title: str, headline: str) -> None:
        """After `close`: the closing lines and the picture.

        Args:
            title: of the picture.
            headline: how the run ended.
        """
        first, last = self._first_train, self._last_train
        if first is not None and last is not None:
            took = format_duration(time.monotonic() - self._began)
            held_out = "" if self._last_eval is None else f", held-out {self._last_eval.loss:.4f}"
            headline += f" in {took}: loss {first.loss:.4f} -> {last.loss:.4f}{held_out}"
        self.note(headline)
        if self._directory is None:
            return
        self.note(f"  metrics    {self._directory / METRICS_FILE}")
        history = read_history(self._directory / METRICS_FILE)
        if not history.train:
            return
        try:
            plot_loss(history, self._directory / PLOT_FILE, title)
            self.note(f"  loss curve {self._directory / PLOT_FILE}")
        except ImportError:
            self.note(f"  no loss curve: {INSTALL_HINT}")
