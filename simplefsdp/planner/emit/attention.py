"""The choice of attention where no GPU can be asked.

Owns one rule. torch asks the device and its own CUDA kernels which attention to take; without either it would take
attention apart into matrix products, which no GPU run does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

MOST_HEAD_DIM = 256
"""Of flash attention; torch 2.11 to 2.14 (`check_head_dim_size_flash` in ATen's `sdp_utils.cpp`)."""


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """Inside, `scaled_dot_product_attention` of CUDA tensors is flash attention where that supports its arguments, as
    torch's first choice is on Ampere and later; elsewhere it is taken apart."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attend, "AutogradCUDA")
    yield
    del library  # which takes the rule away


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    head_dim = query.shape[-1]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if is_half and attn_mask is None and head_dim % 8 == 0 and head_dim <= MOST_HEAD_DIM:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    else:
        apart = torch.ops.aten._scaled_dot_product_attention_math
        out = apart(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    return out
