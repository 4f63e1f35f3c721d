"""Files to documents: patterns, text, JSONL, parquet, and every way they can be wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplefsdp.llama import sources
from simplefsdp.llama.sources import DataError, Piece, builtin_pieces, find_files, read_pieces


def documents(pieces: Sequence[Piece]) -> list[str]:
    """Join pieces to documents; checks that first and last pair up."""
    result: list[str] = []
    inside = False
    for piece in pieces:
        assert piece.first != inside
        result.append("") if piece.first else None
        result[-1] += piece.text
        inside = not piece.last
    assert not inside
    return result


def read(path: Path, text_field: str = "text") -> list[str]:
    return documents(list(read_pieces([path], text_field)))


def write_parquet(path: Path, columns: dict[str, object], row_group_size: int = 2) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path


def test_patterns_are_expanded_sorted_and_unique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["b.txt", "a.txt", "sub/c.txt", "odd[1].txt"]
    (tmp_path / "sub").mkdir()
    for name in names:
        (tmp_path / name).write_text(name)
    expected = [tmp_path / name for name in ["a.txt", "b.txt", "odd[1].txt", "sub/c.txt"]]
    assert find_files([tmp_path / "b.txt", f"{tmp_path}/**/*.txt"]) == expected
    assert find_files([f"{tmp_path}/odd[1].txt"]) == [tmp_path / "odd[1].txt"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(["b.txt", "~/a.txt", "./b.txt"]) == expected[:2]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("missing.txt", "no such file"),
        ("*.parquet", "no file matches"),
        ("directory", r"is a directory; name its files, as in '.*directory/\*\.jsonl'"),
        ("director[y]", "no file matches"),
    ],
)
def test_patterns_without_files_are_refused(tmp_path: Path, pattern: str, message: str) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(DataError, match=message):
        find_files([tmp_path / pattern])


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8")), size=st.integers(1, 9))
def test_text_in_pieces_is_the_text(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    path = tmp_path_factory.mktemp("text") / "file.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_CHARS", size)
        assert read(path) == ([text.removeprefix("\ufeff")] if text.removeprefix("\ufeff") else [])


def test_text_is_cut_after_lines_else_before_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARS", 8)
    path = tmp_path / "file.md"
    path.write_text("one\ntwo\nthree four five\n")
    pieces = [piece.text for piece in read_pieces([path])]
    assert pieces == ["one\ntwo\n", "three", " four five\n", ""]


def test_text_keeps_line_ends_and_drops_the_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    assert read(path) == ["a\r\nb\n"]


@pytest.mark.parametrize("size", [1, 3, 4, 1 << 20])
def test_undecodable_text_names_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARS", size)
    path = tmp_path / "latin1.txt"
    path.write_bytes("é".encode() + b"abc\xe9 d")
    with pytest.raises(DataError, match=r"latin1\.txt: not UTF-8 text: .* at byte 5"):
        read(path)
    path.write_bytes("é".encode() + b"abc\xe9")
    with pytest.raises(DataError, match=r"unexpected end of data at byte 5"):
        read(path)


def test_jsonl_gives_a_document_per_line(tmp_path: Path) -> None:
    path = tmp_path / "data.JSONL"
    lines = [{"text": "one\ntwo", "id": 1}, {"text": ""}, {"text": "naïve"}]
    path.write_bytes(b"\xef\xbb\xbf" + "\n\n".join(map(json.dumps, lines)).encode())
    assert read(path) == ["one\ntwo", "naïve"]
    path.write_text('{"body": "x"}')
    assert read(path, "body") == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": "x", "id": 3}', r"no field 'text'; this line has 'body', 'id'"),
        (b"{}", r"no field 'text'; this line has none"),
        (b'{"text": 5}', r"field 'text' is int, expected a string"),
        (b'{"text": null}', r"field 'text' is NoneType, expected a string"),
        (b'["text"]', r"expected a JSON object, got list"),
        (b'{"text": "x"', r"not JSON: .*"),
        (b"[" * 100_000, r"not JSON: .*"),
        (b'{"text": "\xe9"}', r"not UTF-8 text: .* at byte 10 of the line"),
        (b'{"text": "ab\\ud800"}', r"field 'text' holds a lone surrogate at character 2"),
    ],
)
def test_bad_jsonl_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    pieces = read_pieces([path])
    assert next(pieces) == Piece("good")  # streamed: what came before was handed out
    with pytest.raises(DataError, match=rf"data\.jsonl:3: {message}$") as caught:
        next(pieces)
    assert "\n" not in str(caught.value)


def test_parquet_gives_a_document_per_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow

    monkeypatch.setattr(sources, "PARQUET_ROWS", 2)
    texts = ["one", "two\n", "", "naïve", "five"]
    path = write_parquet(tmp_path / "data.parquet", {"id": range(5), "text": texts}, row_group_size=3)
    assert read(path) == ["one", "two\n", "naïve", "five"]
    for kind in (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())):
        other = write_parquet(tmp_path / "other.parquet", {"body": pyarrow.array(texts).cast(kind)})
        assert read(other, "body") == ["one", "two\n", "naïve", "five"]


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    null = write_parquet(tmp_path / "null.parquet", {"text": ["a", "b", "c", None]})
    assert next(iter(read_pieces([null]))) == Piece("a")
    with pytest.raises(DataError, match=r"null\.parquet: row 4: column 'text' is null"):
        read(null)
    with pytest.raises(DataError, match=r"no column 'body'; this file has 'text'"):
        read(null, "body")
    with pytest.raises(DataError, match=r"row 1: column 'text' is int, expected a string"):
        read(write_parquet(tmp_path / "int.parquet", {"text": [1]}))
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(null.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"damaged\.parquet: damaged or not parquet, after row 0: ") as caught:
        read(damaged)
    assert "\n" not in str(caught.value)


def test_parquet_without_pyarrow_names_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "data.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs pyarrow .*pip install 'simplefsdp\[train\]'"):
        read(path)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "gone.txt"
    with pytest.raises(DataError, match=r"gone\.txt: cannot read: No such file or directory"):
        read(path)
    if os.geteuid():  # root reads everything
        path.write_text("x")
        path.chmod(0)
        with pytest.raises(DataError, match=r"gone\.txt: cannot read: Permission denied"):
            read(path)


def test_builtin_corpus_is_the_documentation_topics() -> None:
    from pydoc_data.topics import topics

    pieces = list(builtin_pieces())
    assert [piece.text for piece in pieces] == [topics[name] for name in sorted(topics)]
    assert all(piece.first and piece.last for piece in pieces)
    assert 'The "assert" statement' in next(islice(pieces, 1)).text


def test_python_without_topics_asks_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="name text files with --data"):
        list(builtin_pieces())
