"""`simplefsdp train --explain`: what the first rank writes before the first step; training goes on unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from simplefsdp.llama.hf import save_hf
from simplefsdp.llama.model import Llama
from simplefsdp.llama.trainer import EXPLAIN_DIRECTORY, Outcome
from tests.simplefsdp.test_trainer import RUN_TIMEOUT_S, TINY, Workers, train


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model much smaller than the debug one, as weights to start from."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    save_hf(Llama(TINY), directory)
    return directory


def test_the_first_rank_explains_and_the_run_trains_as_without(
    workers: Workers, tiny: Path, tmp_path: Path
) -> None:
    changes = {"hf": tiny, "steps": 2, "compile": True, "compile_backend": "aot_eager"}
    plain, _ = workers(2).run(train, tmp_path / "plain", changes, timeout=RUN_TIMEOUT_S)
    explained = {**changes, "explain": True}
    first, second = workers(2).run(train, tmp_path / "explained", explained, timeout=RUN_TIMEOUT_S)
    assert (first.outcome, second.outcome) == (Outcome.FINISHED, Outcome.FINISHED), first.error + second.error
    assert first.losses == second.losses == plain.losses
    note = next(line for line in first.notes if line.startswith("modelled on "))
    assert "forward" in note or "backward" in note
    assert not any(line.startswith("modelled on ") for line in second.notes), "the first rank alone"
    written = tmp_path / "explained" / EXPLAIN_DIRECTORY
    assert note.endswith(f"written to {written}")
    report = (written / "report.txt").read_text()
    assert "on 2 ranks" in report
    assert "layers.1.mlp.down_proj.weight" in report
    for name in (
        "schedule.html",
        "schedule.png",
        "trace.json",
        "forward.bucket.diff",
        "backward.bucket.diff",
    ):
        assert (written / name).is_file(), name


def test_a_run_that_is_not_compiled_has_nothing_to_explain(
    workers: Workers, tiny: Path, tmp_path: Path
) -> None:
    (only,) = workers(1).run(
        train, tmp_path, {"hf": tiny, "steps": 1, "explain": True}, timeout=RUN_TIMEOUT_S
    )
    assert only.outcome is Outcome.FINISHED
    assert "nothing to explain: the run is not compiled" in only.notes
    assert not (tmp_path / EXPLAIN_DIRECTORY).exists()
