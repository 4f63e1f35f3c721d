"""Triton kernels of emitted code, lowered to PTX for a GPU that is not there.

Owns taking kernels out of a source, and Triton's idea of the device. Must not know models.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tempfile
from pathlib import Path
from typing import Any

from simplefsdp.llama.options import UsageError
from simplefsdp.planner.emit.gpus import Gpu

_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)'''", re.DOTALL | re.MULTILINE)


def kernels_of(source: str) -> dict[str, str]:
    """The Triton kernels of a source, by name: each the text of a module of its own."""
    return {name: text.replace("\\'\\'\\'", "'''") for name, text in _KERNEL.findall(source)}


def find_triton() -> str | None:
    """The version of the installed Triton, None where there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_triton() -> None:
    """Check that Triton is installed.

    Raises:
        UsageError: it is not.
    """
    if find_triton() is None:
        raise UsageError("--emit-ptx needs Triton: pip install triton")


def lower(source: str, gpu: Gpu) -> dict[str, str]:
    """Lower every kernel of a source, in its first configuration: which is fastest only the device can tell.

    Args:
        source: as TorchInductor wrote it.
        gpu: for which device.

    Returns:
        PTX by the kernel's name.
    """
    from simplefsdp.planner.emit import _compat

    out = {}
    with tempfile.TemporaryDirectory() as folder, _compat.posing_as(gpu), _compat.triton_for(gpu):
        for name, text in kernels_of(source).items():
            path = Path(folder) / f"{name}.py"
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module: Any = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            out[name] = _compat.compile_kernel(getattr(module, name))
    return out
