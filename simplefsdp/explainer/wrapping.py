"""From the options that commands share to the arguments of `simple_fsdp`.

Owns the checks of numbers that have to divide each other, before anything is built.
"""

from __future__ import annotations

from typing import Any

import torch

from inductor_passes.config import PassConfig
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
        ValueError: numbers that do not divide; says which do.
    """
    if gpus < 1:
        raise ValueError(f"--gpus {gpus}: must be at least 1")
    if sharding_factor is not None and (sharding_factor < 1 or gpus % sharding_factor):
        divisors = [str(number) for number in range(1, gpus + 1) if gpus % number == 0]
        raise ValueError(
            f"--sharding-factor {sharding_factor} must divide --gpus {gpus}; possible: {', '.join(divisors)}"
        )
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
