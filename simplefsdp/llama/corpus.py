"""Documents become one flat array of token ids, in memory or memory-mapped from a cache.

Owns: tokenising a stream of pieces, document boundaries, the token cache on disk, the train/validation cut.
Must not know: sequences, batches, ranks, torch.

A cache entry is a directory, complete or absent:

    <cache dir>/<key>/tokens.bin    the ids, uint16 or uint32, [BOS] document [EOS] [BOS] document [EOS] ...
                      ends.bin      int64 per document: where it ends in tokens.bin
                      meta.json     counts, dtype, digest of the text
    <cache dir>/<key>.lock          held by the process that builds the entry

Whichever process takes the lock first tokenises into a scratch directory and renames it into place; the
others block on the lock and then map the result. The kernel drops a dead process's lock, so a builder that is
killed is succeeded by one of the waiters. Ranks therefore need no barrier here, and unrelated runs share
entries.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from .sources import DataError, Piece, builtin_pieces, find_files, read_pieces
from .tokenizer import Tokenizer

# Files of up to this many bytes together are tokenised in memory, by every rank for itself. A few seconds: a
# byte-level BPE of 4096 entries was measured at 1.1 MB/s on two shared CPU cores (tokenizers 0.23).
IN_MEMORY_BYTES = 4 << 20
# Characters handed to the tokenizer at once: enough pieces to use its threads, bounded memory.
BATCH_CHARS = 8 << 20
PROGRESS_SECONDS = 10.0
# Part of every cache key; raise it when the files below change meaning.
CACHE_FORMAT = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents, end to end.

    Attributes:
        tokens: ids, shape (tokens,), uint16 or uint32, read-only; may be memory-mapped.
        ends: end of each document in `tokens`, shape (documents,), int64, non-decreasing; the last is
            `len(tokens)`.
        max_id: the greatest id anywhere in the corpus the documents came from.
        digest: of the text and its division into documents; the same whatever tokenizer and file names.
        tokenizer: fingerprint of the tokenizer.
    """

    tokens: npt.NDArray[Any]
    ends: npt.NDArray[np.int64]
    max_id: int
    digest: str
    tokenizer: str

    def split(self, val_fraction: float) -> tuple[Corpus, Corpus]:
        """Cut off the last part of the tokens for validation.

        The cut is by tokens, so it also works for one long document: the document at the cut is divided.

        Args:
            val_fraction: share of the tokens that go to validation, 0 <= val_fraction < 1.

        Returns:
            (training, validation), views of this corpus; the second is empty for a fraction of 0.

        Raises:
            DataError: the fraction is out of range.
        """
        if not 0 <= val_fraction < 1:
            raise DataError(f"validation fraction {val_fraction} must be at least 0 and below 1")
        cut = len(self.tokens) - int(len(self.tokens) * val_fraction)
        train_ends = np.append(self.ends[: np.searchsorted(self.ends, cut, side="left")], np.int64(cut))
        val_ends = self.ends[np.searchsorted(self.ends, cut, side="right") :] - cut
        train = replace(self, tokens=self.tokens[:cut], ends=train_ends)
        return train, replace(self, tokens=self.tokens[cut:], ends=val_ends)


def load_corpus(
    tokenizer: Tokenizer,
    data: Sequence[str | os.PathLike[str]] = (),
    *,
    text_field: str = "text",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Tokenise the documents a run asked for, or map them from the cache.

    Safe to call on all ranks at once, without communication.

    Args:
        tokenizer: turns text into ids.
        data: files and globs, see `sources.find_files`; none for the built-in corpus.
        text_field: JSONL field or parquet column that holds the text.
        cache_dir: directory for tokens of files that exceed `IN_MEMORY_BYTES` together; None for
            `$XDG_CACHE_HOME/simplefsdp`, or `~/.cache/simplefsdp`.

    Returns:
        The corpus; at least one token.

    Raises:
        DataError: no usable data, see `sources`; or the cache directory cannot be written.
    """
    if not data:
        return _tokenize_in_memory(builtin_pieces(), tokenizer, "the built-in corpus")
    files = find_files(data)
    what = str(files[0]) if len(files) == 1 else f"{len(files)} files ({files[0]}, ...)"
    if sum(stat.st_size for stat in map(_stat, files)) <= IN_MEMORY_BYTES:
        return _tokenize_in_memory(read_pieces(files, text_field), tokenizer, what)
    return _load_cached(files, tokenizer, text_field, _cache_dir(cache_dir), what)


# --- tokenising
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Meta:
    """What is known of a corpus besides its two arrays; `meta.json` holds these fields."""

    tokens: int
    documents: int
    dtype: str
    max_id: int
    digest: str
    tokenizer: str


def _tokenize(
    pieces: Iterable[Piece], tokenizer: Tokenizer, tokens_out: BinaryIO, ends_out: BinaryIO, what: str
) -> _Meta:
    """Write the ids and document ends of a stream of pieces; memory is bounded by one batch."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    begin = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype=np.uint32)
    end = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype=np.uint32)
    nothing = np.array([], dtype=np.uint32)
    digest = hashlib.sha256()
    tokens = documents = max_id = 0
    reported = time.monotonic()
    for batch in _batches(pieces):
        parts, ends = [], []
        for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
            parts += [begin if piece.first else nothing, ids, end if piece.last else nothing]
            tokens += sum(map(len, parts[-3:]))
            digest.update(piece.text.encode("utf-8"))
            if piece.last:
                digest.update(b"\xff")  # in no UTF-8 text, so documents cannot run together
                ends.append(tokens)
        block = np.concatenate(parts)
        max_id = max(max_id, int(block.max(initial=0)))
        documents += len(ends)
        tokens_out.write(block.astype(dtype).data)
        ends_out.write(np.array(ends, dtype=np.int64).data)
        if time.monotonic() - reported > PROGRESS_SECONDS:
            reported = time.monotonic()
            logger.info("tokenising %s: %s tokens so far", what, f"{tokens:,}")
    if not tokens:
        raise DataError(f"data is empty: no text in {what}")
    return _Meta(tokens, documents, dtype.name, max_id, digest.hexdigest()[:16], tokenizer.fingerprint)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces until a group has `BATCH_CHARS` characters."""
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _corpus(meta: _Meta, tokens: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> Corpus:
    tokens.flags.writeable = ends.flags.writeable = False
    return Corpus(tokens, ends, meta.max_id, meta.digest, meta.tokenizer)


def _tokenize_in_memory(pieces: Iterable[Piece], tokenizer: Tokenizer, what: str) -> Corpus:
    tokens, ends = io.BytesIO(), io.BytesIO()
    meta = _tokenize(pieces, tokenizer, tokens, ends, what)
    return _corpus(
        meta, np.frombuffer(tokens.getbuffer(), meta.dtype), np.frombuffer(ends.getbuffer(), np.int64)
    )


# --- the cache
# ----------------------------------------------------------------------------------------------------


def _load_cached(files: list[Path], tokenizer: Tokenizer, text_field: str, root: Path, what: str) -> Corpus:
    """Map the entry of these files, building it first where it is missing or damaged."""
    key = _cache_key(files, tokenizer, text_field)
    entry = root / key
    if (corpus := _open_entry(entry)) is not None:
        return corpus
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{key}.lock").open("a") as lock:
            scratch_prefix = f"{key}.{socket.gethostname()}."
            # A few network file systems have no locks. There every process builds, and one rename wins.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
                for left_over in root.glob(f"{scratch_prefix}*"):  # its builder was killed: we hold the lock
                    shutil.rmtree(left_over, ignore_errors=True)
            if (corpus := _open_entry(entry)) is not None:
                return corpus
            scratch = root / f"{scratch_prefix}{secrets.token_hex(4)}"
            try:
                _build_entry(scratch, files, tokenizer, text_field, what)
                if _cache_key(files, tokenizer, text_field) != key:
                    raise DataError(f"data changed while it was being read: {what}")
                _publish(scratch, entry)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write the token cache in {root}: {error.strerror or error}; "
            "choose another place with --data-cache"
        ) from error
    corpus = _open_entry(entry)
    if corpus is None:
        raise DataError(f"token cache {entry} cannot be read back; choose another place with --data-cache")
    return corpus


def _build_entry(scratch: Path, files: list[Path], tokenizer: Tokenizer, text_field: str, what: str) -> None:
    logger.info("tokenising %s into %s", what, scratch.parent)
    started = time.monotonic()
    scratch.mkdir()
    with (scratch / "tokens.bin").open("wb") as tokens, (scratch / "ends.bin").open("wb") as ends:
        meta = _tokenize(read_pieces(files, text_field), tokenizer, tokens, ends, what)
        for file in (tokens, ends):  # on disk before the rename makes the entry count as complete
            file.flush()
            os.fsync(file.fileno())
    (scratch / "meta.json").write_text(json.dumps(vars(meta)), encoding="utf-8")
    logger.info("tokenised %s: %s tokens in %.1f s", what, f"{meta.tokens:,}", time.monotonic() - started)


def _publish(scratch: Path, entry: Path) -> None:
    """Rename a finished scratch directory into place, unless another process without locks was faster."""
    if entry.exists() and _open_entry(entry) is None:
        shutil.rmtree(entry)
    try:
        scratch.rename(entry)
    except OSError:
        if _open_entry(entry) is None:
            raise


def _open_entry(entry: Path) -> Corpus | None:
    """Map a cache entry; None where it is missing, of another format, or its files have the wrong length."""
    try:
        meta = _Meta(**json.loads((entry / "meta.json").read_text(encoding="utf-8")))
        dtype = np.dtype(meta.dtype)
        sizes = {"tokens.bin": meta.tokens * dtype.itemsize, "ends.bin": meta.documents * 8}
        if any((entry / name).stat().st_size != size for name, size in sizes.items()):
            return None
        tokens = np.memmap(entry / "tokens.bin", dtype, mode="r")
        ends = np.memmap(entry / "ends.bin", np.int64, mode="r")
    except (OSError, ValueError, TypeError):
        return None
    return _corpus(meta, tokens.view(np.ndarray), ends.view(np.ndarray))


def _cache_key(files: list[Path], tokenizer: Tokenizer, text_field: str) -> str:
    """Names an entry; changes with any file's path, size or modification time, the tokenizer, the field."""
    stats = [
        (str(path), stat.st_size, stat.st_mtime_ns)
        for path, stat in zip(files, map(_stat, files), strict=True)
    ]
    parts = [CACHE_FORMAT, stats, tokenizer.fingerprint, tokenizer.bos_id, tokenizer.eos_id, text_field]
    return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()[:32]


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror or error}") from error


def _cache_dir(chosen: str | os.PathLike[str] | None) -> Path:
    if chosen is not None:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simplefsdp"
