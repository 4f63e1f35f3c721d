"""Batches for one data-parallel rank, endless and resumable.

Owns: the rank's part of each global batch, prefetching, the position and its state.
Must not know: how sequences are packed, gradient accumulation, devices beyond pinned memory.

Batch k of a run holds the sequences [k*G, (k+1)*G) of `PackedSequences`, G the global batch; rank r of W
takes the r-th of W equal parts. The position counts sequences, so a run may resume on another number of
ranks, or with another global batch, and goes on exactly where it stopped. All ranks hold the same state.

torch's DataLoader and torchdata's StatefulDataLoader are not used: their state is per rank and worker, so it
ties a checkpoint to the number of ranks, and their worker processes serve datasets whose items are expensive.
Here an item is a copy out of an array, and the whole state is one integer; one thread that works ahead is
enough.

    corpus = load_corpus(tokenizer, ["books/*.jsonl"])
    loader = build_loader(corpus, seq_len=2048, global_batch=64, dp_rank=rank, dp_world=world)
    for tokens, labels in loader: ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch

from .corpus import Corpus
from .packing import ORDER_VERSION, PackedSequences
from .sources import DataError

Batch = tuple[torch.Tensor, torch.Tensor]

# Batches made ahead of the one in use: one ready, one in the making.
PREFETCH_BATCHES = 2


class Loader:
    """Endless batches of one rank; see `build_loader`.

    Iterating hands out batches from the current position on; a second `iter()` goes on, it does not start
    over.

    Attributes:
        sequences: the packed sequences the batches are made of.
        fingerprint: what the stream depends on besides the seed; the same on all ranks.
        global_batch: sequences per batch over all ranks.
        local_batch: sequences per batch on this rank.
        position: global index of the next sequence to hand out; counts batches handed out, not those
            prefetched.
    """

    def __init__(
        self,
        sequences: PackedSequences,
        fingerprint: dict[str, Any],
        *,
        global_batch: int,
        dp_rank: int,
        dp_world: int,
        pin_memory: bool,
    ) -> None:
        self.sequences = sequences
        self.fingerprint = fingerprint
        self.global_batch = global_batch
        self.local_batch = global_batch // dp_world
        self.position = 0
        self._first_row = dp_rank * self.local_batch
        self._pin_memory = pin_memory

    @property
    def epoch(self) -> int:
        """The epoch, from 0, in which the next sequence starts."""
        return self.sequences.epoch_of(self.position)

    @property
    def batches_per_epoch(self) -> int:
        """Global batches of whole sequences in one epoch, at least 1."""
        whole = (self.sequences.total_tokens - 1) // self.sequences.seq_len
        return max(1, whole // self.global_batch)

    def __iter__(self) -> Iterator[Batch]:
        """Hand out batches without end.

        Yields:
            (tokens, labels), int64 CPU tensors of shape (local_batch, seq_len), contiguous; labels[i, t] is
            the token after tokens[i, t].
        """
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="simplefsdp-data") as worker:
            ahead: deque[tuple[int, Future[Batch]]] = deque()
            try:
                while True:
                    if ahead and ahead[0][0] != self.position:  # load_state_dict moved the position
                        ahead.clear()
                    while len(ahead) < PREFETCH_BATCHES:
                        start = self.position + len(ahead) * self.global_batch
                        ahead.append((start, worker.submit(self._batch, start)))
                    _, batch = ahead.popleft()
                    ready = self._pinned(batch.result())
                    self.position += self.global_batch
                    yield ready
            finally:
                worker.shutdown(cancel_futures=True)

    def one_pass(self, max_batches: int | None = None) -> Iterator[Batch]:
        """Hand out the first epoch's batches, from its start; the position stays as it is.

        Meant for validation: with `split="val"` each pass gives the same batches. Sequences short of a whole
        batch at the end are left out; data of less than one batch is repeated to fill one.

        Args:
            max_batches: stop after this many; None for all `batches_per_epoch`.

        Yields:
            As for iterating; the same number of batches on each rank.
        """
        count = self.batches_per_epoch if max_batches is None else min(max_batches, self.batches_per_epoch)
        for number in range(count):
            yield self._pinned(self._batch(number * self.global_batch))

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream and what the stream depends on: plain values, equal on all ranks."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.sequences.seed,
            "fingerprint": dict(self.fingerprint),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; an iterator in use goes on from there.

        Args:
            state: from `state_dict`, of a run on any number of ranks.

        Raises:
            DataError: the state is of another stream (data, tokenizer, sequence length, split, seed); says
                what differs. The position is then unchanged.
        """
        saved = {"seed": state["seed"], **state["fingerprint"]}
        current = {"seed": self.sequences.seed, **self.fingerprint}
        changes = [
            f"{name} was {saved.get(name)}, is {current.get(name)}"
            for name in dict.fromkeys([*saved, *current])
            if saved.get(name) != current.get(name)
        ]
        if changes:
            raise DataError(f"the checkpoint's data stream is not this run's: {'; '.join(changes)}")
        self.position = int(state["position"])

    def _batch(self, start: int) -> Batch:
        """This rank's rows of the global batch that begins at sequence `start`; a pure function."""
        first = start + self._first_row
        rows = np.stack([self.sequences[index] for index in range(first, first + self.local_batch)])
        # numpy copies on this thread; torch would start a second team of OpenMP threads beside the trainer's.
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def _pinned(self, batch: Batch) -> Batch:
        """The batch in page-locked memory where asked for; runs on the caller's thread, its device set."""
        if not self._pin_memory:
            return batch
        tokens, labels = batch
        return tokens.pin_memory(), labels.pin_memory()


def build_loader(
    corpus: Corpus,
    *,
    seq_len: int,
    global_batch: int,
    dp_rank: int = 0,
    dp_world: int = 1,
    seed: int = 0,
    split: Literal["train", "val"] = "train",
    val_fraction: float = 0.0,
    vocab_size: int | None = None,
    pin_memory: bool | None = None,
) -> Loader:
    """Make the batches of one rank from a corpus.

    Attention across the documents of a sequence is not masked, and no label is left out.

    Args:
        corpus: from `load_corpus`.
        seq_len: tokens per sequence.
        global_batch: sequences per batch over all data-parallel ranks. For gradient accumulation give what
            one optimizer step takes, and cut the local batch into micro-batches: the order then does not
            depend on it.
        dp_rank: this rank's number among the data-parallel ranks.
        dp_world: number of data-parallel ranks.
        seed: of the shuffles; the same on all ranks.
        split: "train" is shuffled, anew for each epoch; "val" keeps the order of the corpus.
        val_fraction: share of the tokens, at the end of the corpus, set aside for "val".
        vocab_size: the model's; ids are checked against it. None for no check.
        pin_memory: put batches in page-locked memory; None to do so where CUDA is available.

    Returns:
        The loader, at position 0.

    Raises:
        DataError: data shorter than one sequence, a token id the model does not have, a global batch that the
            ranks cannot share evenly, or an argument out of range.
    """
    if split not in ("train", "val"):
        raise DataError(f"split {split!r} must be 'train' or 'val'")
    if not 0 <= dp_rank < dp_world:
        raise DataError(f"data-parallel rank {dp_rank} must be at least 0 and below {dp_world}")
    if global_batch < 1 or global_batch % dp_world:
        raise DataError(
            f"global batch {global_batch} must be a multiple of the {dp_world} data-parallel ranks"
        )
    if vocab_size is not None and corpus.max_id >= vocab_size:
        raise DataError(
            f"the data holds token id {corpus.max_id}, the model's vocabulary ends at {vocab_size - 1}; "
            f"raise the vocabulary size to at least {corpus.max_id + 1} or choose another tokenizer"
        )
    train, val = corpus.split(val_fraction)
    if split == "val" and not len(val.tokens):
        raise DataError(
            f"no validation data: a fraction of {val_fraction} of {len(corpus.tokens)} tokens is none"
        )
    try:
        sequences = PackedSequences(
            train if split == "train" else val, seq_len, seed, shuffle=split == "train"
        )
    except DataError as error:
        raise DataError(f"{split} {error}") from error
    fingerprint = {
        "data": corpus.digest,
        "documents": len(corpus.ends),
        "tokens": len(corpus.tokens),
        "tokenizer": corpus.tokenizer,
        "seq_len": seq_len,
        "split": split,
        "val_fraction": val_fraction,
        "order_version": ORDER_VERSION,
    }
    if pin_memory is None:
        pin_memory = torch.cuda.is_available()
    return Loader(
        sequences,
        fingerprint,
        global_batch=global_batch,
        dp_rank=dp_rank,
        dp_world=dp_world,
        pin_memory=pin_memory,
    )
