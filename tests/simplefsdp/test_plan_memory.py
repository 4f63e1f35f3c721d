"""What the simulator says of memory, against bytes that are alive when the same code runs; the allocator's model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import simplefsdp
from simplefsdp import simple_fsdp
from simplefsdp.explainer.facts import BEFORE, Memory
from simplefsdp.explainer.runs import Run
from simplefsdp.explainer.schedule import Holding, Stream, Timeline, make_timeline
from simplefsdp.llama.checkpointing import apply_activation_checkpointing, attention_kept, checkpointed
from simplefsdp.llama.config import get_config
from simplefsdp.llama.model import Block, Llama
from simplefsdp.planner.allocator import LARGE_PAGE_BYTES, SMALL_PAGE_BYTES, Segment, reserved_bytes
from simplefsdp.planner.validation import keep_odd_products
from tests.helpers.memory import LiveBytes
from tests.helpers.worlds import fake_process_group

RANKS, MIB = 4, 2**20
PAIR = [Run(0), Run(1, forward=0)]


class AttentionKeepingBlock(Block):
    """What "full" is where it is traced for the CPU, in a run too."""

    def forward(self, x, rope):
        return checkpointed(super().forward, x, rope, attention_kept)


def llama(mode: str) -> Llama:
    """Two layers whose activations are large beside their parameters."""
    model = Llama(dataclasses.replace(get_config("debug"), n_layers=2, max_seq_len=256))
    if mode == "odd products":
        keep_odd_products(model)
    elif mode == "full":
        for layer in model.layers:
            layer.__class__ = AttentionKeepingBlock
    else:
        apply_activation_checkpointing(model, mode)
    return model


def peaks_of_a_run(mode: str, tokens: torch.Tensor) -> tuple[int, int, int]:
    """Most bytes alive in forward, bytes after it, most in backward, without parameters and inputs."""
    with fake_process_group(0, RANKS):
        model = simple_fsdp(llama(mode))
        model(tokens, tokens).backward()
        model.zero_grad()
        with LiveBytes([*model.parameters(), *model.buffers(), tokens]) as live:
            before = live.current_bytes
            loss = model(tokens, tokens)
            forward, between = live.peak_bytes - before, live.current_bytes - before
            live.peak_bytes = live.current_bytes
            loss.backward()
            return forward, between, live.peak_bytes - before


@pytest.mark.parametrize("mode", ["none", "selective", "full", "odd products"])
def test_memory_of_eager_mode_is_what_a_run_holds(mode):
    tokens = torch.zeros(8, 256, dtype=torch.int64)
    report = simplefsdp.explain(llama(mode), tokens, tokens, ranks=RANKS, profile="h100_sxm", eager=True)
    forward, backward = map(make_timeline, report.eager)
    measured = peaks_of_a_run(mode, tokens)
    assert forward.memory[-1].total_bytes == pytest.approx(measured[1], rel=0.005)
    assert forward.peak.total_bytes == pytest.approx(measured[0], rel=0.08)
    assert backward.peak.total_bytes == pytest.approx(measured[2], rel=0.05)
    unread = [value for value in report.eager[1].values if value.unread]
    # Of the odd products q, v, gate, down, the last is kept for nothing: once a layer.
    assert len(unread) == (2 if mode == "odd products" else 0)
    assert all(value.born == BEFORE for value in unread)


def timeline(*holdings: Holding, nodes: int = 20) -> Timeline:
    return Timeline("forward", (), (), (), 0, 0, holdings, nodes)


def held(size_mib: int, begin: int, end: int, **more) -> Holding:
    return Holding(Memory.ACTIVATIONS, size_mib * MIB, begin, end, **more)


def pages(size_mib: int) -> int:
    return -(-size_mib * MIB // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES


def test_a_request_takes_the_smallest_hole_or_grows_the_segment():
    segment = Segment(10)
    at = [segment.allocate(size) for size in (30, 10, 20, 10, 5)]
    assert at == [0, 30, 40, 60, 70]
    segment.free(0, 30)
    segment.free(40, 20)
    assert segment.allocate(15) == 40, "20 is closer than 30"
    assert segment.allocate(40) == 75, "no hole is large enough"
    assert segment.reserved_bytes == 120
    segment.free(30, 10)
    assert segment.allocate(40) == 0, "holes of 30 and 10 touch"
    segment.free(75, 40)
    assert segment.allocate(60) == 75
    assert segment.reserved_bytes == 140


def test_a_tensor_needs_one_piece():
    # Logits in bf16, the same in fp32, log-probabilities, then two gradients while the last of these stays.
    loss = timeline(held(40, 0, 3), held(80, 1, 3), held(80, 2, 6), held(80, 5, 7), held(80, 6, 7))
    live = 3 * 80
    assert reserved_bytes([loss], [Run(0)], [], own_streams=False) == pages(live + 40)


def test_what_forward_leaves_backward_takes_over():
    end = 20
    forward = timeline(held(100, 0, end), held(60, 1, end))
    backward = timeline(held(100, 0, 3, before=True), held(60, 0, 5, before=True), held(40, 4, 6))
    assert reserved_bytes([forward, backward], PAIR, [], own_streams=False) == pages(160)
    loss = timeline(held(100, 0, end), held(60, 1, end))
    unused = timeline(held(100, 0, 3, before=True), held(60, 1, 5))
    assert reserved_bytes([loss, unused], PAIR, [], own_streams=False) == pages(160), (
        "60 goes when forward is over"
    )


def test_what_a_piece_leaves_stays_until_its_own_backward():
    """Two runs of one forward: what the first left is there while the second runs, and its backward."""
    end = 20
    forward = timeline(held(100, 0, end))
    backward = dataclasses.replace(timeline(held(100, 0, 3, before=True), held(60, 2, end)), kind="backward")
    runs = [Run(0), Run(0), Run(1, forward=1), Run(1, forward=0)]
    assert reserved_bytes([forward, backward], runs, [], own_streams=False) == pages(2 * 100 + 60)
    gradient = Holding(Memory.GRADIENTS, 60 * MIB, 2, end)
    backward = dataclasses.replace(timeline(held(100, 0, 3, before=True), gradient), kind="backward")
    # The second gradient takes the place of the activations that the first backward has used up.
    assert reserved_bytes([forward, backward], runs, [], own_streams=False) == pages(2 * 100 + 60)
    assert reserved_bytes([forward, backward], runs[:1] + runs[3:], [], own_streams=False) == pages(100 + 60)


def test_streams_and_small_tensors_have_segments_of_their_own():
    one = held(40, 0, 1)
    other = dataclasses.replace(held(40, 2, 3), stream=Stream.GATHER)
    small = Holding(Memory.ACTIVATIONS, 1000, 0, 19)
    assert reserved_bytes([timeline(one, other)], [Run(0)], [], own_streams=False) == pages(40)
    assert reserved_bytes([timeline(one, other)], [Run(0)], [], own_streams=True) == 2 * pages(40)
    assert (
        reserved_bytes([timeline(one, small)], [Run(0)], [7 * MIB], own_streams=True)
        == pages(47) + SMALL_PAGE_BYTES
    )
