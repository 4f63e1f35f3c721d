"""Tokenizers: bytes, and a `tokenizer.json` trained here on the built-in corpus."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplefsdp.llama.sources import DataError
from simplefsdp.llama.tokenizer import ByteTokenizer, load_tokenizer

TEXT = 'The "assert" statement inserts debugging assertions: naïve café, 数, \U0001f600\n'

MakeTokenizer = Callable[..., Path]


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> MakeTokenizer:
    """Return `make(*specials, **changes)`: a byte-level BPE file with top-level JSON keys changed."""

    def make(*specials: str, **changes: Any) -> Path:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator([TEXT] * 4, trainer)
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(json.loads(tokenizer.to_str()) | changes))
        return path

    return make


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_bytes_round_trip(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in encoded] == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(ids.tolist()) for ids in encoded] == texts
    assert all(ids.dtype == np.uint32 and ids.max(initial=0) < 256 for ids in encoded)


def test_byte_specials_are_outside_text_and_inside_the_vocabulary() -> None:
    tokenizer = ByteTokenizer()
    specials = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    assert specials == [256, 257, 258]
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode([256, 72, 105, 257, 258]) == "Hi"
    assert tokenizer.decode([0xE6, 0x95]) == "�"


def test_json_round_trip(make_tokenizer: MakeTokenizer) -> None:
    path = make_tokenizer("<|begin_of_text|>", "<|end_of_text|>")
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())
    assert [batch.tolist() for batch in tokenizer.encode_batch([TEXT, ""])] == [ids, []]
    assert load_tokenizer(path.parent).encode(TEXT) == ids


@pytest.mark.parametrize(
    ("specials", "boundaries"),
    [
        (["<|begin_of_text|>", "<|end_of_text|>", "<|endoftext|>"], ("<|begin_of_text|>", "<|end_of_text|>")),
        (["<|endoftext|>"], (None, "<|endoftext|>")),
        (["<unk>", "<s>", "</s>"], ("<s>", "</s>")),
        (["<pad>", "<bos>", "<eos>"], ("<bos>", "<eos>")),
        (["<s>"], (None, None)),
        (["[CLS]"], (None, None)),
    ],
)
def test_document_boundaries_are_found(
    make_tokenizer: MakeTokenizer, specials: list[str], boundaries: tuple[str | None, str | None]
) -> None:
    tokenizer = load_tokenizer(make_tokenizer(*specials))
    ids = {name: number for number, name in enumerate(specials)}
    expected = tuple(None if name is None else ids[name] for name in boundaries)
    assert (tokenizer.bos_id, tokenizer.eos_id) == expected


def test_named_boundaries_replace_the_known_ones(make_tokenizer: MakeTokenizer) -> None:
    path = make_tokenizer("<|endoftext|>", "[DOC]")
    tokenizer = load_tokenizer(path, bos_token="[DOC]")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, None)
    assert tokenizer.fingerprint != load_tokenizer(path).fingerprint
    with pytest.raises(DataError, match=r"eos_token '</s>' is not in its vocabulary"):
        load_tokenizer(path, eos_token="</s>")
    with pytest.raises(DataError, match="byte tokenizer has its own"):
        load_tokenizer(eos_token="</s>")


def test_text_cannot_forge_a_boundary(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = load_tokenizer(make_tokenizer("<|endoftext|>"))
    text = "a<|endoftext|>b"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_id or 0]) == text


def test_truncation_and_padding_of_the_file_are_off(make_tokenizer: MakeTokenizer) -> None:
    path = make_tokenizer(
        "<pad>",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 50},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    )
    tokenizer = load_tokenizer(path)
    short, long = tokenizer.encode_batch(["a", TEXT])
    assert len(short) == 1
    assert tokenizer.decode(long.tolist()) == TEXT


def test_vocabulary_bound_covers_holes(make_tokenizer: MakeTokenizer) -> None:
    path = make_tokenizer()
    content = json.loads(path.read_text())
    last = len(content["model"]["vocab"]) - 1
    content["model"]["vocab"] = {
        token: number + 700 if number == last else number
        for token, number in content["model"]["vocab"].items()
    }
    path.write_text(json.dumps(content))
    assert load_tokenizer(path).vocab_size == last + 701


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read: No such file or directory"),
        ("{}", "not a tokenizer.json"),
        ("nonsense", "not a tokenizer.json"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "empty vocabulary"),
    ],
)
def test_unusable_files_are_refused_in_one_line(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_library_names_the_install_command(
    make_tokenizer: MakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tokenizer()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer().vocab_size == 259
    with pytest.raises(DataError, match=r"needs tokenizers .*pip install 'simplefsdp\[train\]'"):
        load_tokenizer(path)
