"""The Llama 3.1 forward and its initial weights, in plain PyTorch.

Owns: the modules and their mathematics. Must not know: meshes, sharding strategies, files, training.
Parameters are read by ordinary attribute access, so whatever a parametrization answers (a gathered tensor in
bfloat16, say) is what computes. Activations follow that dtype; rotary tables and the loss are float32, and
RMSNorm reduces in it.

Submodules carry the names Hugging Face gives them and rotary embedding pairs the two halves of a head, as
theirs does, so exchanging weights with their checkpoints (``hf.py``) needs no permutation.

Shapes: B (batch), S (sequence), D (``dim``), H and K (query and key/value heads), E (``head_dim``), V
(vocabulary).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simplefsdp.llama.config import LlamaConfig, RopeScaling

IGNORE_INDEX = -100
"""Label of a position that does not count in the loss (``torch.nn.functional.cross_entropy``'s default)."""


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> Tensor:
    """Radians per position for each of the ``head_dim / 2`` rotating pairs.

    Plain: ``theta ** (-2 i / head_dim)`` (RoFormer, arXiv 2104.09864, section 3.2.2). With ``scaling``: the
    Llama 3.1 rule described on :class:`RopeScaling`.

    Args:
        head_dim: size of one attention head, even.
        theta: base of the geometric sequence.
        scaling: long-context stretching, or ``None``.
        device: where to compute; ``None`` is the default device.

    Returns:
        float32 tensor of shape (head_dim / 2,).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0, 1))


class RotaryEmbedding(nn.Module):
    """Turns pairs (i, i + E/2) of every head by an angle proportional to the position.

    The tables are a function of the configuration: non-persistent, always float32, and rebuilt whenever the
    module is moved or converted, so ``model.to(torch.bfloat16)`` does not round them and ``to_empty``
    leaves them valid.
    """

    cos: Tensor  # (max_seq_len, E/2) float32
    sin: Tensor  # (max_seq_len, E/2) float32

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.reset_tables()

    def reset_tables(self) -> None:
        """Recompute the tables on the device they are on (a no-op in content on the meta device)."""
        config, device = self.config, self.cos.device
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling, device)
        positions = torch.arange(config.max_seq_len, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies)
        self.cos, self.sin = angles.cos(), angles.sin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.reset_tables()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Rotate queries or keys, (B, S, heads, E), by positions 0 to S-1; shape and dtype are kept."""
        seq_len = x.shape[1]
        cos, sin = self.cos[:seq_len, None], self.sin[:seq_len, None]
        first, second = x.chunk(2, dim=-1)
        # Half precision times a float32 table promotes to float32: one rounding, at the end.
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key/value head (arXiv 2305.13245).

    On CUDA, torch has kernels for grouped heads in half precision only: in float32 it falls back to plain products
    and holds the (S, S) scores of every head.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rope: RotaryEmbedding) -> Tensor:
        """``x``: (B, S, D); returns (B, S, D)."""
        # Head counts come from the projections, so tensor-parallel ones that hold fewer heads work unchanged.
        q = rope(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)  # (B, H, S, E)
        k = rope(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)  # (B, K, S, E)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, K, S, E)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (B, S, D); returns (B, S, D)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rope: RotaryEmbedding) -> Tensor:
        """``x``: (B, S, D); returns (B, S, D).

        ``rope`` is the module, not its tables: a mixed-precision wrapper that casts a module's floating-point
        inputs would round them.
        """
        x = x + self.self_attn(self.input_layernorm(x), rope)
        hidden: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + hidden


class Llama(nn.Module):
    """A decoder-only Llama 3.1 language model, with its weights initialised.

    Large models are built under ``torch.device("meta")``, sharded, materialised with ``to_empty``, and then
    given their weights by :meth:`init_weights` or by ``load_hf``.

    Args:
        config: sizes; kept as ``model.config``.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.rope = RotaryEmbedding(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._tie_head()
        self.init_weights()

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: (B, S) int64 token ids, S at most ``config.max_seq_len``.
            labels: (B, S) int64 ids of the tokens to predict (the caller shifts them), ``IGNORE_INDEX``
                where a position does not count; or ``None``.

        Returns:
            Without labels, logits (B, S, V) in the compute dtype. With labels, the mean cross entropy over
            the counted positions in nats, a float32 scalar.

        Raises:
            ValueError: if the sequence is longer than the rotary tables.
        """
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"sequence length {tokens.shape[1]} exceeds LlamaConfig.max_seq_len {self.config.max_seq_len}"
            )
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.rope)
        logits: Tensor = self.lm_head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX)

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """(Re)draw every parameter and rebuild the rotary tables, in place.

        Matrices are normal with ``config.init_std``; those that write to the residual stream (``o_proj``,
        ``down_proj``) are narrowed by ``sqrt(2 n_layers)``, as its variance adds up over that many writes
        (GPT-2, Radford et al. 2019, section 2.3). Norm weights are one.

        Of a model wrapped by ``simple_fsdp``, call this inside ``sharded_parameters(model)``.

        Args:
            generator: random source on the parameters' device; ``None`` is that device's default generator.
        """
        std = self.config.init_std
        residual_std = std / math.sqrt(2 * self.config.n_layers)
        self.rope.reset_tables()
        for name, module in self.named_modules():
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, (nn.Embedding, nn.Linear)) and not (
                module is self.lm_head and self.config.tied_head
            ):
                is_residual = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(module.weight, std=residual_std if is_residual else std, generator=generator)

    def _tie_head(self) -> None:
        # Through the registry: on a parametrized module, attribute access does not answer with the parameter.
        if self.config.tied_head:
            self.lm_head._parameters["weight"] = self.embed_tokens._parameters["weight"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Llama:
        # Conversions that cannot happen in place (leaving the meta device, say) untie: each registration gets
        # a parameter of its own.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie_head()
        return self
