"""The training loop.

Owns: the course of a run: steps, evaluations, checkpoints, resuming, what ends it. Must not know: how parts are
made (build.py), how ranks start and die (launch.py, watch.py), what is shown and written (reporter.py).

One optimizer step, on every rank alike:

    forward and backward per micro-batch     the compiled model; the collectives of sharding are inside
    gradient norm, clipping
    exchange                                 one small all-gather: loss, norm, memory, wish to stop
    anything not finite?                     all ranks stop, before the optimizer could be spoiled
    AdamW

The exchange is the only time per step at which the host waits for the device. Step times are taken there, from
one step's exchange to the next, so they need no further synchronisation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from simplefsdp import clip_grad_norm_, explain, no_sync
from simplefsdp.llama.build import Inputs, build_model, build_optimizer, count_ranks, describe, read_inputs
from simplefsdp.llama.checkpoint import (
    Checkpointer,
    CheckpointError,
    StateMismatchError,
    restore,
    restore_rng,
    rng_state,
    train_state,
)
from simplefsdp.llama.clock import StepClock
from simplefsdp.llama.data import Batch
from simplefsdp.llama.flops import flops_per_token, peak_flops
from simplefsdp.llama.hf import save_hf
from simplefsdp.llama.metrics import EvalRecord, TrainRecord
from simplefsdp.llama.options import TrainOptions, UsageError
from simplefsdp.llama.reporter import Reporter
from simplefsdp.llama.schedule import Schedule
from simplefsdp.llama.sources import DataError
from simplefsdp.llama.world import World

CHECKPOINT_DIRECTORY = "checkpoints"
EXPLAIN_DIRECTORY = "explain"


class NonFiniteError(RuntimeError):
    """Loss or gradients are infinite or not a number; the optimizer has not used them."""


class Outcome(enum.Enum):
    """How a run ended.

    Attributes:
        FINISHED: its last step is done.
        STOPPED: it was asked to stop, and can be resumed if checkpoints are on.
    """

    FINISHED = "finished"
    STOPPED = "stopped"


@dataclasses.dataclass(frozen=True)
class StepNumbers:
    """What the ranks exchanged at the end of a step.

    Args:
        loss: mean over all ranks.
        grad_norm: of the whole gradient, before clipping.
        peak_memory_bytes: of the rank that used most.
        stop: whether any rank was asked to stop.
    """

    loss: float
    grad_norm: float
    peak_memory_bytes: int
    stop: bool


class Trainer:
    """One run on one rank.

    Constructing and `train` are collective.

    Args:
        options: checked options.
        world: this rank among the ranks.
        directory: of the run; the same on all ranks, made by rank 0.
        reporter: shows and writes; silent on all ranks but 0.
        stop_requested: whether this rank has been asked to stop; read once a step.
        step_done: told the number of each step that is done.

    Attributes:
        step: optimizer steps done.
        model: the sharded model.
        optimizer: over its shards.

    Raises:
        UsageError: on every rank, if the options do not fit the data, the ranks, or the checkpoint to resume.
    """

    def __init__(
        self,
        options: TrainOptions,
        world: World,
        directory: Path,
        reporter: Reporter,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        step_done: Callable[[int], object] = lambda step: None,
    ) -> None:
        self.options, self.world, self.directory = options, world, directory
        self.recipe = options.recipe
        self.step = 0
        self._tokens = 0
        self._reporter = reporter
        self._stop_requested = stop_requested
        self._step_done = step_done
        self._clock = StepClock(world.synchronize)
        self._first_step_s: float | None = None
        self._compile_s: float | None = None
        self._inputs = _read_inputs_on_all_ranks(options, world)
        self._tokens_per_step = self._inputs.train.global_batch * self.recipe.seq_len
        self._schedule = Schedule(
            self.recipe.lr, self.recipe.steps, self.recipe.warmup, options.schedule, options.min_lr_ratio
        )
        self.model = build_model(options, self._inputs.config, world)
        self.optimizer = build_optimizer(options, self.model)
        self._flops_per_token = flops_per_token(self._inputs.config, self.recipe.seq_len)
        self._peak_flops = peak_flops(world.device)
        self._checkpoints = self._open_checkpoints()
        notes = self._resume() if options.resume else []
        self._forward: Callable[[Tensor, Tensor], Tensor] = self.model
        if options.compile:
            self._forward = torch.compile(
                self.model, fullgraph=True, dynamic=False, backend=options.compile_backend
            )
        facts = describe(options, self._inputs, world) | {"output": str(directory)}
        reporter.begin(facts, {"options": options.to_json(), "world_size": world.size}, self.step)
        for note in notes:
            reporter.note(note)
        if options.explain and world.is_main:
            reporter.note(self._explain())

    def train(self) -> Outcome:
        """Trains to the last step, or until a rank is asked to stop.

        Returns:
            How it ended; both ways leave a checkpoint of the last step done, unless checkpoints are off.

        Raises:
            NonFiniteError: on every rank, before the optimizer step; checkpoints of earlier steps are complete.
            CheckpointError: on every rank, if a checkpoint cannot be written.
        """
        outcome = Outcome.FINISHED
        with self._checkpoints, contextlib.closing(self._reporter):
            self._clock.start()
            if self.step < self.recipe.steps:
                for batch in self._inputs.train:
                    if self._train_step(batch).stop:
                        outcome = Outcome.STOPPED
                    self._evaluate_if_due(outcome)
                    self._save_if_due(outcome)
                    if self.step == self.recipe.steps or outcome is Outcome.STOPPED:
                        break
            if outcome is Outcome.FINISHED and self.options.export_hf is not None:
                save_hf(self.model, self.options.export_hf)
                self._reporter.note(f"weights exported to {self.options.export_hf}")
        self._conclude(outcome)
        return outcome

    def _explain(self) -> str:
        """Writes the passes' report on rank 0, without running the model; returns what to tell the user."""
        if not self.options.compile:
            return "nothing to explain: the run is not compiled"
        shape = (self.recipe.local_batch, self.recipe.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.world.device)
        try:
            report = explain(self.model, tokens, tokens, title=f"Llama {self.options.run_name}")
            report.save(self.directory / EXPLAIN_DIRECTORY)
        except Exception as error:  # a run must not end because a picture of it could not be drawn
            return f"cannot explain: {type(error).__name__}: {error}"
        return f"{report.verdict}\n  written to {self.directory / EXPLAIN_DIRECTORY}"

    def _train_step(self, batch: Batch) -> StepNumbers:
        step = self.step + 1
        is_first = self._first_step_s is None
        if is_first:
            self._reporter.compiling(self.options.compile)
        lr = self._schedule.lr(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._forward_backward(*batch)
        norm = clip_grad_norm_(self.model.parameters(), self.options.clip or math.inf)
        numbers = self._exchange(step, loss, norm)
        step_time_s = self._clock.lap()
        self.optimizer.step()
        self.optimizer.zero_grad()

        self.step = step
        self._step_done(step)
        self._tokens += self._tokens_per_step
        tokens_per_s = None if is_first else self._tokens_per_step / step_time_s
        record = TrainRecord(
            step=step,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
            lr=lr,
            tokens=self._tokens,
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_s,
            mfu=self._utilisation(tokens_per_s),
            peak_memory_bytes=numbers.peak_memory_bytes,
        )
        self._account_for_compilation(step_time_s)
        self._reporter.train(record, final=step == self.recipe.steps or numbers.stop)
        return numbers

    def _forward_backward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Runs all micro-batches; returns this rank's mean loss, a 0-dim tensor on the device."""
        count = self.options.accumulation
        total = torch.zeros((), device=self.world.device)
        micro_batches = zip(tokens.chunk(count), labels.chunk(count), strict=True)
        for number, (micro_tokens, micro_labels) in enumerate(micro_batches, start=1):
            is_deferred = number < count and self.options.accumulation_sync == "last"
            with no_sync(self.model) if is_deferred else contextlib.nullcontext():
                loss = self._loss(micro_tokens, micro_labels)
                torch.autograd.backward(loss / count)
            total += loss.detach()
        return total / count

    def _loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        device = self.world.device
        return self._forward(tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True))

    def _exchange(self, step: int, loss: Tensor, norm: Tensor) -> StepNumbers:
        """Exchanges the step's numbers between the ranks, and stops all of them if one is not finite."""
        host = torch.tensor(
            [float(self.world.peak_memory_bytes()), float(self._stop_requested())], dtype=torch.float64
        )
        rows = self.world.gather_numbers(
            torch.cat((torch.stack((loss, norm)).double(), host.to(loss.device)))
        )
        losses, norms, memory, stops = zip(*rows, strict=True)
        for rank, rank_loss in enumerate(losses):
            if not math.isfinite(rank_loss):
                self._fail(step, f"the loss on rank {rank} is {rank_loss}")
        # Equal on all ranks unless something is very wrong; one bad value is enough.
        for rank_norm in norms:
            if not math.isfinite(rank_norm):
                self._fail(step, f"the gradient norm is {rank_norm}")
        return StepNumbers(statistics.fmean(losses), norms[0], int(max(memory)), any(stops))

    def _fail(self, step: int, what: str) -> NoReturn:
        self._checkpoints.wait()
        saved = self._checkpoints.latest_step()
        left = "there is no checkpoint" if saved is None else f"the newest checkpoint is of step {saved}"
        raise NonFiniteError(
            f"step {step}: {what}; stopped before the optimizer step, {left}; "
            "a lower --lr, a longer --warmup or --precision fp32 may help"
        )

    def _utilisation(self, tokens_per_s: float | None) -> float | None:
        if tokens_per_s is None or self._peak_flops is None:
            return None
        return tokens_per_s * self._flops_per_token / (self._peak_flops * self.world.size)

    def _account_for_compilation(self, step_time_s: float) -> None:
        """Takes compile time as what the first step took longer than the second."""
        if self._first_step_s is None:
            self._first_step_s = step_time_s
            self._reporter.compiling(False)
        elif self._compile_s is None and self.options.compile:
            self._compile_s = max(0.0, self._first_step_s - step_time_s)
            self._reporter.compiled(self._compile_s, self._first_step_s, step_time_s)

    def _evaluate_if_due(self, outcome: Outcome) -> None:
        every = self.recipe.eval_every
        is_due = every and (self.step % every == 0 or self.step == self.recipe.steps)
        if is_due and outcome is Outcome.FINISHED:
            with self._clock.stopped():
                record = EvalRecord(self.step, self.evaluate())
            self._reporter.evaluation(record)

    def evaluate(self) -> float:
        """Returns the mean loss over the held-out batches of all ranks; a collective.

        It runs the training forward, whose records for backward are dropped: nothing is compiled a second time, and
        a Llama has no layer that behaves differently in training.
        """
        assert self._inputs.evaluation is not None, "the run was made without evaluation data"
        batches = self._inputs.evaluation.one_pass(self.options.eval_batches)
        losses = [self._loss(*batch).detach() for batch in batches]
        mean = torch.stack(losses).double().mean().reshape(1)
        return statistics.fmean(row[0] for row in self.world.gather_numbers(mean))

    def _open_checkpoints(self) -> Checkpointer:
        directory = self.options.checkpoint_dir or self.directory / CHECKPOINT_DIRECTORY
        try:
            checkpoints = Checkpointer(directory, keep_last=self.options.checkpoint_keep)
        except CheckpointError as error:
            raise UsageError(str(error)) from None
        if not self.options.resume and checkpoints.latest_step() is not None:
            checkpoints.close()
            raise UsageError(
                f"{directory} holds checkpoints of another run; continue it with --resume, or choose another "
                "--checkpoint-dir"
            )
        return checkpoints

    def _save_if_due(self, outcome: Outcome) -> None:
        every = self.recipe.checkpoint_every
        is_last = self.step == self.recipe.steps or outcome is Outcome.STOPPED
        if every and (is_last or self.step % every == 0):
            with self._clock.stopped():
                self._checkpoints.save(self.step, self._state(), blocking=is_last)

    def _state(self) -> dict[str, Any]:
        return {
            **train_state(self.model, self.optimizer),
            "rng": rng_state(),
            "data": self._inputs.train.state_dict(),
            "run": {"tokens": self._tokens, "tokens_per_step": self._tokens_per_step},
            "config": dataclasses.asdict(self._inputs.config),
        }

    def _resume(self) -> list[str]:
        """Puts back the newest good checkpoint, if there is one; returns what the user should know."""
        state = self._state()
        try:
            step = self._load_checkpoint(state)
            if step is None:
                return ["no checkpoint yet: starting at step 1"]
            restore(self.model, self.optimizer, state)
            self._inputs.train.load_state_dict(state["data"])
        except (CheckpointError, StateMismatchError, DataError) as error:
            raise UsageError(f"cannot resume: {error}") from error
        restore_rng(state["rng"], seed=self.options.seed, step=step)
        self.step, self._tokens = step, state["run"]["tokens"]
        skipped = len(self._checkpoints.skipped)
        notes = [
            f"resumed after step {step}" + (f"; {skipped} newer checkpoints are damaged" if skipped else "")
        ]
        before = state["run"]["tokens_per_step"]
        if before != self._tokens_per_step:
            notes.append(
                f"tokens per step were {before:,} and are {self._tokens_per_step:,} on {count_ranks(self.world.size)}; "
                "--local-batch and --accumulation set them"
            )
        return notes

    def _load_checkpoint(self, state: dict[str, Any]) -> int | None:
        """Fills `state`; where the models differ, says in what: a tensor that does not fit says less."""
        config = state["config"]
        try:
            step = self._checkpoints.load(state)
            saved = state
        except StateMismatchError as error:
            saved = {"config": config}
            self._checkpoints.load(saved)
            if saved["config"] == config:
                raise error
        for name, value in config.items():
            before = saved["config"].get(name)
            if before != value:
                raise StateMismatchError(f"the checkpoint's model has {name} {before}, this one {value}")
        return step

    def _conclude(self, outcome: Outcome) -> None:
        ranks = count_ranks(self.world.size)
        title = f"{self.options.run_name} on {ranks}, {self._tokens_per_step:,} tokens per step"
        if outcome is Outcome.FINISHED:
            headline = f"finished {self.step} steps"
        elif self.recipe.checkpoint_every:
            headline = f"asked to stop: saved step {self.step} of {self.recipe.steps}, continue with --resume"
        else:
            headline = f"asked to stop: ended at step {self.step} of {self.recipe.steps}, checkpoints are off"
        self._reporter.conclude(title, headline)


def _read_inputs_on_all_ranks(options: TrainOptions, world: World) -> Inputs:
    inputs, error = None, None
    try:
        inputs = read_inputs(options, world)
    except UsageError as mistake:
        error = str(mistake)
    world.agree(error)
    assert inputs is not None
    return inputs
