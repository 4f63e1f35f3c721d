"""How results are written down: conditions, tables, one file per run.

Owns the form of a result file. Must not know what was measured.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import shlex
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RESULTS = pathlib.Path(__file__).parent / "results"


def conditions(command: str, load: Sequence[float]) -> list[str]:
    """What every result file says first.

    Args:
        command: how to run it again.
        load: load average before and after the measurement.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    machine = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {device}, {os.cpu_count()} cores"
    )
    return [
        f"- command: `{command}`",
        f"- {datetime.date.today().isoformat()}, {machine}, load average {load[0]:.1f} before and {load[1]:.1f} after",
    ]


def command_line(script: str, arguments: Sequence[str]) -> str:
    """How to run a script of this package again."""
    return shlex.join(["python", "-m", f"benchmarks.{script}", *arguments])


def variant(reshard: bool, only: Sequence[str]) -> str:
    """How the name of a result ends: what is kept after forward, and whether some contestants were left out."""
    return ("reshard" if reshard else "keep") + ("_part" if only else "")


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    body = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |", *body]


def write(path: pathlib.Path, text: str) -> None:
    """Write a result file and show it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(text)
    print(f"written to {path}")
