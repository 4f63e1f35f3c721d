"""From what a user names to a model without memory and its inputs.

Owns: the meaning of `--model`: the name of a Llama, or `module:function` of the user's own. Must not know what is done
with the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
from typing import Any

import torch
from torch import nn

from simplefsdp.llama.checkpointing import CheckpointMode, apply_activation_checkpointing
from simplefsdp.llama.config import CONFIGS, LlamaConfig, get_config
from simplefsdp.llama.flops import flops_per_token
from simplefsdp.llama.model import Llama
from simplefsdp.llama.options import UsageError

LLAMA_PREFIXES = ("llama3.1-", "llama3-", "llama-")


@dataclasses.dataclass(frozen=True)
class Target:
    """A model to look at.

    Args:
        name: for titles.
        model: unwrapped, on the meta device where we build it.
        inputs: its arguments; only shapes count.
        tokens: tokens in one batch of one rank; None for a model that has no such notion.
        flops_per_token: floating-point operations of forward and backward that training needs for one token (without
            recomputation), or None.
        config: of a Llama.
    """

    name: str
    model: nn.Module
    inputs: tuple[Any, ...]
    tokens: int | None = None
    flops_per_token: float | None = None
    config: LlamaConfig | None = None


def find_target(
    model: str,
    *,
    seq_len: int | None = None,
    local_batch: int | None = None,
    checkpointing: CheckpointMode = "none",
    layers: int | None = None,
) -> Target:
    """Build what `--model` names.

    Args:
        model: name of a Llama ("8b", "llama3-8b"), or "module:function"; the function takes no arguments and returns
            the model and a tuple of its inputs.
        seq_len: tokens per sequence of a Llama; None is 8192, or the most it can.
        local_batch: sequences per rank of a Llama; None is 1.
        checkpointing: of a Llama's blocks.
        layers: number of a Llama's blocks; None is what the configuration says.

    Raises:
        UsageError: there is no such model, or the function returns something else.
    """
    if ":" in model:
        return _own_target(model)
    name, config = _find_config(model)
    seq_len = min(8192, config.max_seq_len) if seq_len is None else seq_len
    batch = 1 if local_batch is None else local_batch
    for flag, value in (("--seq", seq_len), ("--local-batch", batch), ("--layers", layers)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: must be at least 1")
    if seq_len > config.max_seq_len:
        raise UsageError(f"--seq {seq_len}: {model} attends to at most {config.max_seq_len} tokens")
    per_token = flops_per_token(config, seq_len)
    config = dataclasses.replace(config, n_layers=layers or config.n_layers, max_seq_len=seq_len)
    with torch.device("meta"):
        llama = Llama(config)
        tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
    apply_activation_checkpointing(llama, checkpointing)
    return Target(f"Llama {name}", llama, (tokens, tokens), batch * seq_len, per_token, config)


def _find_config(name: str) -> tuple[str, LlamaConfig]:
    short = name.lower()
    for prefix in LLAMA_PREFIXES:
        short = short.removeprefix(prefix)
    try:
        return short, get_config(short)
    except ValueError:
        raise UsageError(
            f"--model {name}: unknown; there are {', '.join(CONFIGS)} (also written llama3-8b), and your own as "
            "module:function"
        ) from None


def _own_target(text: str) -> Target:
    module_name, _, function_name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's module lies where they are
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"--model {text}: cannot import {module_name!r}: {error}") from error
    build = getattr(module, function_name, None)
    if not callable(build):
        raise UsageError(f"--model {text}: {module_name} has no function {function_name!r}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        built = build()
    if not isinstance(built, tuple) or len(built) != 2 or not isinstance(built[0], nn.Module):
        raise UsageError(
            f"--model {text}: {function_name}() must return (model, inputs), got {type(built).__name__}"
        )
    model, inputs = built
    return Target(text, model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))
