"""Batches of a rank: one global stream however many ranks share it, resumed exactly."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simplefsdp.llama.corpus import Corpus, load_corpus
from simplefsdp.llama.data import Loader, build_loader
from simplefsdp.llama.sources import DataError
from simplefsdp.llama.tokenizer import ByteTokenizer

SEQ_LEN = 5
GLOBAL_BATCH = 12


def make_corpus(documents: int = 20, digest: str = "digest", tokenizer: str = "bytes") -> Corpus:
    ends = np.cumsum(np.arange(1, documents + 1))
    return Corpus(np.arange(ends[-1], dtype=np.uint16), ends, int(ends[-1]) - 1, digest, tokenizer)


def make_loader(**options: Any) -> Loader:
    arguments: dict[str, Any] = {
        "corpus": make_corpus(),
        "seq_len": SEQ_LEN,
        "global_batch": GLOBAL_BATCH,
    } | options
    return build_loader(arguments.pop("corpus"), **arguments)


def take(loader: Loader, count: int) -> torch.Tensor:
    """The next batches' tokens, shape (count, local_batch, seq_len); checks form and labels."""
    batches = []
    for tokens, labels in itertools.islice(loader, count):
        assert tokens.dtype == labels.dtype == torch.int64
        assert tokens.shape == labels.shape == (loader.local_batch, loader.sequences.seq_len)
        assert tokens.is_contiguous()
        assert labels.is_contiguous()
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        batches.append(tokens)
    return torch.stack(batches)


def take_global(world: int, count: int, state: dict[str, Any] | None = None) -> torch.Tensor:
    """What all ranks of a run see, from a state on: shape (count, global_batch, seq_len)."""
    parts = []
    for rank in range(world):
        loader = make_loader(dp_rank=rank, dp_world=world)
        if state is not None:
            loader.load_state_dict(state)
        parts.append(take(loader, count))
    return torch.cat(parts, dim=1)


divisors = st.sampled_from([1, 2, 3, 4, 6, 12])


@settings(max_examples=25, deadline=None)
@given(first=divisors, second=divisors, before=st.integers(1, 6), after=st.integers(1, 6))
def test_resumed_on_other_ranks_the_stream_goes_on(first: int, second: int, before: int, after: int) -> None:
    whole = take_global(1, before + after)
    assert torch.equal(take_global(first, before), whole[:before])
    loader = make_loader(dp_rank=first - 1, dp_world=first)
    take(loader, before)
    assert torch.equal(take_global(second, after, loader.state_dict()), whole[before:])


def test_state_is_equal_on_all_ranks_and_counts_batches_handed_out() -> None:
    states = []
    for rank in range(3):
        loader = make_loader(dp_rank=rank, dp_world=3)
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        states.append(loader.state_dict())  # while batches ahead are in the making
        iterator.close()  # type: ignore[attr-defined]
        assert loader.state_dict() == states[-1]
    assert states[0] == states[1] == states[2]
    assert states[0]["position"] == 5 * GLOBAL_BATCH
    assert states[0]["epoch"] == 5 * GLOBAL_BATCH * SEQ_LEN // 210 == loader.epoch


def test_another_global_batch_continues_with_the_next_sequence() -> None:
    loader = make_loader(global_batch=12)
    take(loader, 2)
    other = make_loader(global_batch=4)
    other.load_state_dict(loader.state_dict())
    expected = take(make_loader(global_batch=4), 9)[6:]
    assert torch.equal(take(other, 3), expected)


def test_iterators_in_use_follow_the_position() -> None:
    loader = make_loader()
    whole = take(make_loader(), 8)
    start = loader.state_dict()
    iterator = iter(loader)
    first = [next(iterator)[0] for _ in range(3)]
    loader.load_state_dict(start)
    again = [next(iterator)[0] for _ in range(4)]
    assert torch.equal(torch.stack(first), whole[:3])
    assert torch.equal(torch.stack(again), whole[:4])
    assert torch.equal(take(loader, 2), whole[4:6])  # a second iterator goes on
    assert torch.equal(next(iterator)[0], whole[6])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch says so even for no_dist=True
def test_state_survives_a_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    loader = make_loader()
    take(loader, 3)
    dcp.save({"data": loader}, checkpoint_id=tmp_path, no_dist=True)
    resumed = make_loader()
    dcp.load({"data": resumed}, checkpoint_id=tmp_path, no_dist=True)
    assert resumed.state_dict() == loader.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 6}, r"run's: seq_len was 5, is 6$"),
        ({"seed": 7}, r"run's: seed was 0, is 7$"),
        ({"val_fraction": 0.1}, r"run's: val_fraction was 0\.0, is 0\.1$"),
        (
            {"val_fraction": 0.5, "split": "val"},
            r"run's: split was train, is val; val_fraction was 0\.0, is 0\.5$",
        ),
        ({"corpus": make_corpus(digest="other")}, r"run's: data was digest, is other$"),
        ({"corpus": make_corpus(tokenizer="json")}, r"run's: tokenizer was bytes, is json$"),
        ({"corpus": make_corpus(21)}, r"run's: documents was 20, is 21; tokens was 210, is 231$"),
    ],
)
def test_state_of_another_stream_is_refused(change: dict[str, Any], message: str) -> None:
    loader = make_loader()
    take(loader, 1)
    other = make_loader(**change)
    with pytest.raises(DataError, match=message):
        other.load_state_dict(loader.state_dict())
    assert other.position == 0


def test_train_and_val_share_no_token() -> None:
    train = make_loader(val_fraction=0.3)
    val = make_loader(val_fraction=0.3, split="val", global_batch=4)
    seen_train, seen_val = set(take(train, 20).unique().tolist()), set(take(val, 20).unique().tolist())
    assert seen_train == set(range(147))
    assert seen_val == set(range(147, 210))


def test_one_pass_is_the_same_each_time_and_moves_nothing() -> None:
    val = make_loader(val_fraction=0.3, split="val", global_batch=4)  # 63 tokens: 12 sequences, 3 batches
    passes = [torch.cat([tokens for tokens, _ in val.one_pass()]) for _ in range(2)]
    assert torch.equal(passes[0].flatten(), torch.arange(147, 207))
    assert torch.equal(passes[0], passes[1])
    assert val.position == 0
    assert val.batches_per_epoch == 3
    assert len(list(val.one_pass(2))) == 2
    assert len(list(val.one_pass(99))) == 3
    ranks = [make_loader(val_fraction=0.3, split="val", dp_rank=rank, dp_world=2) for rank in range(2)]
    assert [len(list(rank.one_pass())) for rank in ranks] == [1, 1]
    # The last of 60 tokens has no label: 11 whole sequences, not 12.
    assert make_loader(val_fraction=0.2858, split="val", global_batch=4).batches_per_epoch == 2


def test_one_pass_over_less_than_a_batch_fills_one() -> None:
    val = make_loader(val_fraction=0.05, split="val", global_batch=8)
    ((tokens, _),) = val.one_pass()
    assert set(tokens.unique().tolist()) == set(range(200, 210))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 210}, "train data is shorter than one sequence: 210 tokens in 20 documents"),
        (
            {"split": "val", "val_fraction": 0.01},
            "val data is shorter than one sequence: 2 tokens in 1 documents",
        ),
        ({"split": "val"}, "no validation data: a fraction of 0.0 of 210 tokens is none"),
        ({"split": "test"}, "split 'test' must be 'train' or 'val'"),
        ({"val_fraction": 1.0}, "must be at least 0 and below 1"),
        ({"vocab_size": 209}, "token id 209, the model's vocabulary ends at 208; raise .* at least 210"),
        ({"dp_world": 5}, "global batch 12 must be a multiple of the 5 data-parallel ranks"),
        ({"global_batch": 0}, "global batch 0 must be a multiple"),
        ({"dp_rank": 2, "dp_world": 2}, "rank 2 must be at least 0 and below 2"),
        ({"dp_rank": -1}, "rank -1 must be at least 0 and below 1"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        make_loader(**options)
    assert "\n" not in str(caught.value)


def test_vocabulary_that_just_fits_is_accepted() -> None:
    assert make_loader(vocab_size=210).position == 0


def test_tokens_and_labels_share_no_memory() -> None:
    for local_batch in (1, 3):
        tokens, labels = next(iter(make_loader(global_batch=local_batch)))
        before = tokens.clone()
        labels.fill_(-100)
        assert torch.equal(tokens, before)
        assert tokens.stride() == labels.stride() == (SEQ_LEN, 1)


def test_an_error_ahead_reaches_the_caller_and_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make_loader()
    make_batch = loader._batch

    def fail_third(start: int) -> Any:
        if start == 2 * GLOBAL_BATCH:
            raise RuntimeError("disk gone")
        return make_batch(start)

    monkeypatch.setattr(loader, "_batch", fail_third)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    with pytest.raises(RuntimeError, match="disk gone"):
        next(iterator)
    assert loader.position == 2 * GLOBAL_BATCH
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("simplefsdp-data")]


def test_each_batch_is_made_once_and_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make_loader(dp_world=2)
    made: list[int] = []
    make_batch = loader._batch

    def record(start: int) -> Any:
        made.append(start)
        return make_batch(start)

    monkeypatch.setattr(loader, "_batch", record)
    take(loader, 4)
    assert made[:4] == [0, 12, 24, 36]
    assert made[4:] in ([], [48])  # the thread may not have come to the last one


def test_an_iterator_left_open_does_not_keep_the_process() -> None:
    script = """
from simplefsdp.llama.corpus import load_corpus
from simplefsdp.llama.data import build_loader
from simplefsdp.llama.tokenizer import ByteTokenizer
iterator = iter(build_loader(load_corpus(ByteTokenizer()), seq_len=64, global_batch=4))
next(iterator)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_builtin_corpus_trains_by_default() -> None:
    tokenizer = ByteTokenizer()
    loader = build_loader(
        load_corpus(tokenizer),
        seq_len=256,
        global_batch=8,
        val_fraction=0.05,
        vocab_size=tokenizer.vocab_size,
    )
    text = "".join(tokenizer.decode(row) for row in take(loader, 4).flatten(0, 1).tolist())
    assert len(text) > 4 * 8 * 200
    assert " the " in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_pinned_on_gpu_machines() -> None:
    tokens, labels = next(iter(make_loader()))
    assert tokens.is_pinned()
    assert labels.is_pinned()
