"""The Llama model against Hugging Face's, and what training needs of it: dtypes, meta device, compile, counting."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from simplefsdp import sharded_parameters, simple_fsdp
from simplefsdp.llama.config import CONFIGS, LlamaConfig, RopeScaling, get_config
from simplefsdp.llama.flops import find_peak_flops, flops_per_token, peak_flops
from simplefsdp.llama.model import IGNORE_INDEX, Llama, RotaryEmbedding, rotary_frequencies
from simplefsdp.llama.shards import local_slices, local_tensor
from tests.helpers.graphs import GraphRecorder
from tests.helpers.meshes import mesh
from tests.helpers.pool import WorkerPool

# With head size 8 and base 100, one frequency is kept, two are interpolated, one is slowed fully.
SCALING = RopeScaling(factor=4.0, original_max_seq_len=32)
TINY = LlamaConfig(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=48,
    vocab_size=61,
    max_seq_len=40,
    rope_theta=100.0,
    rope_scaling=SCALING,
    init_std=0.1,
)


def tiny(**changes: Any) -> Llama:
    torch.manual_seed(7)
    return Llama(dataclasses.replace(TINY, **changes))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    stream = torch.randint(TINY.vocab_size, (2, 33), generator=torch.Generator().manual_seed(seed))
    return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()


# ---- configuration


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dim": 0}, "LlamaConfig.dim"),
        ({"n_layers": 1.5}, "LlamaConfig.n_layers"),
        ({"vocab_size": True}, "LlamaConfig.vocab_size"),
        ({"n_heads": 3}, "LlamaConfig.n_heads"),
        ({"n_heads": 32, "n_kv_heads": 32}, "must be even"),
        ({"n_kv_heads": 3}, "LlamaConfig.n_kv_heads"),
        ({"norm_eps": 0.0}, "LlamaConfig.norm_eps"),
        ({"rope_theta": float("nan")}, "LlamaConfig.rope_theta"),
        ({"init_std": -1.0}, "LlamaConfig.init_std"),
    ],
)
def test_config_refuses_impossible_values_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"factor": 0.5}, "factor"),
        ({"factor": 8, "low_freq_factor": 0.0}, "low_freq_factor"),
        ({"factor": 8, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"factor": 8, "original_max_seq_len": 0}, "original_max_seq_len"),
    ],
)
def test_rope_scaling_refuses_impossible_values_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"RopeScaling.{named}"):
        RopeScaling(**fields)


def test_unknown_config_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'7b'; available: debug, 1b, 8b, 70b, 405b"):
        get_config("7b")


@pytest.mark.parametrize(
    # As the model cards of the released checkpoints give them.
    ("name", "n_parameters"),
    [("1b", 1_235_814_400), ("8b", 8_030_261_248), ("70b", 70_553_706_496), ("405b", 405_853_388_800)],
)
def test_published_parameter_counts(name: str, n_parameters: int) -> None:
    assert get_config(name).n_parameters == n_parameters


@pytest.mark.parametrize("name", ["debug", "1b", "8b"])
def test_parameter_count_is_that_of_the_model(name: str) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        model = Llama(config)
    assert sum(p.numel() for p in model.parameters()) == config.n_parameters


# ---- mathematics


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None, "n_kv_heads": 4},
        {"n_kv_heads": 1, "tied_head": True},
    ],
    ids=["grouped-scaled", "multi-head-unscaled", "one-kv-head-tied"],
)
def test_logits_and_gradients_equal_hugging_face(changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny(**changes)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)  # norms too
    config = model.config
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=config.n_kv_heads,
            intermediate_size=48,
            vocab_size=61,
            max_position_embeddings=40,
            rms_norm_eps=config.norm_eps,
            rope_theta=100.0,
            rope_scaling=rope,
            tie_word_embeddings=config.tied_head,
        )
    )
    state = {
        name if name.startswith("lm_head") else f"model.{name}": p for name, p in model.state_dict().items()
    }
    assert theirs.load_state_dict(state).missing_keys == []

    tokens, labels = batch()
    logits, expected = model(tokens), theirs(tokens).logits
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)

    model(tokens, labels).backward()
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    their_grads = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, their_grads[name], rtol=1e-4, atol=1e-6, msg=name)


def test_rope_scaling_keeps_fast_slows_slow_and_blends_between() -> None:
    plain = rotary_frequencies(8, 100.0, None)
    torch.testing.assert_close(plain, torch.tensor([1.0, 100**-0.25, 0.1, 100**-0.75]))
    ratio = rotary_frequencies(8, 100.0, SCALING) / plain
    turns = 32 * plain / (2 * math.pi)
    assert turns.tolist() == pytest.approx([5.09, 1.61, 0.51, 0.16], abs=0.01)
    blend = (turns[1].item() - 1) / 3
    assert ratio.tolist() == pytest.approx([1, blend + (1 - blend) / 4, 0.25, 0.25], rel=1e-5)


def test_attention_sees_no_future_token() -> None:
    model, (tokens, _) = tiny(), batch()
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % TINY.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_loss_is_the_mean_over_counted_labels() -> None:
    model, (tokens, labels) = tiny(), batch()
    labels[0, 3:] = IGNORE_INDEX
    log_probs = model(tokens).log_softmax(-1)
    counted = labels != IGNORE_INDEX
    expected = -log_probs[counted].gather(1, labels[counted][:, None]).mean()
    torch.testing.assert_close(model(tokens, labels), expected)


def test_sequence_longer_than_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match=r"41 exceeds LlamaConfig.max_seq_len 40"):
        tiny()(torch.zeros(1, 41, dtype=torch.int64))


# ---- initialisation, dtypes, devices


def test_initial_weights() -> None:
    model = tiny(dim=128, ffn_dim=256, vocab_size=300, init_std=0.02)
    for name, param in model.named_parameters():
        if "norm" in name:
            assert param.eq(1).all()
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.02 / math.sqrt(4) if residual else 0.02
            assert param.std().item() == pytest.approx(expected, rel=0.05), name
    uniform = math.log(300)
    assert model(torch.arange(40)[None], torch.arange(1, 41)[None]).item() == pytest.approx(uniform, abs=0.1)


def test_init_weights_depends_on_the_generator_alone() -> None:
    one, other = tiny(), tiny()
    one.init_weights(torch.Generator().manual_seed(3))
    torch.manual_seed(99)
    other.init_weights(torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    other.init_weights()
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_built_on_meta_and_materialised_equals_built_at_once(tied: bool) -> None:
    expected = tiny(tied_head=tied)
    with torch.device("meta"):
        model = Llama(dataclasses.replace(TINY, tied_head=tied))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    assert torch.equal(model.rope.cos, expected.rope.cos)
    model.rope.cos.zero_()  # as after a materialisation that bypasses conversion hooks
    model.init_weights(torch.Generator().manual_seed(5))
    expected.init_weights(torch.Generator().manual_seed(5))
    tokens, _ = batch()
    assert torch.equal(model(tokens), expected(tokens))
    assert (model.lm_head.weight is model.embed_tokens.weight) is tied
    assert "rope.cos" not in model.state_dict()


def test_half_precision_parameters_give_half_precision_activations_but_exact_tables() -> None:
    model = tiny().to(torch.bfloat16)
    table = RotaryEmbedding(TINY).cos
    assert model.rope.cos.dtype == torch.float32
    assert torch.equal(model.rope.cos, table)
    tokens, labels = batch()
    blocks: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: blocks.append(out))
    logits = model(tokens)
    assert {out.dtype for out in blocks} == {torch.bfloat16}
    assert logits.dtype == torch.bfloat16
    assert model(tokens, labels).dtype == torch.float32
    # bfloat16 has 8 bits: rounding at every step moves logits of size 1 by a few hundredths.
    torch.testing.assert_close(logits.float(), tiny()(tokens), rtol=0, atol=0.05)


def test_rotation_rounds_half_precision_once() -> None:
    x = torch.randn(1, 40, 3, 8)
    rope = RotaryEmbedding(TINY)
    assert torch.equal(rope(x.bfloat16()), rope(x.bfloat16().float()).bfloat16())


def test_deepcopy_is_independent_and_keeps_the_tie() -> None:
    model = tiny(tied_head=True)
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.embed_tokens.weight
    assert twin.lm_head.weight is not model.lm_head.weight


# ---- compiler


def test_compiles_to_one_graph_without_recompiles() -> None:
    model, reference = tiny(), tiny()
    recorder = GraphRecorder()
    compiled = torch.compile(model, fullgraph=True, backend=recorder)
    for step in range(3):
        tokens, labels = batch(step)
        loss = compiled(tokens, labels)
        loss.backward()
        expected = reference(tokens, labels)
        expected.backward()
        assert torch.equal(loss, expected)
    assert recorder.compile_count == 1
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


# Dynamo looks at the .grad of every input, also of the activation that a compiled block receives.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_equal_blocks_compile_once() -> None:
    model = tiny(n_layers=4)
    expected = tiny(n_layers=4)
    recorder = GraphRecorder()
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=recorder)
    tokens, _ = batch()
    assert torch.equal(model(tokens), expected(tokens))
    assert recorder.compile_count == 1


# ---- sharded


def _initialise_sharded(rank: int, world_size: int, tied: bool) -> None:
    config = dataclasses.replace(TINY, tied_head=tied)
    with torch.device("meta"):
        model = Llama(config)
    simple_fsdp(model, mesh(world_size))
    model.to_empty(device="cpu")
    with sharded_parameters(model):
        model.init_weights(torch.Generator().manual_seed(11))
    expected = Llama(config)
    expected.init_weights(torch.Generator().manual_seed(11))
    for (name, param), full in zip(model.named_parameters(), expected.parameters(), strict=True):
        slices = local_slices(param)
        assert slices is not None
        assert torch.equal(local_tensor(param), full[slices]), name
    tokens, _ = batch(rank)
    assert torch.equal(model(tokens), expected(tokens))


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_initialisation_equals_unsharded(workers: Callable[[int], WorkerPool], tied: bool) -> None:
    workers(2).run(_initialise_sharded, tied)


# ---- counting operations


@pytest.mark.parametrize("tied", [False, True])
def test_flops_per_token_equals_what_runs(tied: bool) -> None:
    model, (tokens, labels) = tiny(n_kv_heads=4, tied_head=tied), batch()
    # Plain matrix products in attention, which the counter counts over the whole square, as the formula does.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(tokens, labels).backward()
    per_token = flops_per_token(model.config, tokens.shape[1])
    assert counted.get_total_flops() == per_token * tokens.numel()


@pytest.mark.parametrize(
    ("device_name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_peak_flops_by_name(device_name: str, expected: float | None) -> None:
    assert find_peak_flops(device_name) == expected


def test_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
