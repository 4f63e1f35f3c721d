"""What a user may choose about the passes: one frozen value that validates itself.

Owns the names, units, defaults and accepted values of every option. Must not know graphs, costs, plans or
torch: the value is plain data, so that it can be hashed, pickled into a compile cache key and sent to another
rank.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable

PLANNERS = ("auto", "greedy", "block", "none")
"""Accepted values of :attr:`PassConfig.planner`."""

DEFAULT_MEMORY_BUDGET_GB = 4.0
"""Default of :attr:`PassConfig.memory_budget_gb`, in units of 10**9 bytes.

Two blocks of a 70B Llama in bfloat16 take 3.4 GB, so the default holds what one-block-ahead prefetching holds
there, is 5 % of an 80 GB device, and lets an 8B model look nine blocks ahead.
"""

_BYTES_PER_GB = 10**9
_SWITCHES = ("bucketing", "reorder", "move_compute")


@dataclasses.dataclass(frozen=True)
class PassConfig:
    """Options of the compiler passes. Immutable, hashable, picklable; refuses invalid values on construction.

    Ranks have to plan alike. ``"auto"`` and ``"greedy"`` go by the time of compute, so where ranks see inputs of
    different sizes, compile with ``dynamic=True`` (or ``torch._dynamo.mark_dynamic``): symbolic sizes have one value on
    all ranks, constant ones do not. First plans that differ are an error (:mod:`inductor_passes.agreement`). Buckets of
    ``"block"`` and ``"none"`` do not depend on sizes.

    Args:
        planner: Who decides the buckets and the place of each collective. ``"auto"`` searches for the
            shortest modelled step, ``"greedy"`` extends a bucket while its communication fits under compute
            that hides it, ``"block"`` makes one bucket per module named in ``blocks``, ``"none"`` leaves
            collectives one by one, in the order they were traced.
        blocks: Modules that make a bucket each under ``planner="block"``: fully qualified names
            (``"layers.0"``), globs over them (``"layers.*"``), class names (``"TransformerBlock"``) or
            classes. Under ``"auto"`` they are one more candidate; the other planners ignore them.
        memory_budget_gb: Upper bound, in 10**9 bytes, on what the passes may hold in flight beyond the traced
            order: bytes gathered but not yet used plus gradients waiting to be reduced. ``0`` gathers each
            value when it is needed and reduces each gradient when it exists; ``None`` sets no bound.
        reshard: ``True`` gathers again in backward, ``False`` keeps gathered values from forward, ``None``
            follows each module's own ``reshard_after_forward``.
        bucketing: Merge collectives of equal group key.
        reorder: Move collective starts earlier and waits later.
        move_compute: Move independent compute under collectives that stay exposed.
        profile: Hardware profile to plan with: the name of a shipped profile, or the path of a profile file
            ending in ``.json``. ``None`` detects the device.
        kernel_costs: File, ending in ``.json``, that carries the costs of kernels after fusion from one run to the
            next. The first run plans with a guess at what will fuse, and its first rank writes the file when it
            compiles (not when a compile cache serves it); later runs plan with what the file holds. ``None`` keeps
            to the guess.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is not accepted; the text names the option and the accepted values.
    """

    planner: str = "auto"
    blocks: tuple[str, ...] = ()
    memory_budget_gb: float | None = DEFAULT_MEMORY_BUDGET_GB
    reshard: bool | None = None
    bucketing: bool = True
    reorder: bool = True
    move_compute: bool = True
    profile: str | None = None
    kernel_costs: str | None = None

    def __post_init__(self) -> None:
        if self.planner not in PLANNERS:
            raise ValueError(f"planner must be one of {_listed(PLANNERS)}, got {self.planner!r}")
        object.__setattr__(self, "blocks", _block_names(self.blocks))
        if self.planner == "block" and not self.blocks:
            raise ValueError(
                'planner="block" needs blocks=(...): fully qualified module names, globs such as "layers.*", '
                "or module classes"
            )
        object.__setattr__(self, "memory_budget_gb", _budget(self.memory_budget_gb))
        if self.reshard is not None and not isinstance(self.reshard, bool):
            raise TypeError(f"reshard must be True, False or None, got {self.reshard!r}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        object.__setattr__(self, "profile", _path_text("profile", self.profile))
        object.__setattr__(self, "kernel_costs", _path_text("kernel_costs", self.kernel_costs))
        if self.kernel_costs is not None and not self.kernel_costs.endswith(".json"):
            raise ValueError(
                f"kernel_costs must be a path that ends in .json, or None, got {self.kernel_costs!r}"
            )

    @property
    def memory_budget_bytes(self) -> int | None:
        """The memory budget in bytes, ``None`` for no bound."""
        return None if self.memory_budget_gb is None else round(self.memory_budget_gb * _BYTES_PER_GB)

    def cache_key(self) -> str:
        """Text that differs whenever an option differs, equal in every process and under any hash seed.

        It holds the *name* of the profile; whoever builds a compile cache key adds the profile's content.
        """
        fields = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self))
        return f"PassConfig({', '.join(fields)})"


def class_name_of(cls: type) -> str:
    """The text by which a module class is named in :attr:`PassConfig.blocks`: module and qualified name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _block_names(blocks: object) -> tuple[str, ...]:
    if isinstance(blocks, (str, type)) or not isinstance(blocks, Iterable):
        raise TypeError(
            f"blocks must be a tuple of names, globs or module classes, got {blocks!r}; write ({blocks!r},)"
        )
    names = tuple(class_name_of(block) if isinstance(block, type) else block for block in blocks)
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(f"blocks must hold non-empty names, globs or module classes, got {name!r}")
    return names


def _budget(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"memory_budget_gb must be a number of 10**9 bytes, or None for no bound, got {value!r}"
        )
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"memory_budget_gb must be finite and >= 0, or None for no bound, got {value!r}")
    return float(value)


def _path_text(name: str, value: object) -> str | None:
    if value is None:
        return None
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise TypeError(f"{name} must be non-empty text, a path, or None, got {value!r}")
    return text


def _listed(values: Iterable[str]) -> str:
    return ", ".join(repr(value) for value in values)
