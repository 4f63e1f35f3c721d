"""Activation checkpointing: what is kept, what runs again, and that nothing else changes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from simplefsdp import simple_fsdp
from simplefsdp.llama.checkpointing import CheckpointMode, apply_activation_checkpointing
from simplefsdp.llama.config import LlamaConfig
from simplefsdp.llama.model import Llama
from simplefsdp.llama.shards import local_tensor
from tests.helpers.collectives import counts_by_kind, record_collectives
from tests.helpers.graphs import GraphRecorder
from tests.helpers.memory import LiveBytes
from tests.helpers.meshes import mesh
from tests.helpers.pool import WorkerPool
from tests.helpers.worlds import fake_process_group

MODES: tuple[CheckpointMode, ...] = ("none", "full", "selective")
LAYERS = 2
CONFIG = LlamaConfig(
    dim=32, n_layers=LAYERS, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=61, max_seq_len=32, init_std=0.1
)
MATMUL = torch.ops.aten.mm.default
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
HEAD_AND_BLOCKS = 1 + 7 * LAYERS
# Products that run again in backward: all of a block's but down, whose output nothing needs; or q, v and gate.
RERUN = {"none": 0, "full": 6 * LAYERS, "selective": 3 * LAYERS}
# A block whose output a recorded graph keeps for the final norm computes it again to the end: the last one.
RERUN_COMPILED = {"none": 0, "full": 6 * LAYERS + 1, "selective": 3 * LAYERS + 1}


class OpCounter(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[OpOverload] = Counter()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def build(mode: CheckpointMode, **changes: Any) -> Llama:
    torch.manual_seed(0)
    model = Llama(dataclasses.replace(CONFIG, **changes))
    apply_activation_checkpointing(model, mode)
    return model


def batch() -> tuple[Tensor, Tensor]:
    stream = torch.randint(CONFIG.vocab_size, (2, 33), generator=torch.Generator().manual_seed(1))
    return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()


def gradients(model: Llama) -> list[Tensor]:
    return [cast(Tensor, param.grad) for param in model.parameters()]


@pytest.fixture(scope="module")
def reference() -> tuple[Tensor, list[Tensor]]:
    model = build("none")
    loss = model(*batch())
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("mode", MODES)
def test_same_numbers_and_the_stated_recomputation(
    mode: CheckpointMode, reference: tuple[Tensor, list[Tensor]]
) -> None:
    model = build(mode)
    with OpCounter() as forward:
        loss = model(*batch())
    with OpCounter() as backward:
        loss.backward()
    assert torch.equal(loss, reference[0])
    for ours, theirs in zip(gradients(model), reference[1], strict=True):
        assert torch.equal(ours, theirs)
    assert forward.counts[MATMUL] == HEAD_AND_BLOCKS
    assert backward.counts[MATMUL] == 2 * HEAD_AND_BLOCKS + RERUN[mode]
    assert backward.counts[ATTENTION] == (LAYERS if mode == "full" else 0)


@pytest.mark.parametrize("mode", MODES)
def test_compiled_as_one_graph_with_the_stated_recomputation(
    mode: CheckpointMode, reference: tuple[Tensor, list[Tensor]]
) -> None:
    model, recorder = build(mode), GraphRecorder()
    compiled = torch.compile(model, fullgraph=True, backend=recorder)
    for _ in range(3):
        model.zero_grad()
        loss = compiled(*batch())
        loss.backward()
    assert recorder.compile_count == 1
    assert torch.equal(loss, reference[0])
    for ours, theirs in zip(gradients(model), reference[1], strict=True):
        assert torch.equal(ours, theirs)
    [forward], [backward] = recorder.forward, recorder.backward
    assert _count(forward, MATMUL) == HEAD_AND_BLOCKS
    assert _count(backward, MATMUL) == 2 * HEAD_AND_BLOCKS + RERUN_COMPILED[mode]
    assert _count(backward, ATTENTION) == 0


def _count(graph: torch.fx.GraphModule, op: OpOverload) -> int:
    return sum(node.target is op for node in graph.graph.nodes)


def test_each_mode_keeps_what_it_says() -> None:
    kept = {}
    for mode in MODES:
        model = build(mode)
        with LiveBytes((*model.parameters(), *model.buffers())) as live:
            before = live.current_bytes
            loss = model(*batch())
            kept[mode] = live.current_bytes - before
            del loss
    tokens, element = 2 * 32, 4
    # Per block: its input. Then q, k, v, o and the products of the feed-forward: half of each kind in number.
    block_input = tokens * CONFIG.dim * element
    attention_output = tokens * (CONFIG.dim + CONFIG.n_heads) * element  # with the logarithm of the row sums
    every_second_product = tokens * (CONFIG.dim // 2 + CONFIG.dim + CONFIG.ffn_dim) * element  # k, o, up
    selective = kept["full"] + LAYERS * (attention_output + every_second_product)
    assert kept["selective"] == selective
    around_the_blocks = kept["full"] - LAYERS * block_input
    assert 0 < around_the_blocks < kept["none"]
    assert kept["none"] - kept["full"] > 4 * (kept["selective"] - kept["full"]) / 3


@pytest.mark.parametrize("mode", MODES)
def test_names_copies_and_pickles_stay(mode: CheckpointMode) -> None:
    model, plain = build(mode), Llama(CONFIG)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with OpCounter() as backward:
            twin(*batch()).backward()
        assert backward.counts[MATMUL] == 2 * HEAD_AND_BLOCKS + HEAD_AND_BLOCKS + RERUN[mode]


def test_a_later_choice_replaces_an_earlier_one() -> None:
    model = build("full")
    apply_activation_checkpointing(model, "none")
    loss = model(*batch())
    with OpCounter() as backward:
        loss.backward()
    assert backward.counts[MATMUL] == 2 * HEAD_AND_BLOCKS


def test_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"must be one of none, full, selective, got 'half'"):
        apply_activation_checkpointing(Llama(CONFIG), cast(CheckpointMode, "half"))


def test_blocks_of_another_class_are_refused() -> None:
    model = Llama(CONFIG)
    model.layers[1] = torch.nn.Identity()
    with pytest.raises(TypeError, match=r"layers.1 is a Identity, not a Block: .* before simple_fsdp"):
        apply_activation_checkpointing(model, "full")


def _train_sharded(rank: int, world_size: int, mode: CheckpointMode) -> None:
    tokens, labels = batch()
    outcomes = []
    for kind, compiled in (("none", False), (mode, False), (mode, True)):
        model = build(cast(CheckpointMode, kind), n_layers=1)
        simple_fsdp(model, mesh(world_size))
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        loss = run(tokens[rank : rank + 1], labels[rank : rank + 1])
        loss.backward()
        outcomes.append([loss.detach(), *(local_tensor(grad) for grad in gradients(model))])
    for outcome in outcomes[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(outcome, outcomes[0], strict=True))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_sharded_models_train_the_same_in_every_mode(
    workers: Callable[[int], WorkerPool], mode: CheckpointMode
) -> None:
    workers(2).run(_train_sharded, mode, timeout=150)


@pytest.mark.parametrize("mode", MODES)
def test_recomputation_gathers_sharded_parameters_again(mode: CheckpointMode) -> None:
    with fake_process_group(0, 2):
        model = build(mode)
        simple_fsdp(model)
        with record_collectives() as forward:
            loss = model(*batch())
        with record_collectives() as backward:
            loss.backward()
    weights = len(list(model.parameters()))
    assert counts_by_kind(forward)["all_gather"] == weights
    assert counts_by_kind(backward)["reduce_scatter"] == weights
    # All but the embedding, once: what recomputation gathers serves the gradients as well.
    assert counts_by_kind(backward)["all_gather"] == weights - 1
