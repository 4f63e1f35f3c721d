"""What the passes make of a Llama: which collectives, with which members, where, in forward and backward.

One trace serves all tests here: 4 blocks, 64 ranks, one bucket per block.
"""

from __future__ import annotations

import pytest

from inductor_passes import PassConfig
from tests.inductor_passes.toy import BF16, ToyLlama, saved_gathers, tokens, trace, world

WEIGHTS = ("norm1", "wq", "wk", "wv", "wo", "norm2", "w1", "w3", "w2")
LAYERS = [f"layers.{index}.{name}.weight" for index in range(4) for name in WEIGHTS]


@pytest.fixture(scope="module")
def llama():
    config = PassConfig(planner="block", blocks=("layers.*",), profile="h100_sxm")
    with world(64):
        yield trace(ToyLlama(4), tokens(), mp_policy=BF16, config=config)


def short(lines):
    """Schedule lines with the nine weights of a block written as its name."""
    out = []
    for line in lines:
        kind, members, rest = line.split(" ", 2)
        layers = {name.rpartition(".")[0].rpartition(".")[0] for name in members.split("+")}
        full = sorted(members.split("+")) == sorted(
            f"{layer}.{w}.weight" for layer in layers for w in WEIGHTS
        )
        out.append(f"{kind} {layers.pop() if full else members} {rest}")
    return out


def test_one_bucket_per_block_forward(llama):
    """Each block's gather starts one block before the block runs."""
    assert short(llama.lines("forward")) == [
        "all_gather embedding.weight 16384 B bfloat16: start 0, wait 0",
        "all_gather layers.0 82176 B bfloat16: start 0, wait 0",
        "all_gather layers.1 82176 B bfloat16: start 0, wait 8",
        "all_gather layers.2 82176 B bfloat16: start 8, wait 16",
        "all_gather layers.3 82176 B bfloat16: start 16, wait 24",
        "all_gather norm.weight 128 B bfloat16: start 24, wait 32",
        "all_gather head.weight 16384 B bfloat16: start 32, wait 32",
    ]


def test_one_bucket_per_block_backward(llama):
    """Gathers in reverse order, one block ahead; one reduction per block, awaited at the end."""
    assert short(llama.lines("backward")) == [
        "all_gather head.weight 16384 B bfloat16: start 0, wait 1",
        "all_gather norm.weight 128 B bfloat16: start 1, wait 2",
        "reduce_scatter.avg head.weight 32768 B float32: start 1, wait 62",
        "all_gather layers.3 82176 B bfloat16: start 2, wait 3",
        "reduce_scatter.avg norm.weight 256 B float32: start 2, wait 62",
        "all_gather layers.2 82176 B bfloat16: start 3, wait 18",
        "reduce_scatter.avg layers.3 164352 B float32: start 17, wait 62",
        "all_gather layers.1 82176 B bfloat16: start 18, wait 33",
        "reduce_scatter.avg layers.2 164352 B float32: start 32, wait 62",
        "all_gather layers.0 82176 B bfloat16: start 33, wait 48",
        "reduce_scatter.avg layers.1 164352 B float32: start 47, wait 62",
        "reduce_scatter.avg layers.0 164352 B float32: start 62, wait 62",
        "reduce_scatter.avg embedding.weight 32768 B float32: start 62, wait 62",
    ]


def test_each_weight_is_gathered_once_forward_and_once_backward_in_reverse_order(llama):
    assert llama.gathered("forward") == ["embedding.weight", *LAYERS, "norm.weight", "head.weight"]
    again = llama.gathered("backward")
    # A gradient reads every weight but the embedding's.
    assert sorted(again) == sorted([*LAYERS, "norm.weight", "head.weight"])
    assert [name.split(".")[1] for name in again if name in LAYERS] == [str(3 - i // 9) for i in range(36)]
    assert sorted(llama.reduced("backward")) == sorted(llama.gathered("forward"))


def test_no_gathered_value_is_saved(llama):
    assert saved_gathers(llama) == []
