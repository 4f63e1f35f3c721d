"""Where a run writes.

Owns: choosing, checking and creating the run's directory. Must not know: what is written into it.

    runs/debug                 first run
    runs/debug-2               the next one; an earlier run is never overwritten
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from simplefsdp.llama.options import TrainOptions, UsageError

ROOT = Path("runs")
METRICS_FILE = "metrics.jsonl"


def find_run_directory(options: TrainOptions) -> Path:
    """Returns the directory the options mean, and checks all they want written; creates nothing.

    Raises:
        UsageError: if `--out` holds another run and `--resume` was not given, or a directory cannot be written.
    """
    if options.out is not None:
        directory = options.out
        if not options.resume and (directory / METRICS_FILE).exists():
            raise UsageError(
                f"--out {directory}: holds another run; continue it with --resume, or choose another"
            )
    else:
        taken = _numbered_runs(ROOT, options.run_name)
        last = max(taken, default=0)
        number = last if options.resume and last else last + 1
        directory = ROOT / (options.run_name if number == 1 else f"{options.run_name}-{number}")
    for option, path in (("--out", directory), *_other_directories(options)):
        _check_writable(option, path)
    return directory


def create_run_directory(options: TrainOptions) -> Path:
    """Creates and returns the run's directory, after making sure that all that is wanted can be written.

    Raises:
        UsageError: as `find_run_directory`, or if writing fails.
    """
    directory = find_run_directory(options)
    for option, path in (("--out", directory), *_other_directories(options)):
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise UsageError(f"{option} {path}: cannot be written ({error.strerror})") from None
    return directory


def _other_directories(options: TrainOptions) -> list[tuple[str, Path]]:
    wanted = (("--checkpoint-dir", options.checkpoint_dir), ("--export-hf", options.export_hf))
    return [(option, path) for option, path in wanted if path is not None]


def _numbered_runs(root: Path, name: str) -> list[int]:
    """Numbers of the existing runs `name`, `name-2`, `name-3`, ...; one that failed before it began is none."""
    pattern = re.compile(re.escape(name) + r"(?:-([0-9]+))?")
    runs = [metrics.parent.name for metrics in root.glob(f"*/{METRICS_FILE}")]
    matches = filter(None, map(pattern.fullmatch, runs))
    return [int(match.group(1) or 1) for match in matches]


def _check_writable(option: str, directory: Path) -> None:
    ancestor = directory.absolute()
    while not os.path.lexists(ancestor):
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise UsageError(f"{option} {directory}: {ancestor} is not a directory")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {directory}: {ancestor} cannot be written (permission denied)")
