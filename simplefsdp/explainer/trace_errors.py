"""A model that cannot be traced: where, and why, in one line.

Owns the reduction of torch's long errors to a place in the user's code and a reason.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

_USER_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_INNER = (Path(torch.__file__).parent, Path(__file__).parents[1])


class TraceError(RuntimeError):
    """A model cannot be traced; the text says where and why."""


@contextlib.contextmanager
def explain_failure(name: str) -> Iterator[None]:
    """Turn whatever tracing raises into a `TraceError`.

    Args:
        name: of the model.

    Raises:
        TraceError: with the innermost place in the user's code, and the first line of the reason.
    """
    try:
        yield
    except ValueError:
        raise  # an argument that is wrong says so itself
    except Exception as error:
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        place = _place(error)
        where = f" at {place}" if place else ""
        raise TraceError(f"{name} cannot be traced{where}: {reason}") from error


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
