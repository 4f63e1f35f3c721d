"""Operators that copy tensors into and out of buckets: one call for a whole bucket.

It owns the two operators and the layout of a bucket, a table of one row for each rank. It must not know collectives or
graphs.

    pack    x0, x1, ...         -> (rows, c0 + c1 + ...)    each xi cut into rows along its first dimension, and cast
    unpack  (rows, c0 + c1 ...) -> (rows, c0), (rows, c1), ...

TorchInductor does not generate code for them. Code that it generates for a copy holds the member's place as a constant,
so that equal blocks whose weights lie at different places of buckets would each be compiled; the operators take places
as arguments. On GPUs torch has one kernel for each of them, however many members there are: those that FSDP2 uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["pack", "unpack"]

aten = torch.ops.aten
_NAMESPACE = "simplefsdp"
_CHUNK_CAT_DEVICES = ("cuda",)
"""Where torch has one kernel for all parts; on CPU it copies them one by one, and casts at half the speed."""
_library = torch.library.Library(_NAMESPACE, "DEF")
_library.define("pack(Tensor[] parts, int rows, ScalarType dtype) -> Tensor")
_library.define("unpack(Tensor table, SymInt[] columns) -> Tensor[]")


def _pack(parts: Sequence[torch.Tensor], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Copy tensors into the columns of a new table.

    Args:
        parts: tensors whose first dimension `rows` divides; row `i` of the table gets the i-th part of each, flat.
        rows: rows of the table.
        dtype: of the table; the parts are cast.

    Returns:
        A contiguous tensor of shape (rows, sum of the parts' elements / rows).
    """
    table = _empty_table(parts, rows, dtype)
    cut = [part.view(rows, *_rest(part, rows)) for part in parts]
    full = [part for part in cut if part.numel()]
    alike = len({part.dtype for part in full}) == 1 and all(part.is_contiguous() for part in full)
    if rows > 1 and alike and table.device.type in _CHUNK_CAT_DEVICES:
        aten._chunk_cat.out([part.flatten(1) for part in full], 0, rows, out=table)
        return table
    columns = table.split([part.numel() // rows for part in parts], 1)
    aten._foreach_copy_.default(
        [column.view(part.shape) for column, part in zip(columns, cut, strict=True)], cut
    )
    return table


def _unpack(table: torch.Tensor, columns: Sequence[int]) -> list[torch.Tensor]:
    """Copy the columns of a table into tensors of their own.

    Args:
        table: of shape (rows, sum of columns).
        columns: how many columns each result takes.

    Returns:
        Contiguous tensors of shape (rows, columns of it).
    """
    parts = _empty_parts(table, columns)
    torch.split_with_sizes_copy(table, columns, 1, out=parts)
    return parts


def _rest(part: torch.Tensor, rows: int) -> tuple[int, ...]:
    return (part.shape[0] // rows, *part.shape[1:]) if part.dim() else (1,)


def _empty_table(parts: Sequence[torch.Tensor], rows: int, dtype: torch.dtype) -> torch.Tensor:
    return parts[0].new_empty((rows, sum(part.numel() for part in parts) // rows), dtype=dtype)


def _empty_parts(table: torch.Tensor, columns: Sequence[int]) -> list[torch.Tensor]:
    return [table.new_empty((table.shape[0], width)) for width in columns]


_library.impl("pack", _pack, "CompositeExplicitAutograd")
_library.impl("unpack", _unpack, "CompositeExplicitAutograd")
torch.library.register_fake(f"{_NAMESPACE}::pack", _empty_table, lib=_library)
torch.library.register_fake(f"{_NAMESPACE}::unpack", _empty_parts, lib=_library)

pack = torch.ops.simplefsdp.pack.default
unpack = torch.ops.simplefsdp.unpack.default
