"""One profile for all ranks: the first rank chooses and reads it, the others receive its text, before
anything compiles.

Owns the choice by device and the broadcast. This and the calibration are the only files of the package that
may issue collectives; passes never do.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from inductor_passes.costs.kernel_file import load_kernels, with_kernels
from inductor_passes.costs.profiles import HardwareProfile, find_profile_name, load_profile, parse_profile

CPU_PROFILE = "cpu_gloo"
UNKNOWN_GPU_PROFILE = "h100_sxm"


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all ranks plan with.

    Args:
        profile: hardware profile.
        run: drawn by the first rank, never used twice: what ranks store for one another under it is of this call. ""
            where there is one rank, or none that is real.
    """

    profile: HardwareProfile
    run: str = ""


def agree_on_profile(
    profile: str | os.PathLike[str] | None = None,
    groups: Sequence[dist.ProcessGroup] | None = None,
    kernel_costs: str | os.PathLike[str] | None = None,
) -> Agreed:
    """The hardware profile to plan with, equal on every rank.

    Collective over ``groups``: their ranks must call it, with equal arguments. With no process group, or a fake
    one, the profile is read locally.

    Args:
        profile: Shipped name or path of a profile file; ``None`` chooses by device. What the first rank reads
            counts.
        groups: This rank's process group for each dim of the mesh that has to agree; each passes on what its
            first rank has, in turn. ``None`` is the default process group.
        kernel_costs: File whose kernel times become part of the profile, where it exists.

    Raises:
        ValueError: The first rank could not read a file; raised with the same text on every rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake":
        return Agreed(find_profile(profile, kernel_costs))
    run = uuid.uuid4().hex
    try:
        message = ("profile", find_profile(profile, kernel_costs).to_json(), run)
    except ValueError as error:
        message = ("error", str(error), run)
    for group in (dist.group.WORLD,) if groups is None else groups:
        if dist.get_world_size(group) > 1:
            box = [message]
            dist.broadcast_object_list(box, group=group, group_src=0)
            message = box[0]
    kind, text, run = message
    if kind == "error":
        raise ValueError(f"first rank: {text}")
    return Agreed(parse_profile(text, where="broadcast by the first rank"), run)


def find_profile(
    profile: str | os.PathLike[str] | None = None, kernel_costs: str | os.PathLike[str] | None = None
) -> HardwareProfile:
    """The hardware profile as this rank reads it; arguments as of `agree_on_profile`.

    Raises:
        ValueError: A file could not be read.
    """
    found = _load_or_detect_profile(profile)
    return found if kernel_costs is None else with_kernels(found, load_kernels(kernel_costs))


def _load_or_detect_profile(profile: str | os.PathLike[str] | None) -> HardwareProfile:
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
            stacklevel=4,
        )
        name = UNKNOWN_GPU_PROFILE
    return load_profile(name)
