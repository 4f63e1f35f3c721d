"""Tokenised documents: boundaries, the validation cut, the token cache under races, kills and damage."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplefsdp.llama import corpus as corpus_module
from simplefsdp.llama import sources
from simplefsdp.llama.corpus import Corpus, load_corpus
from simplefsdp.llama.sources import DataError
from simplefsdp.llama.tokenizer import ByteTokenizer, TokenIds

BOS, EOS = ByteTokenizer.bos_id, ByteTokenizer.eos_id


class CountingTokenizer(ByteTokenizer):
    """Bytes; counts the characters it was given, over all threads."""

    def __init__(self) -> None:
        self.chars = 0

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        self.chars += sum(map(len, texts))
        return super().encode_batch(texts)


class BareTokenizer(ByteTokenizer):
    """Bytes without document boundaries, and a vocabulary that needs 32 bits."""

    bos_id = eos_id = None  # type: ignore[assignment]
    vocab_size = 1 << 17
    fingerprint = "bare"


def documents(corpus: Corpus) -> list[list[int]]:
    return [part.tolist() for part in np.split(corpus.tokens, corpus.ends[:-1])]


@pytest.fixture
def always_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "IN_MEMORY_BYTES", 0)


def write_lines(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_documents_are_bounded_by_specials(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", ["ab", "", "c"])
    corpus = load_corpus(ByteTokenizer(), [path])
    assert documents(corpus) == [[BOS, 97, 98, EOS], [BOS, 99, EOS]]
    assert corpus.tokens.dtype == np.uint16
    assert corpus.max_id == EOS
    bare = load_corpus(BareTokenizer(), [path])
    assert documents(bare) == [[97, 98], [99]]
    assert bare.tokens.dtype == np.uint32
    assert bare.digest == corpus.digest


def test_a_long_text_file_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARS", 4)
    monkeypatch.setattr(corpus_module, "BATCH_CHARS", 9)
    (tmp_path / "a.txt").write_text("one two three\nfour five\n")
    (tmp_path / "b.txt").write_text("six")
    corpus = load_corpus(ByteTokenizer(), [f"{tmp_path}/*.txt"])
    assert documents(corpus) == [[BOS, *b"one two three\nfour five\n", EOS], [BOS, *b"six", EOS]]


def test_digest_is_of_text_and_its_division(tmp_path: Path) -> None:
    def digest(name: str, texts: Sequence[str]) -> str:
        return load_corpus(ByteTokenizer(), [write_lines(tmp_path / name, texts)]).digest

    assert digest("one.jsonl", ["ab", "c"]) == digest("two.jsonl", ["ab", "c"])
    assert len({digest("x.jsonl", texts) for texts in (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"])}) == 4


def test_builtin_corpus_is_of_useful_size() -> None:
    corpus = load_corpus(ByteTokenizer())
    assert 300_000 < len(corpus.tokens) < 3_000_000
    assert len(corpus.ends) > 50


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_empty_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, cached: bool
) -> None:
    monkeypatch.setattr(corpus_module, "IN_MEMORY_BYTES", -1 if cached else 100)
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"data is empty: no text in .*empty\.jsonl"):
        load_corpus(ByteTokenizer(), [path], cache_dir=tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*/"))


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=1), fraction=st.floats(0, 1, exclude_max=True))
def test_split_cuts_tokens_in_order(lengths: list[int], fraction: float) -> None:
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    corpus = Corpus(np.arange(total, dtype=np.uint16), ends, total, "", "")
    train, val = corpus.split(fraction)
    assert np.concatenate([train.tokens, val.tokens]).tolist() == list(range(total))
    assert len(val.tokens) == int(total * fraction)
    for part in (train, val):
        assert part.ends.tolist() == sorted(part.ends.tolist())
        assert (part.ends[-1] if len(part.ends) else 0) == len(part.tokens)
    assert (val.ends > 0).all()
    cuts = {*train.ends.tolist(), *(val.ends + len(train.tokens)).tolist(), 0}
    assert cuts == {*ends.tolist(), len(train.tokens), 0}


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_split_refuses_other_fractions(fraction: float) -> None:
    corpus = Corpus(np.arange(4), np.array([4]), 3, "", "")
    with pytest.raises(DataError, match="must be at least 0 and below 1"):
        corpus.split(fraction)


@pytest.mark.usefixtures("always_cache")
class TestCache:
    """Files over the limit are tokenised once and mapped."""

    @pytest.fixture
    def data(self, tmp_path: Path) -> Path:
        return write_lines(tmp_path / "data.jsonl", [f"document {number}" for number in range(50)])

    def test_cached_equals_in_memory(
        self, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cached = load_corpus(ByteTokenizer(), [data], cache_dir=tmp_path / "cache")
        assert isinstance(cached.tokens.base, np.memmap)
        monkeypatch.setattr(corpus_module, "IN_MEMORY_BYTES", 1 << 20)
        memory = load_corpus(ByteTokenizer(), [data], cache_dir=tmp_path / "cache")
        assert documents(cached) == documents(memory)
        assert (cached.max_id, cached.digest, cached.tokenizer) == (
            memory.max_id,
            memory.digest,
            memory.tokenizer,
        )
        for corpus in (cached, memory):
            assert not corpus.tokens.flags.writeable

    def test_second_load_maps_and_any_change_tokenises_again(self, tmp_path: Path, data: Path) -> None:
        tokenizer = CountingTokenizer()

        def encoded(**options: str) -> int:
            before = tokenizer.chars
            load_corpus(tokenizer, [data], cache_dir=tmp_path / "cache", **options)
            return tokenizer.chars - before

        assert encoded() > 0
        assert encoded() == 0
        os.utime(data, ns=(0, 0))
        assert encoded() > 0
        tokenizer.fingerprint = "other"
        assert encoded() > 0
        data.write_text('{"text": "x", "body": "yz"}')
        assert encoded() == 1
        assert encoded(text_field="body") == 2

    def test_default_place_follows_xdg(
        self, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        load_corpus(ByteTokenizer(), [data])
        assert len(list(tmp_path.glob("xdg/simplefsdp/*/meta.json"))) == 1
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        load_corpus(ByteTokenizer(), [data])
        assert len(list(tmp_path.glob(".cache/simplefsdp/*/meta.json"))) == 1

    def test_ranks_at_once_tokenise_once(self, tmp_path: Path, data: Path) -> None:
        tokenizer = CountingTokenizer()
        found: list[Corpus] = []

        def load() -> None:
            found.append(load_corpus(tokenizer, [data], cache_dir=tmp_path / "cache"))

        ranks = [threading.Thread(target=load) for _ in range(8)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert len(found) == 8
        assert tokenizer.chars == sum(len(f"document {number}") for number in range(50))
        assert len(list(tmp_path.glob("cache/*/"))) == 1

    def test_without_file_locks_one_rename_wins(
        self, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_locks(*_: object) -> None:
            raise OSError("no locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
        barrier = threading.Barrier(4)

        class TogetherTokenizer(CountingTokenizer):
            def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
                barrier.wait(30)  # all build at the same time
                return super().encode_batch(texts)

        tokenizer, found = TogetherTokenizer(), list[Corpus]()
        ranks = [
            threading.Thread(
                target=lambda: found.append(load_corpus(tokenizer, [data], cache_dir=tmp_path / "cache"))
            )
            for _ in range(4)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [len(corpus.ends) for corpus in found] == [50] * 4
        assert len(list(tmp_path.glob("cache/*/"))) == 1

    def test_killed_builder_is_succeeded_by_a_waiter(self, tmp_path: Path, data: Path) -> None:
        builder = subprocess.Popen(
            [sys.executable, "-c", _SLOW_BUILDER, str(data), str(tmp_path / "cache")], stdout=subprocess.PIPE
        )
        with builder:
            assert builder.stdout is not None
            assert builder.stdout.readline() == b"building\n"
            assert len(list(tmp_path.glob("cache/*/"))) == 1  # its scratch directory
            found: list[Corpus] = []
            waiter = threading.Thread(
                target=lambda: found.append(
                    load_corpus(ByteTokenizer(), [data], cache_dir=tmp_path / "cache")
                )
            )
            waiter.start()
            waiter.join(0.3)
            assert waiter.is_alive()
            builder.send_signal(signal.SIGKILL)
            waiter.join(30)
        assert len(found[0].ends) == 50
        (entry,) = tmp_path.glob("cache/*/")
        assert sorted(file.name for file in entry.iterdir()) == ["ends.bin", "meta.json", "tokens.bin"]

    @pytest.mark.parametrize("file", ["tokens.bin", "ends.bin", "meta.json"])
    @pytest.mark.parametrize("damage", ["short", "gone", "empty"])
    def test_damaged_entry_is_built_again(self, tmp_path: Path, data: Path, file: str, damage: str) -> None:
        good = documents(load_corpus(ByteTokenizer(), [data], cache_dir=tmp_path / "cache"))
        (path,) = tmp_path.glob(f"cache/*/{file}")
        if damage == "gone":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size - 8 if damage == "short" else 0)
        assert documents(load_corpus(ByteTokenizer(), [data], cache_dir=tmp_path / "cache")) == good

    def test_failed_build_leaves_nothing_and_reports_the_data(self, tmp_path: Path, data: Path) -> None:
        with data.open("a") as file:
            file.write("broken\n")
        with pytest.raises(DataError, match=r"data\.jsonl:51: not JSON"):
            load_corpus(ByteTokenizer(), [data], cache_dir=tmp_path / "cache")
        assert not list(tmp_path.glob("cache/*/"))

    def test_data_that_changes_while_read_is_refused(self, tmp_path: Path, data: Path) -> None:
        class WritingTokenizer(ByteTokenizer):
            def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
                with data.open("a") as file:
                    file.write('{"text": "more"}\n')
                return super().encode_batch(texts)

        with pytest.raises(DataError, match="data changed while it was being read"):
            load_corpus(WritingTokenizer(), [data], cache_dir=tmp_path / "cache")
        assert not list(tmp_path.glob("cache/*/"))

    def test_unwritable_place_names_the_option(
        self, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(
            DataError, match=r"cannot write the token cache in .*file: .*; choose another .* --data-cache"
        ):
            load_corpus(ByteTokenizer(), [data], cache_dir=tmp_path / "file")

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match="No space left on device"):
            load_corpus(ByteTokenizer(), [data], cache_dir=tmp_path / "cache")
        assert not list(tmp_path.glob("cache/*/"))

    def test_finished_entry_needs_no_writable_place(
        self, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load_corpus(ByteTokenizer(), [data], cache_dir=tmp_path / "cache")
        monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("wrote to the cache"))
        load_corpus(ByteTokenizer(), [data], cache_dir=tmp_path / "cache")

    def test_memory_does_not_grow_with_the_data(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(corpus_module, "BATCH_CHARS", 1 << 14)
        peaks = []
        for documents_count in (1_000, 8_000):
            path = write_lines(tmp_path / f"{documents_count}.jsonl", ["x" * 200] * documents_count)
            tracemalloc.start()
            load_corpus(ByteTokenizer(), [path], cache_dir=tmp_path / "cache")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        shutil.rmtree(tmp_path / "cache")
        assert peaks[1] < 1.2 * peaks[0] < 1_000_000  # the larger file alone is 1.7 MB


# Stands a bare package in for simplefsdp/__init__.py: the child starts in a fraction of the time without torch, which
# the corpus must not need.
_SLOW_BUILDER = textwrap.dedent("""
    import importlib.util, sys, time, types

    package = types.ModuleType("simplefsdp")
    package.__path__ = importlib.util.find_spec("simplefsdp").submodule_search_locations
    sys.modules["simplefsdp"] = package
    from simplefsdp.llama import corpus
    from simplefsdp.llama.tokenizer import ByteTokenizer

    class Slow(ByteTokenizer):
        def encode_batch(self, texts):
            print("building", flush=True)
            time.sleep(600)

    assert "torch" not in sys.modules
    corpus.IN_MEMORY_BYTES = 0
    corpus.load_corpus(Slow(), [sys.argv[1]], cache_dir=sys.argv[2])
""")
