"""The public options of the front end: enums, frozen dataclasses and their validation. Knows nothing about tensors."""

from __future__ import annotations

import enum

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["GradientSync", "MixedPrecisionPolicy", "check_mp_policy"]


class GradientSync(enum.Enum):
    """How far a backward reduces gradients.

    Attributes:
        FULL: over every data-parallel rank; `.grad` holds the mean.
        SHARD_GROUP: inside the shard group only; the all-reduce over replicas waits for a later FULL backward.
        NONE: not at all; unsharded gradients accumulate on each rank until a later FULL backward.
    """

    FULL = "full"
    SHARD_GROUP = "shard_group"
    NONE = "none"


def check_mp_policy(policy: object) -> MixedPrecisionPolicy:
    """Return `policy` if it is a usable MixedPrecisionPolicy.

    Raises:
        TypeError: not a `MixedPrecisionPolicy`, or a field that is not a floating dtype (or None).
    """
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy must be a simplefsdp.MixedPrecisionPolicy, got {type(policy).__name__}; "
            "for example MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
        )
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, field)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"mp_policy.{field} must be a floating-point torch.dtype or None, got {dtype!r}")
    return policy
