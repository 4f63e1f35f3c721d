"""The training loop on real ranks: what it computes, saves, continues and refuses, and how it stops."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from simplefsdp.llama.config import LlamaConfig
from simplefsdp.llama.hf import save_hf
from simplefsdp.llama.metrics import TrainRecord, read_history
from simplefsdp.llama.model import Llama
from simplefsdp.llama.options import TrainOptions, UsageError
from simplefsdp.llama.reporter import Reporter
from simplefsdp.llama.rundir import METRICS_FILE
from simplefsdp.llama.schedule import Schedule
from simplefsdp.llama.trainer import NonFiniteError, Outcome, Trainer
from simplefsdp.llama.world import World
from tests.helpers.pool import WorkerPool

Workers = Callable[[int], WorkerPool]
Start = Callable[..., list["Run"]]

TINY = LlamaConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=32, vocab_size=260, max_seq_len=64)
RUN_TIMEOUT_S = 150.0

BASE: dict[str, Any] = {
    "compile": False,
    "seq_len": 16,
    "local_batch": 4,
    "steps": 4,
    "lr": 1e-2,
    "warmup": 0,
    "eval_every": 0,
    "checkpoint_every": 0,
    "tensorboard": False,
    "device": "cpu",
}


@dataclass(frozen=True)
class Run:
    """What a run left on one rank: how it ended, what it reported, the whole parameters."""

    outcome: Outcome | None
    step: int
    error: str
    notes: tuple[str, ...]
    records: tuple[TrainRecord, ...]
    parameters: dict[str, torch.Tensor]

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]

    @property
    def norms(self) -> list[float]:
        return [record.grad_norm for record in self.records]


class _Collecting(Reporter):
    """Keeps what it is told; writes files too if it has a directory."""

    def __init__(self, directory: Path | None) -> None:
        super().__init__(directory=directory)
        self.notes: list[str] = []
        self.records: list[TrainRecord] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def train(self, record: TrainRecord, *, final: bool) -> None:
        super().train(record, final=final)
        self.records.append(record)


def train(
    rank: int,
    world_size: int,
    directory: Path,
    changes: dict[str, Any],
    prepare: Callable[[Trainer], None] | None = None,
    stop_in_step: int | None = None,
    writes: bool = False,
) -> Run:
    """Runs on every rank: one whole run; an error meant for the user is part of the result.

    Args:
        directory: of the run.
        changes: options that differ from `BASE`.
        prepare: called with the trainer before it trains.
        stop_in_step: the last rank, and no other, is asked to stop in this step.
        writes: whether rank 0 writes metrics and the picture.
    """
    reporter = _Collecting(directory if writes and rank == 0 else None)
    trainer: Trainer | None = None

    def stop_requested() -> bool:
        return rank == world_size - 1 and trainer is not None and trainer.step + 1 == stop_in_step

    outcome, error = None, ""
    try:
        trainer = Trainer(
            TrainOptions(**{**BASE, **changes}),
            World(rank, world_size, torch.device("cpu")),
            directory,
            reporter,
            stop_requested=stop_requested,
        )
        if prepare is not None:
            prepare(trainer)
        outcome = trainer.train()
    except (UsageError, NonFiniteError) as mistake:
        error = f"{type(mistake).__name__}: {mistake}"
    step, parameters = 0, {}
    if trainer is not None:
        step = trainer.step
        parameters = {name: p.detach().full_tensor().clone() for name, p in trainer.model.named_parameters()}
    return Run(outcome, step, error, tuple(reporter.notes), tuple(reporter.records), parameters)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model much smaller than the debug one, as weights to start from."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    save_hf(Llama(TINY), directory)
    return directory


@pytest.fixture
def start(workers: Workers, tmp_path: Path, tiny: Path) -> Start:
    """`start(ranks, name, option=value, ...)` runs the tiny model in a directory of that name; a `Run` per rank."""

    def run(
        world_size: int,
        name: str,
        *,
        prepare: Callable[[Trainer], None] | None = None,
        stop_in_step: int | None = None,
        writes: bool = False,
        **changes: Any,
    ) -> list[Run]:
        arguments = (tmp_path / name, {"hf": tiny, **changes}, prepare, stop_in_step, writes)
        return workers(world_size).run(train, *arguments, timeout=RUN_TIMEOUT_S)

    return run


def assert_same_parameters(left: Run, right: Run) -> None:
    assert left.parameters.keys() == right.parameters.keys()
    for name, parameter in left.parameters.items():
        assert torch.equal(parameter, right.parameters[name]), name


# -- what a run does


def test_a_run_learns_and_all_ranks_report_the_same(start: Start, tmp_path: Path) -> None:
    first, second = start(2, "run", steps=8, eval_every=4, writes=True)
    assert first.outcome is Outcome.FINISHED
    assert first.step == 8
    assert first.losses[0] == pytest.approx(math.log(260), abs=0.1)
    assert first.losses[-1] < first.losses[0] - 0.3
    assert first.losses == second.losses
    assert first.norms == second.norms
    assert_same_parameters(first, second)
    schedule = Schedule(1e-2, 8)
    assert [record.lr for record in first.records] == [schedule.lr(step) for step in range(1, 9)]
    assert [record.tokens for record in first.records] == [128 * step for step in range(1, 9)]

    history = read_history(tmp_path / "run" / METRICS_FILE)
    assert history.train == first.records
    assert [record.step for record in history.evals] == [4, 8]
    assert history.evals[1].loss < history.evals[0].loss
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    begun = json.loads((tmp_path / "run" / METRICS_FILE).read_text().splitlines()[0])
    assert (begun["kind"], begun["world_size"], begun["options"]["lr"]) == ("run", 2, 1e-2)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == [], "checkpoints are off"


def test_initial_weights_and_loss_do_not_depend_on_the_ranks(start: Start) -> None:
    # The debug model, so that the weights are drawn here. The mean over two ranks is that of one with twice the batch.
    together = start(2, "two", hf=None, steps=2)[0]
    alone = start(1, "one", hf=None, steps=2, local_batch=8)[0]
    assert together.losses == pytest.approx(alone.losses, rel=1e-5)
    assert together.norms == pytest.approx(alone.norms, rel=1e-4)


def test_compiled_steps_are_the_same(start: Start) -> None:
    eager = start(2, "eager", steps=3, eval_every=2)[0]
    compiled = start(2, "compiled", steps=3, eval_every=2, compile=True, compile_backend="aot_eager")[0]
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert any(note.startswith("compiled in ") for note in compiled.notes)
    assert not any(note.startswith("compiled in ") for note in eager.notes)


@pytest.mark.parametrize("sync", ["last", "every"])
def test_accumulation_is_a_larger_batch(start: Start, sync: str) -> None:
    whole = start(2, "whole", steps=3, local_batch=6)[0]
    parts = start(2, "parts", steps=3, local_batch=2, accumulation=3, accumulation_sync=sync)[0]
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    assert parts.norms == pytest.approx(whole.norms, rel=1e-4)


def test_evaluating_leaves_training_alone(start: Start) -> None:
    # Both hold out the same text; only one looks at it in between.
    rarely = start(2, "rarely", eval_every=100)[0]
    often = start(2, "often", eval_every=1)[0]
    assert often.losses == rarely.losses
    assert_same_parameters(often, rarely)


def _use_sgd(trainer: Trainer) -> None:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)  # type: ignore[assignment]


def test_clipping_bounds_the_update_and_reports_the_norm_before(start: Start) -> None:
    options: dict[str, Any] = {"steps": 1, "schedule": "constant", "prepare": _use_sgd}
    before = start(2, "before", **options, lr=1e-30)[0]
    free = start(2, "free", **options, clip=0.0)[0]
    clipped = start(2, "clipped", **options, clip=0.01)[0]
    assert clipped.norms == free.norms
    assert free.norms[0] > 0.02
    moved = [
        math.sqrt(sum(float((run.parameters[n] - p).square().sum()) for n, p in before.parameters.items()))
        for run in (free, clipped)
    ]
    assert moved == pytest.approx([1e-2 * free.norms[0], 1e-2 * 0.01], rel=1e-2)


def test_norms_do_not_decay(workers: Workers, tmp_path: Path) -> None:
    assert workers(1).run(_decay_by_dimensions, tmp_path)[0] == {(2, 0.3), (1, 0.0)}


def _decay_by_dimensions(rank: int, world_size: int, directory: Path) -> set[tuple[int, float]]:
    options = TrainOptions(**{**BASE, "weight_decay": 0.3})
    trainer = Trainer(options, World(rank, world_size, torch.device("cpu")), directory, Reporter())
    return {(p.ndim, g["weight_decay"]) for g in trainer.optimizer.param_groups for p in g["params"]}


MEMORY_OPTIONS: dict[str, Any] = {
    "sharding_factor": 1,
    "reshard_after_forward": False,
    "activation_checkpointing": "selective",
}


@pytest.mark.parametrize("option", MEMORY_OPTIONS)
def test_memory_options_do_not_change_the_numbers(start: Start, option: str) -> None:
    plain = start(2, "plain", steps=2)[0]
    changed = start(2, "changed", steps=2, **{option: MEMORY_OPTIONS[option]})[0]
    assert changed.losses == pytest.approx(plain.losses, rel=1e-6)


def test_bf16_computes_in_bf16_and_stores_in_fp32(start: Start) -> None:
    exact = start(2, "fp32", steps=2)[0]
    rounded = start(2, "bf16", steps=2, precision="bf16")[0]
    assert rounded.losses != exact.losses
    assert rounded.losses == pytest.approx(exact.losses, abs=0.05)
    assert {parameter.dtype for parameter in rounded.parameters.values()} == {torch.float32}


# -- stopping and going on


@pytest.mark.parametrize("compiled", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    start: Start, tmp_path: Path, compiled: bool
) -> None:
    options: dict[str, Any] = {"steps": 6, "clip": 0.02, "accumulation": 2}
    options |= {"compile": compiled, "compile_backend": "aot_eager"}
    through = start(2, "through", **options)[0]
    options["checkpoint_every"] = 100
    stopped = start(2, "halves", **options, stop_in_step=3, writes=True)
    assert [run.outcome for run in stopped] == [Outcome.STOPPED] * 2, "one rank was asked, all stop"
    assert [run.step for run in stopped] == [3, 3]
    assert any(note.startswith("asked to stop: saved step 3 of 6") for note in stopped[0].notes)
    resumed = start(2, "halves", **options, resume=True, writes=True)[0]
    assert resumed.notes[0] == "resumed after step 3"
    assert stopped[0].losses + resumed.losses == through.losses
    assert stopped[0].norms + resumed.norms == through.norms
    assert_same_parameters(resumed, through)
    assert [
        record.loss for record in read_history(tmp_path / "halves" / METRICS_FILE).train
    ] == through.losses
    assert resumed.records[-1].tokens == through.records[-1].tokens


def test_a_run_goes_on_with_another_number_of_ranks(start: Start) -> None:
    through = start(2, "through", steps=6)[0]
    assert start(2, "changing", steps=6, checkpoint_every=100, stop_in_step=3)[0].step == 3
    resumed = start(1, "changing", steps=6, checkpoint_every=100, local_batch=8, resume=True)[0]
    assert resumed.losses == pytest.approx(through.losses[3:], rel=1e-4)
    assert not any("tokens per step" in note for note in resumed.notes)
    smaller = start(1, "changing", steps=7, checkpoint_every=100, resume=True)[0]
    assert "tokens per step were 128 and are 64 on 1 rank;" in smaller.notes[1]


def test_a_damaged_newest_checkpoint_is_reported_and_passed_over(start: Start, tmp_path: Path) -> None:
    through = start(2, "run", steps=6, checkpoint_every=2)[0]
    data = next((tmp_path / "run" / "checkpoints" / "step-000000006").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100])
    resumed = start(2, "run", steps=6, checkpoint_every=2, resume=True)[0]
    assert resumed.error == ""
    assert resumed.notes[0] == "resumed after step 4; 1 newer checkpoints are damaged"
    assert resumed.losses == through.losses[4:]


def test_resume_without_a_checkpoint_starts_afresh(start: Start) -> None:
    run = start(2, "run", steps=1, resume=True)[0]
    assert run.notes[0] == "no checkpoint yet: starting at step 1"
    assert run.step == 1


def test_resuming_a_finished_run_does_nothing(start: Start) -> None:
    before = start(2, "run", steps=2, checkpoint_every=2)[0]
    after = start(2, "run", steps=2, checkpoint_every=2, resume=True)[0]
    assert (after.outcome, after.step, after.records) == (Outcome.FINISHED, 2, ())
    assert_same_parameters(before, after)


# -- numbers that are none


def _poison_last_rank_in_step_3(trainer: Trainer) -> None:
    forward = trainer._forward

    def poisoned(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = forward(tokens, labels)
        return loss * math.nan if trainer.step == 2 and trainer.world.rank == trainer.world.size - 1 else loss

    trainer._forward = poisoned


def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_update(start: Start) -> None:
    good = start(2, "good", steps=2, schedule="constant")[0]
    options = {"schedule": "constant", "checkpoint_every": 1}
    for run in start(2, "bad", **options, prepare=_poison_last_rank_in_step_3):
        assert run.error.startswith("NonFiniteError: step 3: the loss on rank 1 is nan; stopped before")
        assert "newest checkpoint is of step 2" in run.error
        assert len(run.records) == 2
        assert_same_parameters(run, good)
    resumed = start(2, "bad", **options, resume=True)[0]
    assert (resumed.outcome, resumed.step) == (Outcome.FINISHED, 4)


def _infinite_gradient(trainer: Trainer) -> None:
    weight = trainer.model.lm_head._parameters["weight"]
    assert weight is not None
    weight.register_hook(lambda gradient: gradient * math.inf)


def test_a_gradient_that_is_not_finite_stops_too(start: Start) -> None:
    run = start(2, "run", prepare=_infinite_gradient)[0]
    assert run.error.startswith("NonFiniteError: step 1: the gradient norm is ")
    assert "there is no checkpoint" in run.error


# -- what is refused

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"sharding_factor": 3}, "--sharding-factor 3: must divide the 2 ranks, so one of 1, 2"),
    "backend": ({"compile": True, "compile_backend": "magic"}, "--compile-backend magic: torch.compile has "),
    "longer than the model": ({"seq_len": 65}, "--seq-len 65: the model attends to at most 64 tokens"),
    "longer than the data": ({"data": ("short.txt",)}, "train data"),
    "empty": ({"data": ("empty.txt",)}, "data is empty"),
    "not JSON": ({"data": ("broken.jsonl",)}, "broken.jsonl:1: not JSON"),
    "no tokenizer": ({"tokenizer": Path("broken.jsonl")}, "not a tokenizer.json"),
    "no Llama": ({"hf": Path("hf")}, "config.json"),
    "no weights": ({"hf": Path("weightless")}, "--hf"),
}


@pytest.fixture(scope="module")
def broken_inputs(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    (directory / "short.txt").write_text("short")
    (directory / "empty.txt").touch()
    (directory / "broken.jsonl").write_text("{broken\n")
    (directory / "hf").mkdir()
    (directory / "hf" / "config.json").write_text("{}")
    (directory / "weightless").mkdir()
    shutil.copy(tiny / "config.json", directory / "weightless")
    return directory


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_usage_errors_on_every_rank(start: Start, broken_inputs: Path, name: str) -> None:
    changes, message = MISTAKES[name]
    found = {
        option: tuple(str(broken_inputs / item) for item in value)
        if option == "data"
        else broken_inputs / value
        if isinstance(value, Path)
        else value
        for option, value in changes.items()
    }
    for run in start(2, "run", **found):
        assert run.error.startswith("UsageError: ")
        assert message in run.error
        assert "\n" not in run.error


def test_a_mistake_that_one_rank_sees_stops_all(workers: Workers) -> None:
    assert workers(2).run(_agree_on_the_last_ranks_mistake) == ["rank 1: no such file"] * 2


def _agree_on_the_last_ranks_mistake(rank: int, world_size: int) -> str:
    try:
        World(rank, world_size, torch.device("cpu")).agree("no such file" if rank == 1 else None)
    except UsageError as error:
        return str(error)
    return "no error"


def test_another_runs_checkpoints_and_data_are_not_taken_for_this_ones(start: Start) -> None:
    start(2, "run", steps=1, checkpoint_every=1)
    again = start(2, "run", steps=1, checkpoint_every=1)[0]
    assert "holds checkpoints of another run; continue it with --resume" in again.error
    for changes, message in (
        ({"seq_len": 8}, "seq_len was 16, is 8"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"hf": None}, "the checkpoint's model has dim 16, this one 128"),
    ):
        run = start(2, "run", **{"steps": 2, "checkpoint_every": 1, "resume": True, **changes})[0]
        assert run.error.startswith("UsageError: cannot resume: ")
        assert message in run.error


# -- Hugging Face weights in and out


def test_exported_weights_start_another_run(start: Start, tmp_path: Path) -> None:
    exported = start(2, "first", steps=2, export_hf=tmp_path / "hf")[0]
    imported = start(2, "second", steps=1, hf=tmp_path / "hf", lr=1e-30, weight_decay=0.0)[0]
    assert imported.error == ""
    assert_same_parameters(imported, exported)
