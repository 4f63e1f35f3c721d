"""The hardware a user may name: a profile of times, and how much memory a device has.

Owns names and memory sizes. Must not know models or plans. Names are looked up without torch, which reading a
profile brings.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inductor_passes.costs.profiles import HardwareProfile

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device.

    Args:
        name: what the user writes.
        profile: the hardware profile with its times.
        memory_bytes: memory of one device, None where it is not known.
        source: where the memory size is from.
    """

    name: str
    profile: str
    memory_bytes: int | None
    source: str

    def load(self) -> HardwareProfile:
        """The profile's constants.

        Raises:
            ValueError: the file is not a profile; says which field is wrong.
        """
        from inductor_passes.costs.profiles import load_profile  # brings torch

        return load_profile(self.profile)


KNOWN: tuple[Hardware, ...] = (
    Hardware("h100", "h100_sxm", 80 * GIB, "NVIDIA H100 SXM data sheet: 80 GB"),
    Hardware(
        "h100-96gb",
        str(Path(__file__).with_name("h100_96gb.json")),
        96 * GIB,
        "torchtitan, performance report of December 2024: H100 96GB HBM2e, 500 W",
    ),
    Hardware("h200", "h200_sxm", 141 * GIB, "NVIDIA H200 SXM data sheet: 141 GB"),
    Hardware("a100", "a100_sxm", 80 * GIB, "NVIDIA A100 SXM data sheet: 80 GB"),
    Hardware("b200", "b200_sxm", 180 * GIB, "NVIDIA HGX B200 data sheet: 180 GB"),
    Hardware("cpu", "cpu_gloo", None, "depends on the machine"),
)


def find_hardware(name: str) -> Hardware:
    """Look up hardware by its name, the name of a shipped profile, or the path of a profile file.

    Args:
        name: "h100", "h100_sxm", or a path that ends in ".json".

    Raises:
        ValueError: there is none; lists what exists.
    """
    for item in KNOWN:
        if name.lower() in (item.name, item.profile):
            return item
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise ValueError(f"{name}: no such file")
        return Hardware(name, name, None, "not in a profile file")
    raise ValueError(
        f"unknown hardware {name!r}; there are {', '.join(item.name for item in KNOWN)}, and files that end in .json, "
        "as `python -m inductor_passes.costs.calibrate --out FILE` writes"
    )
