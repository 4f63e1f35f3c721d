"""`simplefsdp plan --emit-triton`: the code of a GPU that is not there, and what is said where it cannot be written."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from simplefsdp.cli import main
from simplefsdp.llama.options import UsageError
from simplefsdp.planner.emit import guard, worker
from simplefsdp.planner.emit.code import emitted_codes
from simplefsdp.planner.emit.command import Emitted, check_free, save
from simplefsdp.planner.emit.gpus import GPUS, find_gpu
from simplefsdp.planner.emit.ptx import check_triton, find_triton, kernels_of, lower
from simplefsdp.planner.emit.worker import EmitRequest
from simplefsdp.planner.request import Request

STEP = [
    "--model",
    "debug",
    "--gpus",
    "16",
    "--seq",
    "64",
    "--local-batch",
    "2",
    "--layers",
    "1",
    "--ac",
    "full",
]


@pytest.mark.timeout(400)  # a process of its own, and on the first run a C++ file, on a busy machine
@pytest.mark.skipif(guard.count_gpus() > 0, reason="there is a GPU: nothing to pretend")
def test_the_code_of_forward_and_backward(tmp_path, capsys):
    assert main(["plan", *STEP, "--hardware", "a100", "--emit-triton", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "for NVIDIA A100-SXM4-80GB (sm_80), which is not there" in said
    forward, backward = ((tmp_path / "out" / f"{kind}.py").read_text() for kind in ("forward", "backward"))
    for code in (forward, backward):
        assert code.splitlines()[1].startswith("# Written by TorchInductor: torch ")
        assert "'cc': 80" in code or "cc=80" in code
        assert len(kernels_of(code)) > 2
        compile(code, "emitted", "exec")
        for name, text in kernels_of(code).items():
            assert f"def {name}(" in text
            compile(text, name, "exec")
    assert "_c10d_functional.all_gather_into_tensor" in forward
    assert "_c10d_functional.reduce_scatter_tensor" in backward
    assert "_scaled_dot_product_flash_attention.default(" in forward
    assert "_scaled_dot_product_flash_attention_backward.default(" in backward
    assert "for_cpu" not in forward


def test_a_request_travels_as_text_without_torch():
    step = Request("debug", 64, 1, 2, "full", 16, 8, "bf16", 4.0, True, False, "auto")
    request = EmitRequest(step, "h100_sxm", "h100_sxm", lower=True)
    program = (
        "import sys\n"
        "import simplefsdp.planner.emit.command\n"
        "from simplefsdp.planner.emit.worker import EmitRequest\n"
        "print(EmitRequest.from_json(sys.stdin.read()))\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=request.to_json(), check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{request}\n"), done.stderr


def test_hardware_without_a_gpu_is_refused(tmp_path, capsys):
    assert main(["plan", *STEP, "--hardware", "cpu", "--emit-triton", str(tmp_path)]) == 2
    assert "--hardware cpu is none of a100_sxm, h100_sxm, h200_sxm, b200_sxm" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["plan", *STEP, "--emit-triton", str(tmp_path / "file" / "out")]) == 2
    assert capsys.readouterr().err.endswith("file/out: Not a directory\n")


def test_files_of_others_are_not_replaced(tmp_path, capsys):
    (tmp_path / "backward.py").write_text("# mine\n")
    assert main(["plan", *STEP, "--hardware", "a100", "--emit-triton", str(tmp_path)]) == 2
    assert "backward.py is there, and this command has not written it" in capsys.readouterr().err
    assert (tmp_path / "backward.py").read_text() == "# mine\n"


def test_nothing_of_an_earlier_call_stays(tmp_path):
    kernels = {"forward": {"triton_a": "a"}, "backward": {"triton_b": "b"}}
    full = Emitted({"forward": "x = 1\n", "backward": "y = 1\n"}, kernels, "2.13", "a GPU", "flash", None)
    assert len(save(full, "a model", tmp_path)) == 4
    (tmp_path / "backward_ptx" / "notes.txt").write_text("mine")
    check_free(tmp_path)
    few = dataclasses.replace(full, sources={"forward": "x = 2\n"}, ptx={})
    assert save(few, "a model", tmp_path) == [tmp_path / "forward.py"]
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["backward_ptx/notes.txt", "forward.py"]
    assert not (tmp_path / "forward_ptx").exists()
    assert (tmp_path / "forward.py").read_text().endswith("x = 2\n")


def test_a_real_gpu_and_an_imported_torch_refuse_the_guard(monkeypatch):
    monkeypatch.setattr(guard, "count_gpus", lambda: 1)
    with pytest.raises(guard.GuardError, match="there is a GPU"):
        guard.install_guard()
    monkeypatch.setattr(guard, "count_gpus", lambda: 0)
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", types.ModuleType("torch")))
    with pytest.raises(guard.GuardError, match="torch is imported already"):
        guard.install_guard()


def test_gpus_are_counted_by_the_driver(monkeypatch):
    class Driver:
        status = 0

        def cuInit(self, flags):
            return self.status

        def cuDeviceGetCount(self, count):
            count._obj.value = 3
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert guard.count_gpus() == 3
    Driver.status = 100  # CUDA_ERROR_NO_DEVICE
    assert guard.count_gpus() == 0


def test_without_a_compiler_the_guard_says_so(monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("none such")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(guard.shutil, "which", lambda name: None)
    with pytest.raises(guard.GuardError, match="g\\+\\+ is not installed"):
        guard.build_guard(tmp_path)


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("none such")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failed = subprocess.CompletedProcess(
        [], 1, stdout="", stderr="in file\nno_gpu.cpp:9: fatal error: gone\n"
    )
    monkeypatch.setattr(guard.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(guard.GuardError, match=r"no_gpu.cpp:9: fatal error: gone"):
        guard.build_guard(tmp_path)
    assert not list(Path(tmp_path, "simplefsdp").glob("*.so"))


def test_kernels_are_taken_out_of_a_source():
    source = (
        "triton_a = async_compile.triton('triton_a', '''\nx = \\'\\'\\'text\\'\\'\\'\n''', device_str='cuda')\n"
        "other = 1\n"
        "triton_b = async_compile.triton('triton_b', '''\ny = 2\n''', device_str='cuda')\n"
    )
    assert kernels_of(source) == {"triton_a": "x = '''text'''\n", "triton_b": "y = 2\n"}
    assert kernels_of("cpp_a = async_compile.cpp_pybinding([], '''\nint x;\n''')\n") == {}


class Gate(nn.Module):
    """A kernel that multiplies and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return torch.sigmoid(x * self.weight).sum(-1)


def codes_of_a_gate(gpus):
    codes = emitted_codes(Gate(), (torch.ones(8, 64),), options={}, targets=gpus)
    return [code["forward"] for code in codes]


def test_each_gpu_gets_code_of_its_own():
    codes = codes_of_a_gate([GPUS["a100_sxm"], GPUS["h100_sxm"], GPUS["a100_sxm"]])
    assert ["cc=80" in code or "'cc': 80" in code for code in codes] == [True, False, True]
    assert ["cc=90" in code or "'cc': 90" in code for code in codes] == [False, True, False]


def lower_a_gate():
    """PTX by kernel for an A100 and an H100, as JSON on standard output; Triton keeps the device it was told of."""
    gpus = [GPUS[name] for name in ("a100_sxm", "h100_sxm")]
    json.dump([lower(code, gpu) for code, gpu in zip(codes_of_a_gate(gpus), gpus, strict=True)], sys.stdout)


@pytest.mark.timeout(400)
def test_kernels_are_lowered_for_the_gpu_that_was_named():
    pytest.importorskip("triton")
    program = f"from {__name__} import lower_a_gate; lower_a_gate()"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for lowered, target in zip(json.loads(done.stdout), ("sm_80", "sm_90a"), strict=True):
        ((name, text),) = lowered.items()
        assert name.startswith("triton_")
        assert f".target {target}\n" in text
        assert f".visible .entry {name}(" in text


@pytest.mark.skipif(guard.count_gpus() > 0, reason="there is a GPU: nothing to pretend")
def test_without_triton_kernels_are_not_lowered_and_the_user_reads_why(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert find_triton() is None
    with pytest.raises(UsageError, match=r"^--emit-ptx needs Triton: pip install triton$"):
        check_triton()
    monkeypatch.setattr(worker, "install_guard", lambda: None)
    step = Request("debug", 64, 1, 2, "full", 16, 8, "bf16", 4.0, True, False, "auto")
    answer = worker._serve(EmitRequest(step, "h100_sxm", "h100_sxm", lower=True))
    assert answer == {"error": "--emit-ptx needs Triton: pip install triton", "usage": True}


def test_a_gpu_is_found_by_the_profile_of_its_hardware():
    assert find_gpu("h100_sxm") == find_gpu("/somewhere/h100_96gb.json") == "h100_sxm"
    assert find_gpu("cpu_gloo") is None
    assert [gpu.capability for gpu in GPUS.values()] == [80, 90, 90, 100]
