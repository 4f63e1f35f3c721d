"""Build and load the C++ part without which torch refuses fake CUDA tensors where there is no GPU.

Owns: finding out whether there is a GPU, the compiler call, the cached library. It must run before torch is imported,
in a process of its own that ends afterwards. Must not know what is compiled.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("no_gpu.cpp")
COMPILER = "g++"


class GuardError(RuntimeError):
    """The guard cannot be built or loaded; the text says what to change."""


def count_gpus() -> int:
    """GPUs that CUDA's driver offers to this process, without torch; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def install_guard() -> None:
    """Let fake CUDA tensors be used in this process, in which no real one can be used from then on.

    Raises:
        GuardError: there is a GPU, torch is imported already, or no library could be built.
    """
    if count_gpus():
        raise GuardError(
            "there is a GPU, which a CUDA build of torch uses as it is; hide it with CUDA_VISIBLE_DEVICES='' to write "
            "code for another"
        )
    if "torch" in sys.modules:
        raise GuardError("torch is imported already: install the guard first, in a process of its own")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    library = build_guard(root)
    for name in ("libtorch_global_deps.so", "libtorch.so"):
        ctypes.CDLL(str(root / "lib" / name), ctypes.RTLD_GLOBAL)
    pretend = ctypes.CDLL(str(library)).simplefsdp_pretend_cuda
    pretend.restype = ctypes.c_bool
    if not pretend():
        raise GuardError("torch has asked about CUDA before the guard was there")


def build_guard(torch_root: Path) -> Path:
    """Compile the library for an installed torch, once; returns where it lies.

    Args:
        torch_root: torch's directory.

    Raises:
        GuardError: there is no compiler, or it fails.
    """
    key = hashlib.sha256(SOURCE.read_bytes() + (torch_root / "version.py").read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simplefsdp"
    library = folder / f"no_gpu_{key}.so"
    if library.exists():
        return library
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise GuardError(f"{COMPILER} is not installed; torch needs a small C++ part where there is no GPU")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [
        compiler,
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        "-w",
        f"-I{torch_root / 'include'}",
        str(SOURCE),
    ]
    command += ["-o", str(unfinished), f"-L{torch_root / 'lib'}", "-lc10", "-ltorch_cpu"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        reason = next(
            (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-500:]
        )
        raise GuardError(f"{COMPILER} cannot build the C++ part for torch's headers: {reason}")
    unfinished.replace(library)  # another process may build the same
    return library
