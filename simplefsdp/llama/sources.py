"""Where training text comes from: files become a stream of document pieces, one at a time.

Owns: expanding `--data` patterns, reading text, JSONL and parquet, the built-in corpus, and the error class
of the whole data pipeline. Memory stays bounded by one piece (text), one line (JSONL) or one record batch
(parquet).
Must not know: tokens, ranks, tensors, caches.

The built-in corpus is CPython's own documentation topics (`pydoc_data.topics`, what `help("assert")` prints):
real English prose and code that is on every machine with a full Python.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A text file longer than this is handed on in several pieces. Long enough that the extra token boundary per
# piece is noise (one in about 250,000 tokens), short enough that a batch of pieces fits in memory and
# tokenises in parallel.
PIECE_CHARS = 1 << 20
# Rows decoded at a time from a parquet row group: bounds the Python strings alive at once.
PARQUET_ROWS = 1024

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)


class DataError(ValueError):
    """Data, a tokenizer or a data position that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Piece:
    """A stretch of one document, in order; most documents are a single piece.

    Attributes:
        text: the characters; encodable as UTF-8.
        first: whether a document starts here.
        last: whether the document ends here.
    """

    text: str
    first: bool = True
    last: bool = True


def import_optional(module: str, purpose: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: dotted module name.
        purpose: what the user asked for that needs it, as in "reading parquet files".

    Returns:
        The module.

    Raises:
        DataError: the library is not installed; names the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise DataError(
            f"{purpose} needs {library} ({first_line(error)}): pip install 'simplefsdp[train]'"
        ) from error


def first_line(error: BaseException) -> str:
    """What an error says, without the dump that libraries may append, for a message of one line."""
    return str(error).partition("\n")[0]


def find_files(patterns: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Expand paths and globs to the files they name.

    Args:
        patterns: paths or globs (`**` recurses, `~` is the home directory). A path that exists is taken
            literally, whatever characters it holds.

    Returns:
        Absolute paths, without duplicates, sorted: the order of `patterns` does not matter.

    Raises:
        DataError: a path is missing or is a directory, or a glob matches no file.
    """
    found: set[Path] = set()
    for given in patterns:
        pattern = os.fspath(given)
        name = os.path.expanduser(pattern)
        if os.path.isdir(name):
            raise DataError(
                f"data {pattern}: is a directory; name its files, as in '{pattern.rstrip('/')}/*.jsonl'"
            )
        if os.path.exists(name):
            found.add(Path(os.path.abspath(name)))
        elif glob.has_magic(name):
            files = [match for match in glob.glob(name, recursive=True) if os.path.isfile(match)]
            if not files:
                raise DataError(f"data {pattern}: no file matches")
            found.update(Path(os.path.abspath(match)) for match in files)
        else:
            raise DataError(f"data {pattern}: no such file")
    return sorted(found)


def read_pieces(files: Sequence[Path], text_field: str = "text") -> Iterator[Piece]:
    """Stream the documents of files, file by file, empty documents left out.

    The suffix decides: `.jsonl` and `.ndjson` hold a document per line, `.parquet` a document per row, any
    other file is UTF-8 text and one document.

    Args:
        files: existing files, read in this order.
        text_field: JSONL field or parquet column that holds the text.

    Yields:
        The pieces of each document in order.

    Raises:
        DataError: a file cannot be read or decoded, or lacks the field; names the file and the position in
            it.
    """
    for path in files:
        suffix = path.suffix.lower()
        try:
            if suffix in JSONL_SUFFIXES:
                yield from _read_jsonl(path, text_field)
            elif suffix in PARQUET_SUFFIXES:
                yield from _read_parquet(path, text_field)
            else:
                yield from _read_text(path)
        except OSError as error:
            raise DataError(f"{path}: cannot read: {error.strerror or error}") from error


def builtin_pieces() -> Iterator[Piece]:
    """Stream the built-in corpus, a document per topic, sorted by topic name.

    Yields:
        One piece per document.

    Raises:
        DataError: this Python was installed without `pydoc_data`.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError(
            "this Python has no documentation topics (pydoc_data); name text files with --data"
        ) from error
    for name in sorted(topics):
        if topics[name]:
            yield Piece(topics[name])


def _read_text(path: Path) -> Iterator[Piece]:
    """One document, cut after a line end, else before a space, whenever `PIECE_CHARS` are in hand."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held, first, offset = "", True, 0
    with path.open("rb") as file:
        while block := file.read(PIECE_CHARS):
            held += _decode(path, decoder, block, offset)
            if offset == 0:
                held = held.removeprefix("\ufeff")
            offset += len(block)
            if len(held) >= PIECE_CHARS:
                cut = held.rfind("\n") + 1 or max(held.rfind(" "), 0) or len(held)
                yield Piece(held[:cut], first=first, last=False)
                held, first = held[cut:], False
    held += _decode(path, decoder, b"", offset)
    if held or not first:
        yield Piece(held, first=first, last=True)


def _decode(path: Path, decoder: codecs.IncrementalDecoder, block: bytes, offset: int) -> str:
    """Decode the block that starts at byte `offset` of the file; an empty block ends the file."""
    carried = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        position = offset - carried + error.start
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {position}") from error


def _read_jsonl(path: Path, text_field: str) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            text = _jsonl_text(f"{path}:{number}", raw, text_field)
            if text:
                yield Piece(text)


def _jsonl_text(place: str, raw: bytes, text_field: str) -> str:
    """The text of one JSONL line; `place` is file:line for the error."""
    try:
        record = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 text: {error.reason} at byte {error.start} of the line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected a JSON object, got {type(record).__name__}")
    if text_field not in record:
        raise DataError(f"{place}: no field {text_field!r}; this line has {_names(record)}")
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(f"{place}: field {text_field!r} is {type(text).__name__}, expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON and no text
        raise DataError(
            f"{place}: field {text_field!r} holds a lone surrogate at character {error.start}"
        ) from error
    return text


def _read_parquet(path: Path, text_field: str) -> Iterator[Piece]:
    parquet = import_optional("pyarrow.parquet", "reading parquet files")
    arrow = import_optional("pyarrow", "reading parquet files")
    row = 0
    try:
        with contextlib.closing(parquet.ParquetFile(path)) as file:
            columns = file.schema_arrow.names
            if text_field not in columns:
                raise DataError(f"{path}: no column {text_field!r}; this file has {_names(columns)}")
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(PARQUET_ROWS, row_groups=[group], columns=[text_field]):
                    for text in batch.column(0).to_pylist():
                        row += 1
                        if not isinstance(text, str):
                            kind = "null" if text is None else type(text).__name__
                            raise DataError(
                                f"{path}: row {row}: column {text_field!r} is {kind}, expected a string"
                            )
                        if text:
                            yield Piece(text)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: damaged or not parquet, after row {row}: {first_line(error)}") from error


def _names(columns: Sequence[str] | dict[str, Any]) -> str:
    """Column names for an error, in quotes; a few, as some files have hundreds."""
    shown = ", ".join(repr(name) for name in list(columns)[:8])
    return (shown or "none") + (", ..." if len(columns) > 8 else "")
