"""Every option of the trainer as one frozen dataclass, and the checks that need nothing but the options.

Owns: names, defaults, help texts, per-model recipes, parsing of a command line, one-line errors. Must not
know: torch, process groups, how training works. It stays light so that a mistyped option is answered before
anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args, get_type_hints

from simplefsdp.exits import EXIT_USAGE
from simplefsdp.llama.config import get_config
from simplefsdp.llama.sources import DataError, find_files

OptionsT = TypeVar("OptionsT")

INSTALL_HINT = "pip install 'simplefsdp[train]'"


class UsageError(ValueError):
    """What the user asked for cannot be done; the text says what to change. One line and exit code 2."""


@dataclass(frozen=True)
class Recipe:
    """Defaults that depend on the model's size; each field is the default of the option of the same name."""

    seq_len: int
    local_batch: int
    steps: int
    lr: float
    warmup: int
    eval_every: int
    checkpoint_every: int


DEBUG_RECIPE = Recipe(
    seq_len=128, local_batch=16, steps=300, lr=3e-3, warmup=20, eval_every=50, checkpoint_every=100
)
LARGE_RECIPE = Recipe(
    seq_len=8192, local_batch=1, steps=1000, lr=3e-4, warmup=100, eval_every=0, checkpoint_every=500
)
"""Context and peak rate of Llama 3 8B (arXiv 2407.21783, table 3); the rest keeps a first run short."""


@dataclass(frozen=True)
class TrainOptions:
    """Train a sharded, compiled Llama on this machine's GPUs, or on two CPU processes where it has none."""

    # -- model
    model: str = "debug"
    """Model size: debug, 1b, 8b, 70b or 405b."""
    hf: Path | None = None
    """Start from the weights and config.json of this Hugging Face Llama directory, instead of --model."""

    # -- data
    data: tuple[str, ...] = ()
    """Text, JSONL or parquet files or globs. Default: Python's own documentation, which every machine has."""
    text_field: str = "text"
    """JSONL field or parquet column that holds the text."""
    data_cache: Path | None = None
    """Directory for the tokens of large files. Default: simplefsdp in the user's cache directory."""
    tokenizer: Path | None = None
    """A tokenizer.json, or the directory that holds it. Default: one token per byte."""
    seq_len: int | None = None
    """Tokens per sequence. Default: 128 for debug, else 8192."""
    local_batch: int | None = None
    """Sequences per rank in each forward pass. Default: 16 for debug, else 1."""
    accumulation: int = 1
    """Forward and backward passes per optimizer step."""
    accumulation_sync: Literal["last", "every"] = "last"
    """Reduce gradients in the last pass only, keeping unsharded ones in memory until then, or in every pass."""

    # -- optimisation
    steps: int | None = None
    """Optimizer steps of the whole run. Default: 300 for debug, else 1000."""
    lr: float | None = None
    """Peak learning rate of AdamW. Default: 3e-3 for debug, else 3e-4."""
    warmup: int | None = None
    """Steps of linear warm-up. Default: 20 for debug, else 100, and at most a tenth of the run."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Decay after warm-up; wsd is stable, then linear over the last fifth."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end as a fraction of the peak."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's two decay rates."""
    clip: float = 1.0
    """Largest global gradient norm; 0 never clips."""

    # -- sharding, memory, compilation
    sharding_factor: int | None = None
    """Ranks that share one copy of the parameters: 1 replicates (DDP), the default is all ranks (FSDP)."""
    reshard_after_forward: bool = True
    """Free gathered parameters after forward and gather them again in backward."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """fp32, or bf16 compute with fp32 storage and reductions. auto: bf16 on GPUs, fp32 on CPUs."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute in backward: none, full (each block) or selective (keep attention and every second product)."""
    compile: bool = True
    """Compile forward, loss and backward with torch.compile."""
    compile_backend: str = "inductor"
    """Backend of torch.compile, e.g. inductor or aot_eager."""

    explain: bool = False
    """Before the first step, write what the compiler passes do with the model to explain/ in the output directory."""

    # -- where it runs
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type; auto takes the GPUs if there are any."""
    nproc: int | None = None
    """Processes to start when not under torchrun. Default: one per GPU, or 2 on CPU."""
    seed: int = 0
    """Seed of initialisation and of the order of the data."""
    deterministic: bool = False
    """Use deterministic kernels only: bit-for-bit repeatable on GPUs too, and slower."""

    # -- output
    out: Path | None = None
    """Directory for all the run writes. Default: runs/MODEL, or runs/MODEL-2 and so on if it is taken."""
    log_every: int = 10
    """Steps between printed lines; metrics.jsonl gets every step."""
    eval_every: int | None = None
    """Steps between evaluations on held-out text; 0 never. Default: 50 for debug, else 0."""
    eval_batches: int = 8
    """Batches per rank in each evaluation."""
    val_fraction: float = 0.05
    """Share of the text, at its end, that is held out for evaluation when there is any."""
    tensorboard: bool = True
    """Write TensorBoard events, if tensorboard is installed."""

    # -- checkpoints
    checkpoint_dir: Path | None = None
    """Directory of the checkpoints. Default: checkpoints inside the output directory."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, written in the background; 0 never. Default: 100 for debug, else 500. A run
    that is stopped, or reaches its last step, saves as well unless this is 0."""
    checkpoint_keep: int = 2
    """Newest checkpoints to keep."""
    resume: bool = False
    """Continue from the newest good checkpoint, of --out or else of the newest run of this model; start
    afresh if there is none."""
    export_hf: Path | None = None
    """Write the final weights to this directory in Hugging Face's format."""

    @property
    def recipe(self) -> Recipe:
        """The size-dependent options: what was given, and the model's defaults for the rest."""
        defaults = DEBUG_RECIPE if self.model == "debug" and self.hf is None else LARGE_RECIPE
        given = {
            field.name: value
            for field in dataclasses.fields(Recipe)
            if (value := getattr(self, field.name)) is not None
        }
        recipe = dataclasses.replace(defaults, **given)
        if self.warmup is None:
            recipe = dataclasses.replace(recipe, warmup=min(recipe.warmup, recipe.steps // 10))
        return recipe

    @property
    def run_name(self) -> str:
        """Name of the default output directory below ``runs/``."""
        return self.hf.resolve().name if self.hf is not None else self.model

    def check(self) -> None:
        """Checks what needs neither torch nor a process group.

        Raises:
            UsageError: naming the option, the value and the accepted values.
        """
        if self.hf is None:
            try:
                config = get_config(self.model)
            except (KeyError, ValueError) as error:
                raise UsageError(f"--model {self.model}: {error.args[0]}") from None
            if self.recipe.seq_len > config.max_seq_len:
                raise UsageError(
                    f"--seq-len {self.recipe.seq_len}: --model {self.model} attends to at most "
                    f"{config.max_seq_len} tokens"
                )
        elif not (self.hf / "config.json").is_file():
            raise UsageError(f"--hf {self.hf}: no config.json there")
        if self.tokenizer is not None and not self.tokenizer.exists():
            raise UsageError(f"--tokenizer {self.tokenizer}: no such file")
        try:
            find_files(self.data)
        except DataError as error:
            raise UsageError(str(error)) from None
        _check_numbers(self)
        _check_choices(self)

    def to_json(self) -> dict[str, object]:
        """Returns the options as plain JSON values."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
        }


def _check_numbers(options: TrainOptions) -> None:
    values = dataclasses.asdict(options) | dataclasses.asdict(options.recipe)

    def need(name: str, ok: bool, accepted: str) -> None:
        if not ok:
            raise UsageError(f"--{name.replace('_', '-')} {values[name]}: must be {accepted}")

    for name in (
        "seq_len",
        "local_batch",
        "accumulation",
        "steps",
        "log_every",
        "eval_batches",
        "checkpoint_keep",
    ):
        need(name, values[name] >= 1, "at least 1")
    for name in ("eval_every", "checkpoint_every", "seed"):
        need(name, values[name] >= 0, "at least 0")
    for name in ("sharding_factor", "nproc"):
        need(name, values[name] is None or values[name] >= 1, "at least 1")
    steps = values["steps"]
    need("lr", math.isfinite(values["lr"]) and values["lr"] > 0, "a positive number")
    need("warmup", 0 <= values["warmup"] <= steps, f"between 0 and the {steps} steps of the run")
    need("min_lr_ratio", 0 <= options.min_lr_ratio <= 1, "between 0 and 1")
    need("weight_decay", math.isfinite(options.weight_decay) and options.weight_decay >= 0, "at least 0")
    need("val_fraction", 0 < options.val_fraction < 1, "between 0 and 1, both excluded")
    need("clip", math.isfinite(options.clip) and options.clip >= 0, "at least 0")
    need("betas", all(0 <= beta < 1 for beta in options.betas), "two numbers from 0 up to, not including, 1")


def _check_choices(options: TrainOptions) -> None:
    hints = get_type_hints(TrainOptions)
    for name in ("schedule", "precision", "activation_checkpointing", "accumulation_sync", "device"):
        accepted = get_args(hints[name])
        if getattr(options, name) not in accepted:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(options, name)}: must be one of {', '.join(accepted)}")


def parse(argv: list[str], *, prog: str) -> TrainOptions:
    """Parses a command line into checked options; ``--help`` prints and leaves with exit code 0.

    Args:
        argv: the arguments after the program's name.
        prog: how the program is called in help and messages.

    Raises:
        UsageError: one line on what is wrong with the arguments.
    """
    options = parse_as(TrainOptions, argv, prog=prog)
    options.check()
    return options


def parse_as(kind: type[OptionsT], argv: list[str], *, prog: str) -> OptionsT:
    """The same for any dataclass of options, without the checks that only it knows.

    Raises:
        UsageError: one line on what is wrong with the arguments.
    """
    try:
        import tyro
    except ImportError:
        raise UsageError(f"the command line needs tyro: {INSTALL_HINT}") from None

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, prog=prog, args=argv, config=(tyro.conf.DisallowNone,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(f"{_one_line(complaint.getvalue())} (see {prog} --help)") from None


def answer(
    kind: type[OptionsT], argv: Sequence[str] | None, run: Callable[[OptionsT], int], *, prog: str
) -> int:
    """Parse a command's options and run it; bad input is one line on standard error.

    Args:
        kind: the dataclass of its options.
        argv: the options as text; `None` takes them from `sys.argv`.
        run: the command, which returns the exit code and may raise `UsageError`.
        prog: how the program is called in help and messages.

    Returns:
        The exit code: that of the command, or 2 for bad input.
    """
    try:
        return run(parse_as(kind, list(sys.argv[1:] if argv is None else argv), prog=prog))
    except UsageError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _one_line(box: str) -> str:
    """Flattens the box in which tyro draws an error: the message, and the option it suggests instead."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", row).strip("╭╮╰╯│─ \t") for row in box.splitlines()[1:]]
    sections: list[list[str]] = [[]]
    for row in rows:
        if row:
            sections[-1].append(row)
        else:
            sections.append([])
    message = " ".join(sections[0])
    for section in sections[1:]:
        if section and section[0].startswith("Perhaps you meant") and len(section) > 1:
            message += f"; did you mean {section[1].split()[0].rstrip(',')}?"
    return message[:1].lower() + message[1:]
