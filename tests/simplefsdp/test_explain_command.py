"""`simplefsdp explain` as a user types it: what it writes, and what it says to mistakes."""

from __future__ import annotations

import pytest

from simplefsdp.cli import main

OWN_MODEL = """
import torch

def build():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)

def untraceable():
    class Bad(torch.nn.Linear):
        def forward(self, x):
            raise KeyError("nothing here")
    return Bad(4, 4), (torch.ones(2, 4),)

def wrong():
    return torch.nn.Linear(4, 4)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A directory with a module of the user's own, unique to the test."""
    name = f"own_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_own_model_writes_all_files(own, tmp_path, capsys):
    assert main(["explain", "--model", f"{own}:build", "--gpus", "4"]) == 0
    said = capsys.readouterr().out
    assert "modelled on h100_sxm: step" in said
    for name in ("report.txt", "schedule.html", "schedule.png", "trace.json", "forward.bucket.diff"):
        assert (tmp_path / "explain" / name).is_file(), name


def test_a_model_that_cannot_be_traced_says_where(own, tmp_path, capsys):
    assert main(["explain", "--model", f"{own}:untraceable", "--gpus", "4", "--no-png"]) == 1
    said = capsys.readouterr().err
    assert f"{own}:untraceable cannot be traced at {tmp_path / own}.py:10: " in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--model", "9b"], "--model 9b: unknown; there are debug, 1b, 8b, 70b, 405b"),
        (
            ["--hardware", "abacus"],
            "unknown hardware 'abacus'; there are h100, h100-96gb, h200, a100, b200, cpu",
        ),
        (["--gpus", "6", "--sharding-factor", "4"], "must divide --gpus 6; possible: 1, 2, 3, 6"),
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--seq", "4096"], "--seq 4096: debug attends to at most 1024 tokens"),
        (["--local-batch", "0"], "--local-batch 0: must be at least 1"),
        (["--model", "nowhere:build"], "cannot import 'nowhere'"),
        (["--modle", "8b"], "nrecognized"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(arguments, answer, capsys):
    assert main(["explain", *arguments]) == 2
    said = capsys.readouterr().err
    assert answer in said
    assert said.count("\n") == 1
    assert said.startswith("simplefsdp explain: error: ")


def test_a_function_that_returns_something_else_is_refused(own, capsys):
    assert main(["explain", "--model", f"{own}:wrong"]) == 2
    assert "must return (model, inputs), got Linear" in capsys.readouterr().err
    assert main(["explain", "--model", f"{own}:missing"]) == 2
    assert "has no function 'missing'" in capsys.readouterr().err
