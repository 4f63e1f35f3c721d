"""Whole scripts, from the command to the file, with tiny models and nothing compiled."""

from __future__ import annotations

import pytest
import torch

from benchmarks import compile_cost, gpu_overlap, memory, train_step
from benchmarks.contestants import Setting, contestants
from benchmarks.names import CONTESTANTS
from benchmarks.prediction import Outlook
from benchmarks.rounds import in_turn, not_reached, reason_of
from benchmarks.workload import Workload
from simplefsdp.llama.config import get_config

# Processes that import torch: seconds on an idle machine, minutes on a busy one.
pytestmark = pytest.mark.timeout(600)

SMALL = ["--layers", "1", "--dim", "64", "--ffn-dim", "64", "--vocab-size", "64", "--sequence", "8"]


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile does nothing, in processes too."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_training_steps_are_measured_side_by_side(uncompiled, monkeypatch, tmp_path):
    # They trace, which `uncompiled` forbids.
    monkeypatch.setattr(train_step, "Schedules", lambda *arguments: None)
    monkeypatch.setattr(train_step, "predict", lambda *arguments: Outlook((), 1.25))
    out = tmp_path / "steps.md"
    arguments = ["--profile", "cpu_gloo", "--rounds", "2", "--steps", "1", "--out", str(out), *SMALL]
    assert train_step.main([*arguments, "--only", "DDP", "FSDP2 eager", "ours, eager"]) == 0
    text = out.read_text()
    losses = {cells(text, name)[5] for name in ("DDP", "FSDP2 eager", "ours, eager")}
    assert len(losses) == 1
    assert float(losses.pop()) > 0
    assert float(cells(text, "optimizer alone")[1]) < float(cells(text, "ours, eager")[1])
    assert "ours, auto was not measured" in text
    assert "No contestant of this run has a prediction." in text
    assert "no plan takes less than 1.250 s" in text
    assert (tmp_path / "steps.png").stat().st_size > 1000
    assert "--only DDP 'FSDP2 eager' 'ours, eager'`" in text


def test_memory_is_that_of_parameters_states_gradients_and_buckets(uncompiled, tmp_path):
    out = tmp_path / "memory.md"
    wide = ["--layers", "2", "--dim", "256", "--ffn-dim", "512", "--vocab-size", "64", "--sequence", "8"]
    assert memory.main(["--ranks", "1", "--out", str(out), *wide, "--only", "DDP"]) == 0
    text = out.read_text()
    tensors, process = map(float, cells(text, "DDP")[1:])
    # Parameters, two states of Adam, gradients, and DDP's copy of the gradients; activations are few.
    parameters = Workload(dim=256, layers=2, ffn_dim=512, vocab_size=64).config().n_parameters
    assert tensors == pytest.approx(5 * 4 * parameters / 2**20, rel=0.05)
    assert process > tensors
    assert "a block has 2.5 MiB" in text


def test_a_rehearsal_of_the_gpu_script_gives_the_numbers_of_the_whole_model(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    out = tmp_path / "gpu.md"
    arguments = ["--rehearse", "--profile", "cpu_gloo", "--ranks", "4", "--out", str(out), "--rounds", "1"]
    assert gpu_overlap.main([*arguments, "--only", "FSDP2 eager", "ours, eager"]) == 0
    text = out.read_text()
    rows = [cells(text, name) for name in ("compute alone", "FSDP2 eager", "ours, eager")]
    assert len({row[8] for row in rows}) == 1
    assert rows[1][9] == rows[2][9] != rows[1][8]
    assert all(float(row[10]) < 1e-5 for row in rows)
    assert all(float(row[5]) > 0 for row in rows[1:])
    assert "failed" not in text
    parameters = gpu_overlap.REHEARSAL.config().n_parameters
    assert f"- Llama of {parameters:,} parameters (1 layers, width 64), fp32\n" in text
    assert "- 1 rounds of 1 steps" in text


def test_the_gpu_trains_layers_of_the_8b_model():
    ours, known = gpu_overlap.WORKLOAD.config(), get_config("8b")
    for name in ("dim", "n_heads", "n_kv_heads", "ffn_dim"):
        assert getattr(ours, name) == getattr(known, name)
    usual = Workload().config()
    assert usual.n_heads == usual.n_kv_heads == usual.dim // 64


@pytest.mark.parametrize("script", [train_step, memory, gpu_overlap, compile_cost])
def test_an_unknown_contestant_is_refused_before_anything_is_measured(script, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.main(["--only", "ours,auto"])
    assert "'ours, auto'" in capsys.readouterr().err
    assert list(CONTESTANTS) == [item.name for item in contestants(Setting(True, "cpu_gloo"))]


def test_everybody_begins_a_round_in_turn():
    assert [in_turn(["a", "b", "c"], turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_why_somebody_dropped_out_takes_a_line():
    assert reason_of(ValueError("\n no such thing\nmore")) == "ValueError: no such thing"
    assert reason_of(AssertionError()) == "AssertionError: "
    assert not_reached(60.4) == "not set up: the limit of 60 s had passed"


def test_a_gradient_that_is_off_shows():
    ones = [torch.ones(3), torch.ones(1)]
    assert gpu_overlap._relative_error([torch.ones(3), 2 * torch.ones(1)], ones) == pytest.approx(0.5)
