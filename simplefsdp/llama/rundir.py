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
    """Returns the directory the options mean; creates nothing.

    Raises:
        UsageError: if `--out` holds another run and `--resume` was not given, or it cannot be written.
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
    _check_writable(directory)
    return directory


def create_run_directory(options: TrainOptions) -> Path:
    """Creates and returns the run's directory, after making sure that files can be written there.

    Raises:
        UsageError: as `find_run_directory`, or if writing fails.
    """
    directory = find_run_directory(options)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"--out {directory}: cannot be written ({error.strerror})") from None
    return directory


def _numbered_runs(root: Path, name: str) -> list[int]:
    """Numbers of the existing runs `name`, `name-2`, `name-3`, ..."""
    pattern = re.compile(re.escape(name) + r"(?:-([0-9]+))?")
    children = [child.name for child in root.iterdir()] if root.is_dir() else []
    matches = filter(None, map(pattern.fullmatch, children))
    return [int(match.group(1) or 1) for match in matches]


def _check_writable(directory: Path) -> None:
    ancestor = directory.absolute()
    while not os.path.lexists(ancestor):
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise UsageError(f"--out {directory}: {ancestor} is not a directory")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise UsageError(f"--out {directory}: {ancestor} cannot be written (permission denied)")
