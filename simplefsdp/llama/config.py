"""The shape of a Llama model, as data.

Owns: :class:`LlamaConfig`, :class:`RopeScaling`, their validation, and the named configurations. Must not
know: tensors, files, training. Everything here is hashable, comparable and printable.

The published sizes come from Meta's model cards (Llama 3.1, July 2024; Llama 3.2, September 2024) and the
``config.json`` beside the released weights, e.g. ``meta-llama/Llama-3.1-8B``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches rotary frequencies to contexts longer than it was first trained on.

    Frequencies that turn at least ``high_freq_factor`` times within ``original_max_seq_len`` stay, those
    that turn less than ``low_freq_factor`` times are slowed down ``factor`` times, and those between are
    interpolated.

    Args:
        factor: how much slower the slowest frequencies turn, at least 1.
        low_freq_factor: turns within the original context below which a frequency is slowed fully.
        high_freq_factor: turns within the original context above which a frequency is kept.
        original_max_seq_len: context length, in tokens, before stretching.

    Raises:
        ValueError: if a field is out of range; the message names it.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"RopeScaling.factor must be at least 1, got {self.factor}")
        if self.low_freq_factor <= 0:
            raise ValueError(f"RopeScaling.low_freq_factor must be positive, got {self.low_freq_factor}")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"RopeScaling.high_freq_factor must be greater than RopeScaling.low_freq_factor "
                f"({self.low_freq_factor}), got {self.high_freq_factor}"
            )
        _check_positive_int("RopeScaling.original_max_seq_len", self.original_max_seq_len)


@dataclass(frozen=True)
class LlamaConfig:
    """Everything that determines a Llama's parameters and its forward, and nothing else.

    Args:
        dim: width of the residual stream.
        n_layers: number of transformer blocks.
        n_heads: query heads; must divide ``dim`` into an even head size.
        n_kv_heads: key and value heads; must divide ``n_heads``.
        ffn_dim: width of the SwiGLU hidden layer.
        vocab_size: rows of the embedding and of the head.
        max_seq_len: longest sequence, in tokens, the rotary tables cover.
        rope_theta: base of the rotary frequencies.
        rope_scaling: Llama 3.1 frequency scaling, or ``None`` for plain rotary embedding.
        norm_eps: added to the mean square in RMSNorm.
        tied_head: the output head is the embedding matrix (one parameter, two names).
        init_std: standard deviation of the initial weights; see ``Llama.init_weights``.

    Raises:
        ValueError: if a field, or a combination of fields, is impossible; the message names it.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_head: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for field in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len"):
            _check_positive_int(f"LlamaConfig.{field}", getattr(self, field))
        for field in ("rope_theta", "norm_eps", "init_std"):
            if not getattr(self, field) > 0:
                raise ValueError(f"LlamaConfig.{field} must be positive, got {getattr(self, field)}")
        if self.dim % self.n_heads:
            raise ValueError(f"LlamaConfig.n_heads ({self.n_heads}) must divide LlamaConfig.dim ({self.dim})")
        if self.head_dim % 2:
            raise ValueError(
                f"LlamaConfig.dim / LlamaConfig.n_heads must be even, because rotary embedding turns pairs; "
                f"got {self.dim} / {self.n_heads} = {self.head_dim}"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"LlamaConfig.n_kv_heads ({self.n_kv_heads}) must divide LlamaConfig.n_heads ({self.n_heads})"
            )

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.dim // self.n_heads

    @property
    def n_parameters(self) -> int:
        """Number of trainable scalars; a tied head is counted once."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.n_kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied_head else 2)
        return self.n_layers * block + embeddings + self.dim


def get_config(name: str) -> LlamaConfig:
    """Look up a named configuration.

    Args:
        name: one of :data:`CONFIGS`, e.g. ``"debug"`` or ``"8b"``.

    Raises:
        ValueError: if there is none of that name; the message lists those that exist.
    """
    try:
        return CONFIGS[name]
    except KeyError:
        raise ValueError(f"unknown Llama config {name!r}; available: {', '.join(CONFIGS)}") from None


def _check_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


_LLAMA_3_VOCAB_SIZE = 128_256
_LLAMA_3_MAX_SEQ_LEN = 131_072
_LLAMA_31_ROPE = RopeScaling(factor=8.0)
_LLAMA_32_ROPE = RopeScaling(factor=32.0)

CONFIGS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        # Bytes and four special tokens; small enough to learn English spelling on two CPU cores in minutes.
        "debug": LlamaConfig(
            dim=128,
            n_layers=4,
            n_heads=4,
            n_kv_heads=2,
            ffn_dim=384,
            vocab_size=260,
            max_seq_len=1024,
            rope_theta=10_000.0,
        ),
        "1b": LlamaConfig(
            dim=2048,
            n_layers=16,
            n_heads=32,
            n_kv_heads=8,
            ffn_dim=8192,
            vocab_size=_LLAMA_3_VOCAB_SIZE,
            max_seq_len=_LLAMA_3_MAX_SEQ_LEN,
            rope_scaling=_LLAMA_32_ROPE,
            tied_head=True,
        ),
        "8b": LlamaConfig(
            dim=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            ffn_dim=14_336,
            vocab_size=_LLAMA_3_VOCAB_SIZE,
            max_seq_len=_LLAMA_3_MAX_SEQ_LEN,
            rope_scaling=_LLAMA_31_ROPE,
        ),
        "70b": LlamaConfig(
            dim=8192,
            n_layers=80,
            n_heads=64,
            n_kv_heads=8,
            ffn_dim=28_672,
            vocab_size=_LLAMA_3_VOCAB_SIZE,
            max_seq_len=_LLAMA_3_MAX_SEQ_LEN,
            rope_scaling=_LLAMA_31_ROPE,
        ),
        "405b": LlamaConfig(
            dim=16_384,
            n_layers=126,
            n_heads=128,
            n_kv_heads=8,
            ffn_dim=53_248,
            vocab_size=_LLAMA_3_VOCAB_SIZE,
            max_seq_len=_LLAMA_3_MAX_SEQ_LEN,
            rope_scaling=_LLAMA_31_ROPE,
        ),
    }
)
"""The named configurations, smallest first."""
