"""Comparing data-parallel ranks: small numbers by all-reduce, and texts once these differ.

Owns the exchange. Must not know what is compared. Every rank of the mesh makes each call, and gets the same answer:
dims are reduced one after the other, so that all come to one conclusion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _compat

__all__ = ["digest", "extremes", "first_difference"]

_DIGEST_BYTES = 7
"""Of a digest that is compared: a non-negative int64, whose negative is one too."""


def digest(lines: Sequence[str]) -> int:
    """A number that stands for a list of texts, below 2**56."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:_DIGEST_BYTES], "big")


def extremes(numbers: Sequence[int], mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Smallest and largest of each number over the ranks of the mesh: one all-reduce for each of its dims.

    Args:
        numbers: as many on every rank, each less than 2**63 in absolute value.
        mesh: the data-parallel mesh.
    """
    local = torch.tensor([*numbers, *(-n for n in numbers)], dtype=torch.int64, device=mesh.device_type)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            local = _compat.all_reduce(local, "max", mesh.get_group(dim).group_name)
    largest, smallest = local.view(2, -1).tolist()
    return [(-low, high) for low, high in zip(smallest, largest, strict=True)]


def first_difference(lines: Sequence[str], mesh: DeviceMesh) -> tuple[int, str]:
    """Where lists of texts first differ between the ranks of the mesh, and what each rank has there.

    Args:
        lines: this rank's list; the lists are not all equal.
        mesh: the data-parallel mesh.

    Returns:
        The position, and a text like "rank 0: this, rank 1: that".
    """
    held: dict[int, Sequence[str]] = {dist.get_rank(): lines}
    for dim in range(mesh.ndim):
        gathered: list[dict[int, Sequence[str]]] = [{} for _ in range(mesh.size(dim))]
        dist.all_gather_object(gathered, held, group=mesh.get_group(dim))
        held = {rank: items for part in gathered for rank, items in part.items()}
    for position in range(max(map(len, held.values()))):
        at = {
            rank: items[position] if position < len(items) else "nothing"
            for rank, items in sorted(held.items())
        }
        if len(set(at.values())) > 1:
            return position, ", ".join(f"rank {rank}: {item}" for rank, item in at.items())
    raise AssertionError("the lists are equal")
