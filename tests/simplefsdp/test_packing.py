"""Packed sequences: every token once per epoch, in document order, whatever the lengths."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplefsdp.llama.corpus import Corpus
from simplefsdp.llama.packing import PackedSequences
from simplefsdp.llama.sources import DataError


def make_corpus(lengths: list[int]) -> Corpus:
    """Documents of these lengths; every token is unique: 0, 1, 2, ... through the corpus."""
    ends = np.cumsum(np.array(lengths, dtype=np.int64))
    return Corpus(np.arange(ends[-1], dtype=np.uint32), ends, int(ends[-1]) - 1, "digest", "bytes")


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[int], int]:
    """Document lengths, zero included, and a seq_len that fits them."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda x: sum(x) > 1))
    return lengths, draw(st.integers(1, sum(lengths) - 1))


@settings(deadline=None)
@given(corpora(), st.integers(0, 2**64 - 1))
def test_unshuffled_inputs_are_the_documents_over_and_over(case: tuple[list[int], int], seed: int) -> None:
    lengths, seq_len = case
    total = sum(lengths)
    packed = PackedSequences(make_corpus(lengths), seq_len, seed, shuffle=False)
    sequences = [packed[index] for index in range(2 * total // seq_len + 1)]
    inputs = np.concatenate([sequence[:-1] for sequence in sequences])
    labels = np.concatenate([sequence[1:] for sequence in sequences])
    assert inputs.tolist() == list(itertools.islice(itertools.cycle(range(total)), len(inputs)))
    assert labels.tolist() == list(itertools.islice(itertools.cycle(range(total)), 1, len(labels) + 1))


@settings(deadline=None)
@given(corpora(), st.integers(0, 2**64 - 1))
def test_shuffled_inputs_hold_each_token_once_per_epoch(case: tuple[list[int], int], seed: int) -> None:
    lengths, seq_len = case
    corpus = make_corpus(lengths)
    total = len(corpus.tokens)
    packed = PackedSequences(corpus, seq_len, seed, shuffle=True)
    # seq_len epochs are a whole number of sequences, as many as there are tokens in one.
    assert packed.first_of(seq_len) == total
    sequences = [packed[index] for index in range(total)]
    inputs = Counter(np.concatenate([sequence[:-1] for sequence in sequences]).tolist())
    assert inputs == dict.fromkeys(range(total), seq_len)

    # Within an epoch, sequences in packed order continue each other, which gives back the epoch's layout.
    for epoch in range(seq_len):
        indices = range(packed.first_of(epoch), packed.first_of(epoch + 1))
        assert {packed.epoch_of(index) for index in indices} <= {epoch}
        order = packed._epoch(epoch).sequences
        assert sorted(order.tolist()) == list(range(len(indices)))
        laid_out = [sequences[indices[place]] for place in np.argsort(order)]
        for before, after in itertools.pairwise(laid_out):
            assert before[-1] == after[0]
        stream = [token for sequence in laid_out for token in sequence[:-1].tolist()]
        ends = {int(end) - 1 for end in corpus.ends}
        for before, after in itertools.pairwise(stream):
            assert after == before + 1 or (before in ends and (after == 0 or after - 1 in ends))


@settings(deadline=None)
@given(corpora(), st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_a_sequence_depends_on_its_index_alone(case: tuple[list[int], int], seed: int, index: int) -> None:
    lengths, seq_len = case
    fresh = PackedSequences(make_corpus(lengths), seq_len, seed, shuffle=True)
    used = PackedSequences(make_corpus(lengths), seq_len, seed, shuffle=True)
    for before in range(max(0, index - 5), index):
        used[before]
    assert used[index].tolist() == fresh[index].tolist()
    epoch = fresh.epoch_of(index)
    assert fresh.first_of(epoch) <= index < fresh.first_of(epoch + 1)


def test_epochs_and_seeds_give_other_orders() -> None:
    corpus = make_corpus([7] * 30)

    def start(seed: int, epoch: int) -> tuple[int, ...]:
        packed = PackedSequences(corpus, 7, seed, shuffle=True)
        return tuple(packed[packed.first_of(epoch) + place][0] for place in range(30))

    orders = [start(seed, epoch) for seed in (0, 1, 2**64 - 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 9
    assert all(sorted(order) == list(range(0, 210, 7)) for order in orders)


def test_one_long_document_does_not_fill_a_batch_in_order() -> None:
    packed = PackedSequences(make_corpus([64 * 100]), 64, 0, shuffle=True)
    starts = [int(packed[index][0]) for index in range(100)]
    followed = sum(after == before + 64 for before, after in itertools.pairwise(starts))
    assert followed < 5


def test_every_order_is_about_as_likely() -> None:
    counts = Counter(
        tuple(PackedSequences(make_corpus([2, 2, 2]), 2, seed, shuffle=True)._epoch(0).documents.tolist())
        for seed in range(600)
    )
    assert len(counts) == 6
    assert all(60 < count < 140 for count in counts.values())  # 100 expected, standard deviation 9


def test_the_order_for_a_seed_never_changes() -> None:
    """Checkpoints rely on it: whoever changes these numbers raises `ORDER_VERSION`."""
    packed = PackedSequences(make_corpus([3, 1, 4, 1, 5]), 4, 1234, shuffle=True)
    assert [packed[index].tolist() for index in range(6)] == [
        [8, 0, 1, 2, 3],
        [3, 9, 10, 11, 12],
        [12, 13, 4, 5, 6],
        [6, 7, 0, 1, 2],
        [12, 13, 4, 5, 6],
        [2, 9, 10, 11, 12],
    ]


def test_data_of_just_one_sequence_works() -> None:
    packed = PackedSequences(make_corpus([5]), 4, 0, shuffle=True)
    assert {tuple(packed[index].tolist()) for index in range(1)} <= {(0, 1, 2, 3, 4), (4, 0, 1, 2, 3)}
    with pytest.raises(
        DataError,
        match=r"shorter than one sequence: 5 tokens in 1 documents, a sequence of seq_len 5 needs 6; lower",
    ):
        PackedSequences(make_corpus([5]), 5, 0, shuffle=True)


@pytest.mark.parametrize(
    ("seq_len", "seed", "message"),
    [
        (0, 0, "seq_len 0 must be at least 1"),
        (4, -1, "data seed -1 must be at least 0 and below"),
        (4, 2**64, "data seed 18446744073709551616 must be at least 0 and below"),
    ],
)
def test_arguments_out_of_range_are_refused(seq_len: int, seed: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackedSequences(make_corpus([9]), seq_len, seed, shuffle=True)
