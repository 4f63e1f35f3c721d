"""Text to token ids and back: bytes by default, or any `tokenizer.json` of the `tokenizers` library.

Owns: the `Tokenizer` protocol, its two implementations, and finding the tokens that begin and end a document.
Must not know: files of documents, packing, tensors.

Encoding never adds special tokens; the corpus puts `bos_id` and `eos_id` around each document. Text cannot
forge one either: a literal "<|end_of_text|>" in a document is encoded as ordinary characters.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .sources import DataError, first_line, import_optional

TokenIds = npt.NDArray[np.uint32]

# (begin, end) of a document as trained tokenizers name them; the first pair whose tokens all exist is taken.
# A pair without a begin token is of a family that only ends documents.
KNOWN_BOUNDARIES: tuple[tuple[str | None, str], ...] = (
    ("<|begin_of_text|>", "<|end_of_text|>"),  # Llama 3
    (None, "<|endoftext|>"),  # GPT-2, GPT-NeoX, Qwen
    ("<s>", "</s>"),  # Llama 2, Mistral
    ("<bos>", "<eos>"),  # Gemma
)


class Tokenizer(Protocol):
    """What the data pipeline and the trainer need of a tokenizer.

    Attributes:
        vocab_size: every id is below it; the least vocabulary a model needs.
        bos_id: token put before each document, or None for no such token.
        eos_id: token put after each document, or None for no such token.
        fingerprint: equal exactly when the same text gives the same ids.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def fingerprint(self) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encode several texts; ids of text only, without special tokens."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode one text; ids of text only, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Give the text of ids; special tokens are left out, incomplete UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte, ids 0 to 255, then the specials BOS 256, EOS 257 and PAD 258."""

    vocab_size = 259
    bos_id = 256
    eos_id = 257
    pad_id = 258
    fingerprint = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encode several texts to their UTF-8 bytes."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32) for text in texts]

    def encode(self, text: str) -> list[int]:
        """Encode one text to its UTF-8 bytes."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Give the text of ids; specials are left out, incomplete UTF-8 becomes U+FFFD."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer read from a `tokenizer.json`; `load_tokenizer` says how it finds document boundaries.

    Truncation and padding that the file may ask for are switched off: they would lose text without a word.
    """

    def __init__(self, path: Path, bos_token: str | None = None, eos_token: str | None = None) -> None:
        library = import_optional("tokenizers", "a tokenizer.json")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"tokenizer {path}: cannot read: {error.strerror or error}") from error
        try:
            self._impl: Any = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for a file it cannot use
            raise DataError(f"tokenizer {path}: not a tokenizer.json: {first_line(error)}") from error
        self._impl.no_truncation()
        self._impl.no_padding()
        self._impl.encode_special_tokens = True
        vocabulary: dict[str, int] = self._impl.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"tokenizer {path}: has an empty vocabulary")
        # Ids may have holes, so the count of entries is not the bound.
        self.vocab_size = max(vocabulary.values()) + 1
        bos, eos = _find_boundaries(path, vocabulary, bos_token, eos_token)
        self.bos_id = None if bos is None else vocabulary[bos]
        self.eos_id = None if eos is None else vocabulary[eos]
        digest = hashlib.sha256(content).hexdigest()[:16]
        self.fingerprint = f"tokenizer.json {digest} bos={bos} eos={eos}"

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encode several texts in parallel."""
        # Offsets are of no use here; since tokenizers 0.20 there is a call that does not compute them.
        encode = getattr(self._impl, "encode_batch_fast", self._impl.encode_batch)
        encodings = encode(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        """Encode one text."""
        return list(self._impl.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Give the text of ids; special tokens are left out."""
        return str(self._impl.decode([int(token) for token in ids], skip_special_tokens=True))


def load_tokenizer(
    path: str | os.PathLike[str] | None = None, *, bos_token: str | None = None, eos_token: str | None = None
) -> Tokenizer:
    """Make the tokenizer a run asked for.

    Args:
        path: a `tokenizer.json`, or a directory that holds one; None for the byte tokenizer.
        bos_token: token that begins each document, by its text; None to look for a known one.
        eos_token: token that ends each document, by its text; None to look for a known one.

    Returns:
        The tokenizer. Where neither name is given, the boundaries are those of the first family in
        `KNOWN_BOUNDARIES` that the vocabulary has; where it has none, documents are joined with nothing
        between. Where one name is given, only that token is put.

    Raises:
        DataError: the library is missing, the file cannot be used, or a named token is not in its vocabulary.
    """
    if path is None:
        if bos_token is not None or eos_token is not None:
            raise DataError("bos_token and eos_token need a tokenizer.json; the byte tokenizer has its own")
        return ByteTokenizer()
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "tokenizer.json"
    return JsonTokenizer(file, bos_token, eos_token)


def _find_boundaries(
    path: Path, vocabulary: dict[str, int], bos_token: str | None, eos_token: str | None
) -> tuple[str | None, str | None]:
    """The (begin, end) tokens by text, per the rule in `load_tokenizer`."""
    for option, token in (("bos_token", bos_token), ("eos_token", eos_token)):
        if token is not None and token not in vocabulary:
            raise DataError(f"tokenizer {path}: {option} {token!r} is not in its vocabulary")
    if bos_token is not None or eos_token is not None:
        return bos_token, eos_token
    for begin, end in KNOWN_BOUNDARIES:
        if end in vocabulary and (begin is None or begin in vocabulary):
            return begin, end
    return None, None
