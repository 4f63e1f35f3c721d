"""Files of kernel times: what one compilation saw, for the next one to plan with.

Owns the format and the merge into a profile. Must not know graphs or torch::

    {"format": 1, "kernels": {"<kernel key>": 12345, ...}}

The times, in whole ns, are those of a profile's ``kernels``. A file is written by one process, entry by entry as graphs
compile, and replaced as a whole each time, so that a reader never sees half of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping

from inductor_passes.costs.profiles import HardwareProfile, is_count

FORMAT = 1


def load_kernels(path: str | os.PathLike[str]) -> dict[str, int]:
    """The times in a file; empty when there is none yet.

    Raises:
        ValueError: The file cannot be read or is of another format; the text names it.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"kernel costs {os.fspath(path)}: {error}") from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"kernel costs {os.fspath(path)}: not JSON: {error}; delete it to start anew"
        ) from error
    kernels = data.get("kernels") if isinstance(data, dict) and data.get("format") == FORMAT else None
    if not isinstance(kernels, dict) or not all(map(is_count, kernels.values())):
        raise ValueError(
            f'kernel costs {os.fspath(path)}: need "format": {FORMAT} and "kernels" of whole ns >= 0; delete it to '
            "start anew"
        )
    return kernels


def add_kernels(path: str | os.PathLike[str], kernels: Mapping[str, int]) -> None:
    """Add times to a file, which is created if need be. Those it holds already stay.

    Raises:
        ValueError: As of :func:`load_kernels`.
        OSError: The file cannot be written.
    """
    path = pathlib.Path(path)
    merged = {**kernels, **load_kernels(path)}
    text = json.dumps({"format": FORMAT, "kernels": dict(sorted(merged.items()))}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False
    ) as file:
        file.write(text + "\n")
    os.replace(file.name, path)


def with_kernels(profile: HardwareProfile, kernels: Mapping[str, int]) -> HardwareProfile:
    """The profile with more kernel times; the profile's own, which were measured, come first."""
    return dataclasses.replace(profile, kernels=dict(sorted({**kernels, **profile.kernels}.items())))
