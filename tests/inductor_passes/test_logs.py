"""What the passes say about themselves, where PyTorch users look for it: TORCH_LOGS and TORCH_TRACE."""

from __future__ import annotations

import json

import pytest

from tests.inductor_passes.test_caches import main_in_a_process


@pytest.mark.timeout(400)  # a busy machine starts processes slowly
def test_records_reach_torch_logs_and_torch_trace(tmp_path):
    trace = tmp_path / "trace"
    settings = {
        "TORCH_LOGS": "+inductor_passes",
        "TORCH_TRACE": str(trace),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    out = main_in_a_process("none", settings, timeout_s=380)
    expected = [
        ("reshard", "joint"),
        *((p, g) for g in ("forward", "backward") for p in ("bucket", "reorder")),
    ]
    for name, graph in expected:
        assert f"{name} pass, {graph} graph" in out.stderr
    assert "all_gather 0.weight" in out.stderr

    lines = [line for path in trace.glob("*.log") for line in path.read_text().splitlines()]
    entries = [json.loads(line[line.index("{") :]) for line in lines if line.startswith("V") and "{" in line]
    artifacts = [entry["artifact"]["name"] for entry in entries if "artifact" in entry]
    ours = [name for name in artifacts if name.startswith("inductor_passes_")]
    assert ours == [f"inductor_passes_{name}_{graph}" for name, graph in expected]
    payloads = [line.strip() for line in lines if line.startswith("\t")]
    assert any(line.startswith("reduce_scatter.avg 0.weight ") for line in payloads)
