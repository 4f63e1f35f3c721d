"""A model that cannot be built or traced: where, and why, in one line.

Owns the reduction of torch's long errors to a place in the user's code and a reason.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

import inductor_passes
from simplefsdp.llama.options import UsageError

_USER_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_INNER = (
    Path(torch.__file__).parent,
    Path(__file__).parents[1],
    Path(inductor_passes.__file__).parent,
)


class TraceError(RuntimeError):
    """A model cannot be built or traced; the text says where and why."""


@contextlib.contextmanager
def explain_failure(name: str, done: str = "traced") -> Iterator[None]:
    """Turn whatever is raised inside into a `TraceError`, except a `UsageError`, which says itself what to change.

    Args:
        name: of the model.
        done: what cannot be done with it.

    Raises:
        TraceError: with the innermost place in the user's code, and the first line of the reason.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Dynamo puts this line before what a backend has raised (torch 2.11 to 2.14).
        reason = next((line for line in lines if not line.startswith("backend=")), "")
        if not reason or isinstance(error, (LookupError, AssertionError, AttributeError, NameError)):
            reason = f"{type(error).__name__}: {reason}".rstrip(": ")  # the kind is half of what these say
        place = _place(error)
        where = f" at {place}" if place else ""
        raise TraceError(f"{name} cannot be {done}{where}: {reason}") from error


def _place(error: BaseException) -> str:
    """The innermost frame outside torch and this package: in Dynamo's text, which quotes the user's code, or on the
    stack."""
    frames = [(file, line) for file, line, _ in _USER_FRAME.findall(str(error))]
    frames += [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)]
    outside = [
        f"{file}:{line}"
        for file, line in frames
        if not any(parent in Path(file).parents for parent in _INNER) and not file.startswith("<")
    ]
    return outside[-1] if outside else ""
