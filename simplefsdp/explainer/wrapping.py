"""From the options that commands share to the arguments of `simple_fsdp`.

Owns the choice of precision, passes and blocks. Numbers that must divide are checked before anything is built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inductor_passes.config import PassConfig
from simplefsdp.explainer.options import check_mesh
from simplefsdp.policy import MixedPrecisionPolicy


def wrap_options(
    *,
    gpus: int,
    sharding_factor: int | None,
    precision: str,
    planner: str,
    blocks: tuple[str, ...],
    memory_budget_gb: float | None,
    reshard_after_forward: bool,
    profile: str,
) -> dict[str, Any]:
    """Arguments of `simple_fsdp`.

    Args:
        gpus: ranks of the run.
        sharding_factor: as in `simple_fsdp`.
        precision: "bf16" or "fp32".
        planner, blocks, memory_budget_gb, profile: as in `PassConfig`.
        reshard_after_forward: as in `simple_fsdp`.

    Raises:
        UsageError: numbers that do not divide; says which do.
    """
    check_mesh(gpus, sharding_factor)
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision == "bf16" else MixedPrecisionPolicy()
    )
    passes = PassConfig(planner=planner, blocks=blocks, memory_budget_gb=memory_budget_gb, profile=profile)
    return {
        "sharding_factor": sharding_factor,
        "mp_policy": policy,
        "reshard_after_forward": reshard_after_forward,
        "passes": passes,
    }


def find_blocks(model: nn.Module) -> str | None:
    """The pattern of names of a model's blocks: the items of its longest list that holds most of its parameters."""
    elements = sum(item.numel() for item in model.parameters())
    best, most = None, 1
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > most:
            held = sum(item.numel() for item in module.parameters())
            if 2 * held >= elements:
                best, most = f"{name}.*" if name else "*", len(module)
    return best


def block_patterns(model: nn.Module) -> tuple[str, ...]:
    """`PassConfig.blocks` for a model: what `find_blocks` finds, else the usual name."""
    return (find_blocks(model) or "layers.*",)
