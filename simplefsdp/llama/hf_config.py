"""Llama configurations in Hugging Face's words: reading and writing ``config.json``.

Owns: which keys there are, their defaults, and which Llama variants are refused. Must not know: tensors.

Written files use the keys that every ``transformers`` since 4.43 (the first with Llama 3.1) reads; version
5 writes ``rope_parameters`` in place of ``rope_theta`` and ``rope_scaling``, and both are read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from simplefsdp.llama.config import LlamaConfig, RopeScaling

CONFIG_FILE = "config.json"

_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
"""Our name to theirs, for the keys that must be there."""

_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
}
"""What this implementation computes; a missing key means the first value."""


def config_from_hf(directory: str | os.PathLike[str]) -> LlamaConfig:
    """Read the configuration of a Hugging Face Llama.

    Args:
        directory: where ``config.json`` is.

    Raises:
        FileNotFoundError: if there is no ``config.json``.
        ValueError: if it is not a Llama, or a variant that is not supported; the message names file and key.
    """
    path = Path(directory) / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the directory of a Hugging Face Llama")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    try:
        return _parse(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def config_to_hf(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Describe a configuration in the keys of ``config.json``.

    Args:
        config: what to describe.
        dtype: of the weights beside it, e.g. ``"bfloat16"``.

    Returns:
        A dictionary ready for ``json.dump``. Special token ids are ``null``: they belong to the tokenizer.
    """
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "tie_word_embeddings": config.tied_head,
        "initializer_range": config.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _parse(raw: Any) -> LlamaConfig:
    if not isinstance(raw, dict) or raw.get("model_type") != "llama":
        found = raw.get("model_type") if isinstance(raw, dict) else None
        raise ValueError(f"model_type must be 'llama', got {found!r}")
    for key, accepted in _REFUSED_UNLESS.items():
        if raw.get(key, accepted[0]) not in accepted:
            raise ValueError(f"{key} {raw[key]!r} is not supported, only {accepted[0]!r}")
    missing = [key for key in _FIELDS.values() if key not in raw]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")

    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    # The defaults are those of transformers' LlamaConfig.
    config = LlamaConfig(
        **{ours: raw[theirs] for ours, theirs in _FIELDS.items()},
        n_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        max_seq_len=raw.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
        rope_scaling=_parse_rope_scaling(rope),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied_head=raw.get("tie_word_embeddings", False),
        init_std=raw.get("initializer_range", 0.02),
    )
    head_dim = raw.get("head_dim") or config.head_dim
    if head_dim != config.head_dim:
        raise ValueError(
            f"head_dim {head_dim} is not supported, only hidden_size / num_attention_heads ({config.head_dim})"
        )
    return config


def _parse_rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is not supported, only 'default' and 'llama3'")
    fields = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_seq_len": "original_max_position_embeddings",
    }
    missing = [theirs for theirs in fields.values() if theirs not in rope]
    if missing:
        raise ValueError(f"rope scaling 'llama3' is missing {', '.join(missing)}")
    return RopeScaling(**{ours: rope[theirs] for ours, theirs in fields.items()})
