"""One profile for all ranks: rank 0 chooses and reads it, every rank receives its text, before anything
compiles.

Owns the choice by device and the broadcast. This and the calibration are the only files of the package that
may communicate; passes never do.
"""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist

from inductor_passes.costs.profiles import HardwareProfile, find_profile_name, load_profile, parse_profile

CPU_PROFILE = "cpu_gloo"
UNKNOWN_GPU_PROFILE = "h100_sxm"


def agree_on_profile(profile: str | os.PathLike[str] | None = None) -> HardwareProfile:
    """The hardware profile to plan with, equal on every rank.

    Collective over the default process group when one is up: every rank must call it, with equal arguments.
    With no process group, or a fake one, the profile is read locally.

    Args:
        profile: Shipped name or path of a profile file, read on rank 0 only; ``None`` chooses by device.

    Raises:
        ValueError: Rank 0 could not read the profile; raised with the same text on every rank.
    """
    shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not shared or dist.get_backend() == "fake":
        return _load_or_detect(profile)
    message: list[tuple[str, str] | None] = [None]
    if dist.get_rank() == 0:
        try:
            message = [("profile", _load_or_detect(profile).to_json())]
        except ValueError as error:
            message = [("error", str(error))]
    dist.broadcast_object_list(message, src=0)
    received = message[0]
    assert received is not None
    if received[0] == "error":
        raise ValueError(f"rank 0: {received[1]}")
    return parse_profile(received[1], where="broadcast by rank 0")


def _load_or_detect(profile: str | os.PathLike[str] | None) -> HardwareProfile:
    if profile is not None:
        return load_profile(profile)
    if not torch.cuda.is_available():
        return load_profile(CPU_PROFILE)
    device = torch.cuda.get_device_name()
    name = find_profile_name(device)
    if name is None:
        warnings.warn(
            f"no hardware profile for {device!r}; planning with {UNKNOWN_GPU_PROFILE!r}. Measure this "
            "machine with `torchrun -m inductor_passes.costs.calibrate --out profile.json` and pass "
            "PassConfig(profile='profile.json')",
            stacklevel=3,
        )
        name = UNKNOWN_GPU_PROFILE
    return load_profile(name)
