"""The two operators that copy into and out of buckets: every layout, dtype and size that a member may have."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inductor_passes import bucket_ops

ROWS = 4


def parts(kind: str) -> list[torch.Tensor]:
    """Members of a bucket of `ROWS` rows."""
    torch.manual_seed(0)
    if kind == "contiguous":
        return [torch.randn(ROWS * 3, 5), torch.randn(ROWS), torch.randn(ROWS * 2, 3, 2)]
    if kind == "strided":
        return [
            torch.randn(6, ROWS, 8).movedim(1, 0),
            torch.randn(5, 2 * ROWS).t(),
            torch.randn(ROWS, 9)[:, ::2],
        ]
    if kind == "empty":
        return [torch.randn(ROWS, 3), torch.randn(0, 3), torch.randn(ROWS, 0)]
    assert kind == "mixed"
    return [torch.randn(ROWS, 3), torch.randn(ROWS * 2, dtype=torch.float64), torch.randn(ROWS, 2).bfloat16()]


@pytest.mark.parametrize("devices", [(), ("cpu",)], ids=["one by one", "chunk_cat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize("kind", ["contiguous", "strided", "empty", "mixed"])
def test_a_table_holds_each_part_cut_into_rows(monkeypatch, kind, rows, dtype, devices):
    monkeypatch.setattr(bucket_ops, "_CHUNK_CAT_DEVICES", devices)
    members = parts(kind)
    columns = [member.numel() // rows for member in members]
    table = bucket_ops.pack(members, rows, dtype)
    expected = torch.cat(
        [member.reshape(rows, width).to(dtype) for member, width in zip(members, columns, strict=True)], 1
    )
    assert torch.equal(table, expected)
    assert table.is_contiguous()
    found = bucket_ops.unpack(table, columns)
    for part, member, width in zip(found, members, columns, strict=True):
        assert torch.equal(part, member.reshape(rows, width).to(dtype))
        assert part.is_contiguous()
        assert part.untyped_storage().data_ptr() != table.untyped_storage().data_ptr() or not part.numel()


def test_scalars_are_parts_of_one_row():
    table = bucket_ops.pack([torch.tensor(3.0), torch.ones(2)], 1, torch.float32)
    assert table.tolist() == [[3.0, 1.0, 1.0]]


@pytest.mark.parametrize("kind", ["contiguous", "strided", "empty", "mixed"])
def test_operators_are_declared_as_they_are(kind):
    """Schema, fake results and dispatch agree with what the operators do, sizes known and unknown."""
    members = parts(kind)
    torch.library.opcheck(bucket_ops.pack, (members, ROWS, torch.bfloat16))
    table = bucket_ops.pack(members, ROWS, torch.float32)
    torch.library.opcheck(bucket_ops.unpack, (table, [member.numel() // ROWS for member in members]))


def test_chunk_cat_is_used_where_it_can_be(monkeypatch):
    """The one kernel for all parts does not take parts of several dtypes, or with gaps."""
    monkeypatch.setattr(bucket_ops, "_CHUNK_CAT_DEVICES", ("cpu",))
    used = []
    for kind in ("contiguous", "strided", "empty", "mixed"):
        with CalledOperators() as called:
            bucket_ops._pack(parts(kind), ROWS, torch.float32)
        used.append(torch.ops.aten._chunk_cat.out in called.operators)
    assert used == [True, False, True, False]


class CalledOperators(TorchDispatchMode):
    """Notes every operator that runs."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))
