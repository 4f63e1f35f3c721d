"""What a run measures, and the files it goes to.

Owns: the records of a step and of an evaluation, `metrics.jsonl`, TensorBoard events. Must not know: how
the numbers come about, terminals, pictures.

`metrics.jsonl` holds one JSON object per line, told apart by "kind":

    {"kind": "run", "time": ..., "options": {...}, ...}     a start or resume, with its options
    {"kind": "compile", "compile_s": ..., ...}              what compiling took
    {"kind": "train", "step": 1, "loss": 5.56, ...}         every optimizer step
    {"kind": "eval", "step": 50, "loss": 3.01}              every evaluation

A resumed run drops the records of steps that were not in the checkpoint, so each step appears once.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainRecord:
    """One optimizer step.

    Args:
        step: optimizer step, from 1.
        loss: mean cross entropy in nats over the tokens of all ranks, before the update.
        grad_norm: global gradient norm before clipping.
        lr: learning rate of the update.
        tokens: tokens seen so far, all ranks.
        step_time_s: seconds from the end of the step before, without evaluations and checkpoints.
        tokens_per_s: tokens of all ranks per second; `None` in the first step, which compiles.
        mfu: model flops utilisation in [0, 1]; `None` where the peak is not known, and in the first step.
        peak_memory_bytes: of the rank that used most so far; on GPUs device memory, on CPUs resident memory.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_time_s: float
    tokens_per_s: float | None
    mfu: float | None
    peak_memory_bytes: int


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation.

    Args:
        step: optimizer steps done when it ran.
        loss: mean cross entropy in nats over the held-out batches of all ranks.
    """

    step: int
    loss: float


@dataclass(frozen=True)
class History:
    """The records of a `metrics.jsonl`, in order of their steps."""

    train: tuple[TrainRecord, ...]
    evals: tuple[EvalRecord, ...]


class MetricsLog:
    """Writes records to `metrics.jsonl` and, if wanted and installed, to TensorBoard.

    Args:
        path: the JSONL file; appended to.
        start_step: optimizer steps already done; records of later steps are dropped from the file.
        tensorboard_dir: directory of the event files, or `None` for none.
    """

    def __init__(self, path: Path, *, start_step: int = 0, tensorboard_dir: Path | None = None) -> None:
        if path.exists():
            _drop_after(path, start_step)
        self._file = path.open("a", encoding="utf-8")
        self._events = _open_events(tensorboard_dir, start_step) if tensorboard_dir is not None else None

    @property
    def has_tensorboard(self) -> bool:
        """Whether TensorBoard events are written."""
        return self._events is not None

    def write_train(self, record: TrainRecord) -> None:
        """Writes one optimizer step."""
        values = dataclasses.asdict(record)
        self.write("train", values)
        self._write_events("train", record.step, values)

    def write_eval(self, record: EvalRecord) -> None:
        """Writes one evaluation."""
        values = dataclasses.asdict(record)
        self.write("eval", values)
        self._write_events("eval", record.step, values)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Writes one record to the JSONL file alone."""
        # Flushed line by line: what a killed run measured is on disk.
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()

    def _write_events(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if self._events is None:
            return
        for name, value in values.items():
            if name != "step" and value is not None:
                self._events.add_scalar(f"{kind}/{name}", value, step)


def read_history(path: Path) -> History:
    """Reads the training and evaluation records of a `metrics.jsonl`."""
    train, evals = [], []
    for values in _read(path):
        kind = values.pop("kind")
        if kind == "train":
            train.append(TrainRecord(**values))
        elif kind == "eval":
            evals.append(EvalRecord(**values))
    return History(tuple(train), tuple(evals))


def _read(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            # The last line of a run that was killed while it wrote.
            continue
    return records


def _drop_after(path: Path, step: int) -> None:
    kept = [record for record in _read(path) if record.get("step", 0) <= step]
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(scratch, path)


def _open_events(directory: Path, start_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=start_step + 1 if start_step else None)
