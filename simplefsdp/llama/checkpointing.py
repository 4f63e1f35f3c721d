"""Activation checkpointing of a Llama: recompute part of each block in backward instead of keeping it.

Owns: what is kept and what is recomputed, and how a block is made to do so. Must not know: sharding. Apply
it before ``simple_fsdp``: the recomputation reads parameters like any forward, so they are gathered again
as needed.

A block is checkpointed by giving it a subclass of its own class whose ``forward`` runs under
``torch.utils.checkpoint``. Nothing is wrapped around it, so module and parameter names stay as they are,
and the model can still be copied, pickled, compiled as one graph or block by block.

[Note: what selective keeps]
A block multiplies seven times, in the order q, k, v, o, gate, up, down. ``selective`` keeps

- the output of attention, whose cost grows with the square of the sequence while its size does not; and
- every second product, that is k, o and up, so that half of the recomputable matrix work is saved.

Per byte kept, all products but ``down`` save the same work (2 ``dim`` operations per element). The count
starts at the second one because the other half would include ``down``, whose output backward does not read:
it is not recomputed in any mode (except, when compiled, for the last block), and keeping it would cost
memory for nothing. Everything else, norms, rotary embedding, SiLU and the other products, is recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from simplefsdp.llama.model import Block, Llama, RotaryEmbedding

CheckpointMode = Literal["none", "full", "selective"]


def apply_activation_checkpointing(model: Llama, mode: CheckpointMode) -> None:
    """Choose, in place, what the blocks of ``model`` keep for backward. Results do not change, bit for bit.

    Args:
        model: a Llama not yet wrapped by ``simple_fsdp``. Any earlier choice is replaced.
        mode: ``"none"`` keeps every activation; ``"full"`` keeps each block's input and runs the block
            again; ``"selective"`` also keeps what is costly to recompute, see [Note: what selective keeps].
            Compiled on CPU, ``"full"`` keeps the output of attention as well.

    Raises:
        ValueError: if ``mode`` is another word.
        TypeError: if the blocks have a foreign class, as after ``simple_fsdp`` of single blocks.
    """
    if mode not in get_args(CheckpointMode):
        raise ValueError(
            f"activation checkpointing mode must be one of {', '.join(get_args(CheckpointMode))}, "
            f"got {mode!r}"
        )
    kinds = {"none": Block, "full": _FullyCheckpointedBlock, "selective": _SelectivelyCheckpointedBlock}
    for name, layer in model.layers.named_children():
        if type(layer) not in kinds.values():
            raise TypeError(
                f"layers.{name} is a {type(layer).__qualname__}, not a Block: "
                "apply activation checkpointing before simple_fsdp"
            )
    for layer in model.layers:
        layer.__class__ = kinds[mode]


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Those of a forward and of its recomputation."""


def checkpointed(
    forward: Callable[[Tensor, RotaryEmbedding], Tensor],
    x: Tensor,
    rope: RotaryEmbedding,
    contexts: Callable[[], Contexts] | None = None,
) -> Tensor:
    """Run a block's forward, and again in backward.

    Args:
        forward: the block's own.
        x, rope: its arguments.
        contexts: make what decides what is kept; None keeps the arguments alone.
    """
    # torch 2.13: Dynamo refuses `context_fn=noop_context_fn`, though it is the default.
    more: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    # Nothing in a block draws random numbers, so there is no generator state to preserve.
    out = checkpoint(forward, x, rope, use_reentrant=False, preserve_rng_state=False, **more)
    return cast(Tensor, out)


class _FullyCheckpointedBlock(Block):
    def forward(self, x: Tensor, rope: RotaryEmbedding) -> Tensor:
        keeps_attention = x.device.type == "cpu" and torch.compiler.is_compiling()
        return checkpointed(super().forward, x, rope, attention_kept if keeps_attention else None)


class _SelectivelyCheckpointedBlock(Block):
    def forward(self, x: Tensor, rope: RotaryEmbedding) -> Tensor:
        return checkpointed(super().forward, x, rope, _selective_contexts)


ATTENTION_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""What ``scaled_dot_product_attention`` becomes on CUDA and CPU, unless it falls back to plain products."""


def _selective_contexts() -> Contexts:
    """See [Note: what selective keeps]."""
    return every_second_product_kept(0)


def every_second_product_kept(remainder: int) -> Contexts:
    """Keep attention and half of a block's matrix products.

    Args:
        remainder: 0 keeps the second product, the fourth and so on, 1 the first, the third and so on.
    """
    products: Counter[bool] = Counter()  # by whether this is the recomputation

    def policy(
        context: SelectiveCheckpointContext, op: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        if op in ATTENTION_OPS:
            return CheckpointPolicy.MUST_SAVE
        if op is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == remainder:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Contexts = create_selective_checkpoint_contexts(policy)
    return contexts


def attention_kept() -> Contexts:
    """Recompute everything but attention: a workaround for compiled graphs on CPU.

    To recompute a random operator, and attention counts as one, torch's partitioner appends generator
    states to what forward saves. On CPU it puts them behind the device meshes that graphs with DTensor
    inputs save, where the runtime expects only meshes, and the first step dies in an assertion (seen on
    2.13; CUDA passes the states another way). Delete when ``functionalize_rng_ops`` of
    ``torch/_functorch/partitioners.py`` counts the saved meshes.
    """
    contexts: Contexts = create_selective_checkpoint_contexts(list(ATTENTION_OPS))
    return contexts
