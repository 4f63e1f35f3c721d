"""What a pass is told besides the graph, and what identifies a pass in compile caches.

It owns the pairing of options and hardware profile, the choice between several of them for one graph, and the hash over
sources, version and setups. It must not know what the passes do.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from inductor_passes import graph as fxg

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import fx

    from inductor_passes.config import PassConfig
    from inductor_passes.costs.profiles import HardwareProfile

_KEY_LENGTH = (
    8  # hexadecimal digits: enough to tell the setups of one process apart, short enough for node names
)


@dataclass(frozen=True)
class Setup:
    """Everything that a plan depends on besides the graph: the user's options and the machine.

    Args:
        config: options of the passes.
        profile: hardware profile, equal on every rank.
        run: name under which the ranks that share it compare their plans, see `agreement`; "" where no other rank
            plans. No part of what identifies a setup: other runs find what this one compiled.
    """

    config: PassConfig
    profile: HardwareProfile
    run: str = ""

    @property
    def key(self) -> str:
        """Short text that differs whenever an option or a constant of the profile differs."""
        text = f"{self.config.cache_key()} {self.profile.identity()}"
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]

    def __reduce__(self) -> tuple[Any, ...]:
        return Setup, (self.config, self.profile)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setup) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def choose_setup(setups: Sequence[Setup], graph: fx.Graph, *, pinned: bool = False) -> Setup | None:
    """The setup to use for a graph, None to leave the graph alone.

    A graph names its setup by the key in its tags. A tag without a key gets the setup installed last; a tag with None
    asks for no passes. When modules with different setups meet in one graph, the one installed last decides for all of
    it: a plan covers a whole graph.

    Args:
        setups: what to choose from, in order of installation.
        graph: a graph; one without tags is left alone.
        pinned: take the last setup for every tagged graph, whatever its tags say.
    """
    keys = {tag.passes for tag in map(fxg.find_tag, graph.nodes) if tag is not None}
    if not keys or not setups:
        return None
    chosen = [setup for setup in setups if setup.key in keys]
    if pinned or (not chosen and "" in keys):
        return setups[-1]
    return chosen[-1] if chosen else None


def identity(setups: Iterable[Setup]) -> str:
    """Cache identity of a pass: our sources, the version of torch, and every setup the pass may choose."""
    text = " ".join(
        [
            source_hash(pathlib.Path(__file__).parent),
            torch.__version__,
            *(setup.key for setup in setups),  # in order: of several that apply, the last one decides
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def source_hash(package: pathlib.Path, pattern: str = "**/*.py") -> str:
    """Hash of the source files of a package: edited ones must not find what the old ones compiled."""
    digest = hashlib.sha256()
    for path in sorted(package.glob(pattern)):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
