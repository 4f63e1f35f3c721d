"""The options that `explain` and `plan` share, and the checks that need neither torch nor the model.

Owns: names, help texts, the meaning of a model's name, numbers that must divide. Must not know how a model is built or
traced. It stays light, so that a mistake is answered at once: torch alone takes seconds to import.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import sys
from pathlib import Path
from typing import Literal

from simplefsdp.explainer.hardware import find_hardware
from simplefsdp.llama.config import CONFIGS, LlamaConfig
from simplefsdp.llama.options import UsageError

DEFAULT_SEQ_LEN = 8192
"""Tokens, the context Llama 3 was trained with (arXiv 2407.21783, section 3.4)."""
PICTURE_SUFFIXES = (".png", ".pdf", ".svg")

CheckpointMode = Literal["none", "full", "selective"]
_LLAMA_PREFIX = re.compile(r"^(meta-)?llama-?(3(\.\d)?-?)?(?=\d|debug)")


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """A training step to look at: the model, the devices, how it is sharded and compiled."""

    model: str = "debug"
    """A Llama (debug, 1b, 8b, 70b, 405b), or module:function, which returns (model, inputs)."""
    gpus: int = 8
    """Devices of the imagined run."""
    hardware: str = "h100"
    """h100, h100-96gb, h200, a100, b200, cpu, or a profile file that ends in .json."""
    sharding_factor: int | None = None
    """Ranks that share one copy of the parameters: 1 replicates (DDP); default all (FSDP)."""
    seq: int | None = None
    """Tokens per sequence of a Llama. Default: 8192, or the most it can."""
    local_batch: int | None = None
    """Sequences per device of a Llama. Default: 1."""
    ac: CheckpointMode | None = None
    """Activation checkpointing of a Llama. Default: none."""
    layers: int | None = None
    """Build a Llama with this many blocks instead of its own number."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 compute with fp32 storage and reductions, or fp32."""
    memory_budget_gb: float = 4.0
    """What prefetching may hold in flight, in 10**9 bytes."""
    reshard_after_forward: bool = True
    """Free gathered parameters after forward and gather them again in backward."""

    @property
    def is_own_model(self) -> bool:
        """Whether `model` names a function of the user's."""
        return ":" in self.model

    def check(self) -> None:
        """Check what needs neither torch nor the model.

        Raises:
            UsageError: naming the option, the value and the accepted values.
        """
        for flag, value in (
            ("--seq", self.seq),
            ("--local-batch", self.local_batch),
            ("--layers", self.layers),
        ):
            if value is not None and self.is_own_model:
                raise UsageError(f"{flag} is for a Llama; {self.model} makes its own model and inputs")
            if value is not None and value < 1:
                raise UsageError(f"{flag} {value}: must be at least 1")
        if self.is_own_model:
            if self.ac is not None:
                raise UsageError(f"--ac is for a Llama; {self.model} decides what it recomputes")
            check_own_model(self.model)
        else:
            _, config = find_llama(self.model)
            if self.seq is not None and self.seq > config.max_seq_len:
                raise UsageError(
                    f"--seq {self.seq}: {self.model} attends to at most {config.max_seq_len} tokens"
                )
        if not (math.isfinite(self.memory_budget_gb) and self.memory_budget_gb >= 0):
            raise UsageError(f"--memory-budget-gb {self.memory_budget_gb}: must be at least 0")
        check_mesh(self.gpus, self.sharding_factor)
        try:
            find_hardware(self.hardware)
        except ValueError as error:
            raise UsageError(f"--hardware: {error}") from None


def find_llama(name: str) -> tuple[str, LlamaConfig]:
    """The Llama that a name means: "8b", "llama3-8b" and "Llama-3.1-8B" are one.

    Returns:
        Its short name and configuration.

    Raises:
        UsageError: there is none; lists what exists.
    """
    short = _LLAMA_PREFIX.sub("", name.lower())
    if short not in CONFIGS:
        raise UsageError(
            f"--model {name}: unknown; there are {', '.join(CONFIGS)} (also written llama3-8b), and your own as "
            "module:function"
        )
    return short, CONFIGS[short]


def check_own_model(text: str) -> None:
    """Check that "module:function" may name something, without importing a module.

    Raises:
        UsageError: a half is missing, or the module's package is nowhere.
    """
    module, _, function = text.partition(":")
    if not (module and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"--model {text}: must be module:function, as in mypackage.models:build")
    see_working_directory()
    if importlib.util.find_spec(module.split(".")[0]) is None:
        raise UsageError(f"--model {text}: cannot import {module!r}: no such module here or on Python's path")


def see_working_directory() -> None:
    """Let modules of the working directory be imported, as `python -m` does: the user's lie where they are."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def check_mesh(gpus: int, sharding_factor: int | None) -> None:
    """Check that the devices divide into groups of `sharding_factor`.

    Raises:
        UsageError: they do not; says which factors do.
    """
    if gpus < 1:
        raise UsageError(f"--gpus {gpus}: must be at least 1")
    if sharding_factor is not None and (sharding_factor < 1 or gpus % sharding_factor):
        divisors = [str(number) for number in range(1, gpus + 1) if gpus % number == 0]
        raise UsageError(
            f"--sharding-factor {sharding_factor} must divide --gpus {gpus}; possible: {', '.join(divisors)}"
        )


def check_directory(flag: str, path: Path) -> None:
    """Make a directory, before the work that would be lost if it cannot be written.

    Raises:
        UsageError: it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror or error}") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"{flag} {path}: Permission denied")


def check_picture(flag: str, path: Path) -> None:
    """Check that a picture can be written to a file.

    Raises:
        UsageError: it has another suffix, or its directory cannot be made or written.
    """
    if path.suffix not in PICTURE_SUFFIXES:
        raise UsageError(f"{flag} {path}: must end in {', '.join(PICTURE_SUFFIXES)}")
    if path.is_dir():
        raise UsageError(f"{flag} {path}: is a directory")
    check_directory(flag, path.parent)
