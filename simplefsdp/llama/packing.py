"""Which tokens each training sequence holds, as a pure function of its global index.

Owns: the order of documents and sequences in every epoch, and cutting packed documents into sequences.
Must not know: ranks, batches, files, torch.

Every epoch lays all documents end to end in a new order, and the epochs follow one another without a seam:

    epoch 0                     epoch 1                     ...
    | doc 4 | doc 0 | doc 2 |...| doc 1 | doc 4 |...
    |--- S ---|--- S ---|--- S ---|--- S ---|           sequence p holds tokens [p*S, p*S + S + 1)

so a sequence may span documents and even two epochs, nothing is padded and nothing dropped. Neighbours share
one token: the last label of one is the first input of the next. Hence each token is an input once per epoch
and a label once per epoch. Sequences are then handed out in a shuffled order within their epoch (those that
start in it), because a long document would otherwise fill whole batches alone.

There is no state: sequence i is the same on every rank, on any number of ranks, at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .corpus import Corpus
from .sources import DataError

# Raise it when the same seed comes to give another order: checkpoints of the old one must not resume.
ORDER_VERSION = 1

_DOCUMENTS, _SEQUENCES = 0, 1  # what a permutation is for; keeps the two independent


@dataclass(frozen=True, eq=False)
class _Epoch:
    """One epoch's order.

    Attributes:
        documents: document numbers in the order they are laid out, shape (documents,).
        starts: token position in the epoch where each of them starts, shape (documents + 1,), the epoch's
            length last.
        sequences: packed position, relative to the first of the epoch, of each sequence handed out.
    """

    documents: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]


class PackedSequences:
    """An endless list of packed sequences.

    An epoch's order is kept for the two most recent epochs: about 16 bytes per document and 8 per sequence
    each.

    Args:
        corpus: the documents.
        seq_len: inputs per sequence, in tokens.
        seed: of the shuffles, 0 <= seed < 2**64.
        shuffle: False keeps documents and sequences in the order of the corpus, in every epoch.

    Raises:
        DataError: the corpus is shorter than one sequence, or an argument is out of range.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int, *, shuffle: bool) -> None:
        if seq_len < 1:
            raise DataError(f"seq_len {seq_len} must be at least 1")
        if not 0 <= seed < 2**64:
            raise DataError(f"data seed {seed} must be at least 0 and below 2**64")
        self.total_tokens = len(corpus.tokens)
        if self.total_tokens < seq_len + 1:
            raise DataError(
                f"data is shorter than one sequence: {self.total_tokens} tokens in {len(corpus.ends)} "
                f"documents, a sequence of seq_len {seq_len} needs {seq_len + 1}; "
                "lower seq_len or give more data"
            )
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        self._begins = np.concatenate([np.zeros(1, dtype=np.int64), corpus.ends[:-1]])
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def epoch_of(self, index: int) -> int:
        """The epoch in which the sequence of global index `index` starts."""
        return index * self.seq_len // self.total_tokens

    def first_of(self, epoch: int) -> int:
        """Global index of the first sequence that starts in `epoch`."""
        return -(-epoch * self.total_tokens // self.seq_len)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Give one sequence.

        Args:
            index: global index, 0 <= index, without an upper end.

        Returns:
            Token ids, shape (seq_len + 1,); inputs are all but the last, labels all but the first.
        """
        epoch = self.epoch_of(index)
        first = self.first_of(epoch)
        packed = first + int(self._epoch(epoch).sequences[index - first])
        out = np.empty(self.seq_len + 1, dtype=np.int64)
        start = packed * self.seq_len - epoch * self.total_tokens
        done = self._copy(epoch, start, out)
        if done < len(out):  # the corpus holds at least seq_len + 1 tokens: one further epoch is enough
            self._copy(epoch + 1, 0, out[done:])
        return out

    def _copy(self, epoch: int, start: int, out: npt.NDArray[np.int64]) -> int:
        """Fill `out` with tokens of one epoch from position `start`; returns how many there were."""
        order = self._epoch(epoch)
        place = int(np.searchsorted(order.starts, start, side="right")) - 1
        done = 0
        while done < len(out) and place < len(order.documents):
            document = order.documents[place]
            source = self._begins[document] + (start + done - order.starts[place])
            count = min(len(out) - done, int(self.corpus.ends[document] - source))
            out[done : done + count] = self.corpus.tokens[source : source + count]
            done += count
            place += 1
        return done

    def _make_epoch(self, epoch: int) -> _Epoch:
        documents = self._order(_DOCUMENTS, epoch, len(self.corpus.ends))
        lengths = (self.corpus.ends - self._begins)[documents]
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        sequences = self._order(_SEQUENCES, epoch, self.first_of(epoch + 1) - self.first_of(epoch))
        return _Epoch(documents, starts, sequences)

    def _order(self, purpose: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
        """A permutation of `range(count)`, drawn for (seed, epoch, purpose).

        Random keys are sorted; a tie, as good as impossible in 64 bits, keeps index order. numpy promises the
        raw output of its bit generators never to change, which it does not for `permutation` and the like.
        """
        if not self.shuffle:
            return np.arange(count, dtype=np.int64)
        generator = np.random.Philox(
            key=np.array([self.seed, epoch], dtype=np.uint64),
            counter=np.array([0, 0, 0, purpose], dtype=np.uint64),
        )
        return np.argsort(generator.random_raw(count), kind="stable").astype(np.int64, copy=False)
