"""From what a user names to a model without memory and its inputs.

Owns: the meaning of `--model`: the name of a Llama, or `module:function` of the user's own. Must not know what is done
with the model.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import nn

from simplefsdp.explainer.options import (
    DEFAULT_SEQ_LEN,
    CheckpointMode,
    StepOptions,
    check_own_model,
    find_llama,
)
from simplefsdp.explainer.trace_errors import explain_failure
from simplefsdp.llama.checkpointing import apply_activation_checkpointing
from simplefsdp.llama.config import LlamaConfig
from simplefsdp.llama.flops import flops_per_token
from simplefsdp.llama.model import Llama
from simplefsdp.llama.options import UsageError


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
        UsageError: there is no such model, numbers it cannot have, or the function returns something else.
        TraceError: the function fails; says where and why.
    """
    StepOptions(model=model, seq=seq_len, local_batch=local_batch, layers=layers).check()
    if ":" in model:
        return _own_target(model)
    name, config = find_llama(model)
    seq_len = min(DEFAULT_SEQ_LEN, config.max_seq_len) if seq_len is None else seq_len
    batch = 1 if local_batch is None else local_batch
    config = dataclasses.replace(config, n_layers=layers or config.n_layers, max_seq_len=seq_len)
    per_token = flops_per_token(config, seq_len)
    with torch.device("meta"):
        llama = Llama(config)
        tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
    apply_activation_checkpointing(llama, checkpointing)
    return Target(f"Llama {name}", llama, (tokens, tokens), batch * seq_len, per_token, config)


def _own_target(text: str) -> Target:
    check_own_model(text)
    module_name, _, function_name = text.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"--model {text}: cannot import {module_name!r}: {error}") from error
    except Exception as error:
        with explain_failure(text, "imported"):
            raise error
    build = getattr(module, function_name, None)
    if not callable(build):
        raise UsageError(f"--model {text}: {module_name} has no function {function_name!r}")
    with explain_failure(text, "built"), torch.device("meta"):
        built = build()
    if not isinstance(built, tuple) or len(built) != 2 or not isinstance(built[0], nn.Module):
        raise UsageError(
            f"--model {text}: {function_name}() must return (model, inputs), got {_described(built)}"
        )
    model, inputs = built
    return Target(text, model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))


def _described(value: object) -> str:
    """The type of a value; of a tuple, those of its items."""
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__
