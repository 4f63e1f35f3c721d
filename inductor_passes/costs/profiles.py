"""Hardware profiles: every constant of the cost models, each with its value, unit and source.

Owns the file format, its validation, the shipped profiles and the choice by device name. Must not know
graphs, plans or torch. A profile is data: it is loaded once, on one rank, and the same text goes to every
rank.

File format (JSON)::

    {"format": 1, "name": "my_cluster", "device_names": ["H100"],
     "constants": {"memory_bandwidth": {"value": 3350000000000, "unit": "byte/s", "source": "..."}, ...},
     "collectives": [{"kind": "all_gather", "group_size": 8, "nodes": 1, "ranks_per_node": 8,
                      "alpha_ns": 31000, "bandwidth": 350000000000, "source": "..."}, ...],
     "kernels": {"<kernel key>": 12345, ...}}

``constants`` must hold every name of ``CONSTANT_UNITS`` plus ``peak_flops.<dtype>`` and
``matmul_efficiency.<dtype>`` for float32 at least. ``collectives`` (measured alpha in ns and bandwidth in
byte/s for one kind and group shape) and ``kernels`` (measured ns) are optional and replace the models where
they apply.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from inductor_passes.costs.topology import COLLECTIVE_KINDS

FORMAT = 1

CONSTANT_UNITS: dict[str, str] = {
    "memory_bandwidth": "byte/s",
    "memory_efficiency": "per mille",
    "kernel_overhead": "ns",
    "ranks_per_node": "ranks",
    "intra_bandwidth": "byte/s",
    "intra_efficiency": "per mille",
    "inter_bandwidth": "byte/s",
    "inter_efficiency": "per mille",
    "collective_base": "ns",
    "intra_hop": "ns",
    "inter_hop": "ns",
    "collective_issue": "ns",
}
"""Names every profile must hold, and the unit of each. Bandwidths are per rank and direction."""

RATE_UNITS: dict[str, str] = {"peak_flops": "flop/s", "matmul_efficiency": "per mille"}
"""Constants held once per dtype, as ``<name>.<dtype>``."""

_MAY_BE_ZERO = ("kernel_overhead", "collective_base", "intra_hop", "inter_hop", "collective_issue")


@dataclasses.dataclass(frozen=True)
class Constant:
    """One number of a profile: an integer, its unit, and where it comes from."""

    value: int
    unit: str
    source: str


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """Measured time of one collective kind on one group shape: ``alpha_ns + traffic / bandwidth``.

    ``bandwidth`` is in byte/s of traffic, the larger of the bytes a rank sends and receives.
    """

    kind: str
    group_size: int
    nodes: int
    ranks_per_node: int
    alpha_ns: int
    bandwidth: int
    source: str


@dataclasses.dataclass(frozen=True)
class HardwareProfile:
    """Constants of one kind of machine. Build it with :func:`load_profile` or :func:`parse_profile`."""

    name: str
    device_names: tuple[str, ...]
    constants: Mapping[str, Constant]
    collectives: tuple[MeasuredCollective, ...] = ()
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def value(self, name: str) -> int:
        """The value of constant ``name``, in the unit ``CONSTANT_UNITS`` or ``RATE_UNITS`` states."""
        return self.constants[name].value

    def dtypes(self) -> tuple[str, ...]:
        """Dtypes with a matmul rate, sorted."""
        return tuple(sorted(key.split(".", 1)[1] for key in self.constants if key.startswith("peak_flops.")))

    def to_json(self) -> str:
        """Canonical text: equal profiles give equal bytes. :func:`parse_profile` reads it back."""
        return json.dumps(
            {
                "format": FORMAT,
                "name": self.name,
                "device_names": list(self.device_names),
                "constants": {key: dataclasses.asdict(item) for key, item in self.constants.items()},
                "collectives": [dataclasses.asdict(item) for item in self.collectives],
                "kernels": dict(self.kernels),
            },
            indent=1,
            sort_keys=True,
        )

    def identity(self) -> str:
        """Hash of the whole content, for compile cache keys."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package, sorted."""
    files = importlib.resources.files("inductor_passes.costs").iterdir()
    return tuple(sorted(item.name[: -len(".json")] for item in files if item.name.endswith(".json")))


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """Load a shipped profile by name, or a profile file by its path.

    Args:
        name_or_path: A name of :func:`shipped_profiles`, or a path ending in ``.json``.

    Raises:
        ValueError: No such profile, or the file breaks the format; the text names the field and what it must
        hold.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".json"):
        try:
            return parse_profile(pathlib.Path(text).read_text(encoding="utf-8"), where=text)
        except OSError as error:
            raise ValueError(f"cannot read hardware profile {text!r}: {error.strerror}") from error
    if text not in shipped_profiles():
        raise ValueError(
            f"unknown hardware profile {text!r}; accepted: {', '.join(shipped_profiles())}, "
            "or a path ending in .json"
        )
    resource = importlib.resources.files("inductor_passes.costs").joinpath(text + ".json")
    return parse_profile(resource.read_text(encoding="utf-8"), where=text)


def find_profile_name(device_name: str) -> str | None:
    """Name of the shipped profile whose ``device_names`` occur in ``device_name``; ``None`` when none does.

    The longest match wins, so that ``"NVIDIA H100 80GB HBM3"`` and ``"NVIDIA H200"`` find their own.
    """
    best: tuple[int, str] | None = None
    for name in shipped_profiles():
        for pattern in load_profile(name).device_names:
            if pattern.lower() in device_name.lower() and (best is None or len(pattern) > best[0]):
                best = (len(pattern), name)
    return None if best is None else best[1]


def parse_profile(text: str, *, where: str = "profile") -> HardwareProfile:
    """Read and check the text of a profile file.

    Args:
        text: JSON as in the module docstring.
        where: Name of the file for error texts.

    Raises:
        ValueError: The text breaks the format; names the field and what it must hold.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"hardware profile {where}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'hardware profile {where}: "format" must be {FORMAT}')
    unknown = sorted(data.keys() - {"format", "name", "device_names", "constants", "collectives", "kernels"})
    if unknown:
        raise ValueError(f"hardware profile {where}: unknown field {unknown[0]!r}")
    name, device_names = data.get("name"), data.get("device_names", [])
    if not isinstance(name, str) or not name:
        raise ValueError(f'hardware profile {where}: "name" must be non-empty text')
    if not isinstance(device_names, list) or not all(isinstance(item, str) and item for item in device_names):
        raise ValueError(f'hardware profile {where}: "device_names" must be a list of non-empty text')
    kernels = data.get("kernels", {})
    if not isinstance(kernels, dict) or not all(is_count(value) for value in kernels.values()):
        raise ValueError(f'hardware profile {where}: "kernels" must map kernel keys to whole ns >= 0')
    return HardwareProfile(
        name=name,
        device_names=tuple(device_names),
        constants=_constants(data.get("constants"), where),
        collectives=tuple(_collective(item, where) for item in data.get("collectives", [])),
        kernels=dict(sorted(kernels.items())),
    )


def _constants(data: Any, where: str) -> dict[str, Constant]:
    if not isinstance(data, dict):
        raise ValueError(f'hardware profile {where}: "constants" must be an object')
    out: dict[str, Constant] = {}
    for key in sorted(data):
        family = key.split(".", 1)[0]
        unit = CONSTANT_UNITS.get(key) or (RATE_UNITS.get(family) if "." in key else None)
        if unit is None:
            raise ValueError(
                f"hardware profile {where}: unknown constant {key!r}; accepted: "
                + ", ".join([*CONSTANT_UNITS, *(f"{rate}.<dtype>" for rate in RATE_UNITS)])
            )
        item = data[key]
        if not isinstance(item, dict) or item.keys() != {"value", "unit", "source"}:
            raise ValueError(
                f'hardware profile {where}: {key} must hold exactly "value", "unit" and "source"'
            )
        if item["unit"] != unit:
            raise ValueError(f"hardware profile {where}: {key} must be in {unit!r}, got {item['unit']!r}")
        least = 0 if key in _MAY_BE_ZERO else 1
        if not is_count(item["value"]) or item["value"] < least:
            raise ValueError(
                f"hardware profile {where}: {key} must be a whole number >= {least}, got {item['value']!r}"
            )
        if unit == "per mille" and item["value"] > 1000:
            raise ValueError(
                f"hardware profile {where}: {key} must be 1 to 1000 per mille, got {item['value']}"
            )
        if not isinstance(item["source"], str) or not item["source"]:
            raise ValueError(f"hardware profile {where}: {key} needs a source")
        out[key] = Constant(item["value"], unit, item["source"])
    dtypes = ["float32", *(key.split(".", 1)[1] for key in out if "." in key)]
    for key in [*CONSTANT_UNITS, *(f"{rate}.{dtype}" for dtype in dtypes for rate in RATE_UNITS)]:
        if key not in out:
            raise ValueError(f"hardware profile {where}: constant {key!r} is missing")
    return out


def _collective(data: Any, where: str) -> MeasuredCollective:
    names = [field.name for field in dataclasses.fields(MeasuredCollective)]
    if not isinstance(data, dict) or data.keys() != dict.fromkeys(names).keys():
        raise ValueError(
            f'hardware profile {where}: each of "collectives" must hold exactly {", ".join(names)}'
        )
    if data["kind"] not in COLLECTIVE_KINDS:
        raise ValueError(
            f"hardware profile {where}: unknown collective kind {data['kind']!r}; "
            f"accepted: {', '.join(COLLECTIVE_KINDS)}"
        )
    for key, least in (
        ("group_size", 2),
        ("nodes", 1),
        ("ranks_per_node", 1),
        ("alpha_ns", 0),
        ("bandwidth", 1),
    ):
        if not is_count(data[key]) or data[key] < least:
            raise ValueError(
                f"hardware profile {where}: {data['kind']} {key} must be a whole number >= {least}"
            )
    return MeasuredCollective(**data)


def is_count(value: Any) -> bool:
    """Whether a value read from JSON is a whole number >= 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
