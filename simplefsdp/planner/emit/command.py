"""`simplefsdp plan --emit-triton DIR`: asks for the code, and writes it down.

Owns the files, their first lines and what is said about them. Must not know how code comes about: that happens in a
process of its own, because torch must not be imported before the guard.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from simplefsdp.llama.options import UsageError
from simplefsdp.planner.emit.worker import EmitRequest

FEW_LAYERS = 3
"""Blocks of a Llama unless asked for more: the first, one like all others, and the last."""
WORKER = "simplefsdp.planner.emit.worker"

KINDS = ("forward", "backward")
_WRITTEN = "# Written by TorchInductor: "

_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\(", re.MULTILINE)
_COLLECTIVE = re.compile(r"_c10d_functional\.(\w+)\.default\(")


@dataclasses.dataclass(frozen=True)
class Emitted:
    """The code of a step.

    Args:
        sources: by graph, "forward" and "backward".
        ptx: of each graph's kernels, by name; empty unless it was asked for.
        torch: its version.
        device: the GPU it is for, and how torch came to know it.
        attention: how attention was chosen.
        triton: its version, None where it is not installed.
    """

    sources: dict[str, str]
    ptx: dict[str, dict[str, str]]
    torch: str
    device: str
    attention: str
    triton: str | None

    @property
    def writer(self) -> str:
        """Who wrote the code, for whom."""
        triton = (
            f"Triton {self.triton}"
            if self.triton
            else "without Triton, so that hints on arguments have an old form (install triton for today's)"
        )
        return f"torch {self.torch}, {triton}, for {self.device}"


class EmitError(RuntimeError):
    """The code could not be written; the text says why."""


def emit(request: EmitRequest) -> Emitted:
    """Have the code written, in a process of its own.

    Raises:
        UsageError: the user can change what is wrong; the text says how.
        EmitError: the model cannot be compiled for a GPU.
    """
    done = subprocess.run(
        [sys.executable, "-m", WORKER],
        input=request.to_json(),
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise EmitError(said[-1] if said else f"the process ended with {done.returncode}")
    result = json.loads(done.stdout)
    if "error" in result:
        raise (UsageError if result["usage"] else EmitError)(result["error"])
    sources = {kind: result[kind] for kind in KINDS if kind in result}
    return Emitted(
        sources, result["ptx"], result["torch"], result["device"], result["attention"], result["triton"]
    )


def check_free(directory: Path) -> None:
    """Check that what would be written replaces nothing but what this command has written before.

    Raises:
        UsageError: names the file that would be lost.
    """
    for path in (directory / f"{kind}.py" for kind in KINDS):
        if path.exists() and not _is_ours(path):
            raise UsageError(
                f"--emit-triton {directory}: {path.name} is there, and this command has not written it; choose "
                "another directory"
            )


def _is_ours(path: Path) -> bool:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return len(lines) > 1 and lines[1].startswith(_WRITTEN)


def _remove_old(directory: Path) -> None:
    """Take away what an earlier call has left: the new code may have fewer graphs, and other kernels."""
    for kind in KINDS:
        lowered = directory / f"{kind}_ptx"
        (directory / f"{kind}.py").unlink(missing_ok=True)
        for old in lowered.glob("triton_*.ptx"):
            old.unlink()
        if lowered.is_dir() and not any(lowered.iterdir()):
            lowered.rmdir()


def save(emitted: Emitted, title: str, directory: Path) -> list[Path]:
    """Write a file for each graph, and a directory for its kernels in PTX; returns these.

    What `check_free` lets be replaced is.

    Args:
        emitted: the code.
        title: of model and devices.
        directory: exists.

    Raises:
        OSError: a file cannot be written.
        UsageError: as `check_free`.
    """
    check_free(directory)
    _remove_old(directory)
    files = []
    for kind, source in emitted.sources.items():
        head = (
            f"# {kind} of {title}\n"
            f"{_WRITTEN}{emitted.writer}. Nothing of it has run.\n"
            f"# Attention: {emitted.attention}.\n\n"
        )
        path = directory / f"{kind}.py"
        path.write_text(head + source)
        files.append(path)
        for name, text in emitted.ptx.get(kind, {}).items():
            lowered = directory / f"{kind}_ptx" / f"{name}.ptx"
            lowered.parent.mkdir(exist_ok=True)
            lowered.write_text(text)
    return [*files, *(directory / f"{kind}_ptx" for kind, texts in emitted.ptx.items() if texts)]


def summary(emitted: Emitted) -> str:
    """What is in the code: a line for each graph."""
    lines = []
    for kind, source in emitted.sources.items():
        collectives = Counter(
            name.removesuffix("_out").removesuffix("_") for name in _COLLECTIVE.findall(source)
        )
        waits = collectives.pop("wait_tensor", 0)
        parts = [f"{len(_KERNEL.findall(source))} Triton kernels"]
        parts += [f"{count} {name}" for name, count in sorted(collectives.items())]
        lines.append(f"{kind}: {', '.join(parts)}, {waits} waits")
    return "\n".join(lines)
