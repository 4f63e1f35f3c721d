"""Exchange with Hugging Face: what they write we load, what we write they load, bit for bit, sharded or not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from simplefsdp import simple_fsdp
from simplefsdp.llama import hf
from simplefsdp.llama.config import CONFIGS, LlamaConfig, RopeScaling
from simplefsdp.llama.hf import config_from_hf, load_hf, plan_files, save_hf
from simplefsdp.llama.hf_config import config_to_hf
from simplefsdp.llama.model import Llama
from simplefsdp.llama.shards import copy_full_, local_slices, local_tensor
from tests.helpers.memory import LiveBytes
from tests.helpers.meshes import mesh
from tests.helpers.pool import WorkerError, WorkerPool

# Sizes that no number of ranks divides: 33 and 61 rows over 2 ranks are uneven.
CONFIG = LlamaConfig(
    dim=24,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=33,
    vocab_size=61,
    max_seq_len=40,
    rope_theta=100.0,
    rope_scaling=RopeScaling(factor=4.0, original_max_seq_len=32),
    init_std=0.1,
)
TIED = dataclasses.replace(CONFIG, tied_head=True, rope_scaling=None)
BOTH = pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
SEVERAL_FILES = 10_000


def build(config: LlamaConfig = CONFIG, seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return Llama(config)


def tokens() -> Tensor:
    return torch.randint(CONFIG.vocab_size, (2, 32), generator=torch.Generator().manual_seed(1))


def equal(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == name_2 and torch.equal(a, b) for (name, a), (name_2, b) in pairs)


# ---- with transformers


@BOTH
@pytest.mark.parametrize("max_shard_bytes", [SEVERAL_FILES, 10**9], ids=["several-files", "one-file"])
def test_transformers_loads_what_we_write(config: LlamaConfig, max_shard_bytes: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = build(config)
    save_hf(model, tmp_path / "new" / "export", max_shard_bytes)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new" / "export", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) is config.tied_head
    torch.testing.assert_close(theirs(tokens()).logits, model(tokens()), rtol=0, atol=1e-5)


@BOTH
def test_we_load_what_transformers_writes(config: LlamaConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_to_hf(config, "float32")))
    theirs.save_pretrained(tmp_path, max_shard_size=SEVERAL_FILES)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert config_from_hf(tmp_path) == config
    model = build(config)
    load_hf(model, tmp_path)
    torch.testing.assert_close(model(tokens()), theirs(tokens()).logits, rtol=0, atol=1e-5)


# ---- weights


@BOTH
def test_round_trip_is_exact(config: LlamaConfig, tmp_path: Path) -> None:
    model, other = build(config, seed=0), build(config, seed=1)
    save_hf(model, tmp_path, SEVERAL_FILES)
    load_hf(torch.compile(other, backend="eager"), tmp_path)
    assert equal(model, other)
    assert (other.lm_head.weight is other.embed_tokens.weight) is config.tied_head


def test_files_keep_within_the_limit_and_the_index_names_them(tmp_path: Path) -> None:
    save_hf(build(), tmp_path, SEVERAL_FILES)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    total = 0
    for file in files:
        tensors = load_file(tmp_path / file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= SEVERAL_FILES
        assert {name for name, listed in index["weight_map"].items() if listed == file} == tensors.keys()
        total += size
    assert index["metadata"]["total_size"] == total == 4 * CONFIG.n_parameters


def test_plan_fills_files_in_order_and_gives_large_tensors_their_own() -> None:
    files = plan_files({"a": 4, "b": 6, "c": 1, "d": 30, "e": 2}, max_shard_bytes=10)
    assert list(files.values()) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(files)[2] == "model-00003-of-00004.safetensors"
    assert plan_files({"a": 4, "b": 6}, max_shard_bytes=10) == {"model.safetensors": ["a", "b"]}


def test_export_in_another_dtype(tmp_path: Path) -> None:
    model, other = build(seed=0), build(seed=1)
    save_hf(model, tmp_path, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    load_hf(other, tmp_path)
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    assert equal(other, model.to(torch.bfloat16).float())


def test_new_export_replaces_the_old_weights_and_nothing_else(tmp_path: Path) -> None:
    save_hf(build(seed=0), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    save_hf(build(seed=1), tmp_path, SEVERAL_FILES)
    other = build(seed=2)
    load_hf(other, tmp_path)
    assert equal(other, build(seed=1))
    assert not (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "tokenizer.json").exists()
    assert not (tmp_path / ".incoming").exists()


def test_failed_export_keeps_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf(build(seed=0), tmp_path)

    def fail(path: Path, content: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(hf, "_write_json", fail)
    with pytest.raises(OSError, match=r"cannot export to .*: no space left"):
        save_hf(build(seed=1), tmp_path, SEVERAL_FILES)
    other = build(seed=2)
    load_hf(other, tmp_path)
    assert equal(other, build(seed=0))


# ---- refusals


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: [t.pop(name) for name in list(t) if "mlp" in name],
            r"lacks model.layers.0.mlp.down_proj.weight, .* and 1 more",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(24)}),
            r"does not have: model.layers.0.self_attn.q_proj.bias",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(25)}),
            r"shapes differ .* model.norm.weight \(file \(25,\), model \(24,\)\)",
        ),
        (lambda t: t.pop("lm_head.weight"), r"lacks lm_head.weight; .* use LlamaConfig\(tied_head=True\)"),
    ],
    ids=["missing", "unknown", "shape", "tied-checkpoint"],
)
def test_checkpoint_that_does_not_fit_changes_nothing(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    save_hf(build(seed=0), tmp_path)
    rewrite(tmp_path, change)
    model = build(seed=1)
    with pytest.raises(ValueError, match=message):
        load_hf(model, tmp_path)
    assert equal(model, build(seed=1))


def test_stored_copy_of_a_tied_head_is_accepted_only_if_it_is_one(tmp_path: Path) -> None:
    model, other = build(TIED, seed=0), build(TIED, seed=1)
    save_hf(model, tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": model.embed_tokens.weight.detach().clone()}))
    load_hf(other, tmp_path)
    assert equal(model, other)
    rewrite(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match=r"differ in the checkpoint.* use LlamaConfig\(tied_head=False\)"):
        load_hf(other, tmp_path)


def test_rotary_frequencies_in_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    model, other = build(seed=0), build(seed=1)
    save_hf(model, tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}))
    load_hf(other, tmp_path)
    assert equal(model, other)


def test_unreadable_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"holds neither model.safetensors nor model.safetensors.index"
    ):
        load_hf(build(), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        config_from_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        load_hf(build(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"lists gone.safetensors, which does not exist"):
        load_hf(build(), tmp_path)
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"is not an index of safetensors files"):
        load_hf(build(), tmp_path)


def test_models_that_cannot_take_or_give_weights_are_refused(tmp_path: Path) -> None:
    save_hf(build(), tmp_path)
    with torch.device("meta"):
        unmaterialised = Llama(CONFIG)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is on the meta device; call model.to_empty"):
        load_hf(unmaterialised, tmp_path)
    with pytest.raises(TypeError, match="expected a Llama, got a Linear"):
        save_hf(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ValueError, match="max_shard_bytes must be positive, got 0"):
        save_hf(build(), tmp_path, 0)


# ---- config.json


@pytest.mark.parametrize("name", CONFIGS)
def test_config_round_trip(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(CONFIGS[name], "bfloat16")))
    assert config_from_hf(tmp_path) == CONFIGS[name]


def test_config_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 33,
        "vocab_size": 61,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    sparse = config_from_hf(tmp_path)
    transformers.LlamaConfig(**sizes).save_pretrained(tmp_path)
    assert config_from_hf(tmp_path) == sparse


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, r"model_type must be 'llama', got 'mistral'"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported, only 'silu'"),
        ({"attention_bias": True}, r"attention_bias True is not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config .* is not supported"),
        ({"head_dim": 64}, r"head_dim 64 is not supported, .* \(6\)"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, r"rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, r"is missing low_freq_factor, high_freq"),
        ({"num_key_value_heads": 3}, r"LlamaConfig.n_kv_heads \(3\) must divide"),
    ],
)
def test_unsupported_configs_are_refused_by_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_to_hf(CONFIG, "float32") | change))
    with pytest.raises(ValueError, match=message) as caught:
        config_from_hf(tmp_path)
    assert str(path) in str(caught.value)


def test_incomplete_or_broken_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    with pytest.raises(
        ValueError, match=r"missing num_hidden_layers, num_attention_heads, intermediate_size"
    ):
        config_from_hf(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        config_from_hf(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"model_type must be 'llama', got None"):
        config_from_hf(tmp_path)


# ---- sharded


def sharded(config: LlamaConfig, device_mesh: DeviceMesh, tensor_parallel: DeviceMesh | None = None) -> Llama:
    """A sharded model whose weights are all NaN."""
    model = build(config)
    if tensor_parallel is not None:
        plan: dict[str, Any] = {}
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            plan[f"layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"layers.*.{name}"] = RowwiseParallel()
        parallelize_module(model, tensor_parallel, plan)
    simple_fsdp(model, device_mesh)
    with torch.no_grad():
        for param in model.parameters():
            local_tensor(param).fill_(float("nan"))
    return model


def _round_trip(
    rank: int, world_size: int, shape: tuple[int, ...], config: LlamaConfig, directory: Path
) -> None:
    expected = build(config, seed=3)
    if rank == 0:
        save_hf_alone(expected, directory / "plain")
    torch.distributed.barrier()

    model = sharded(config, mesh(*shape))
    read: list[torch.Size] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf._StoredTensor, "read", _recording(hf._StoredTensor.read, read))
        load_hf(model, directory / "plain")
    assert sorted(read) == sorted(
        local_tensor(p).shape for p in model.parameters() if local_tensor(p).numel()
    )
    for (name, param), full in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), full), name  # type: ignore[attr-defined]
    assert torch.equal(model(tokens()), expected(tokens()))

    save_hf(model, directory / "sharded", SEVERAL_FILES)
    assert equal_directories(directory / "plain", directory / "sharded")


def _recording(function: Callable[..., Tensor], shapes: list[torch.Size]) -> Callable[..., Tensor]:
    def read(*args: Any) -> Tensor:
        tensor = function(*args)
        shapes.append(tensor.shape)
        return tensor

    return read


def save_hf_alone(model: Llama, directory: Path) -> None:
    """`save_hf` on one rank of several: the broadcast that ends it would wait for the others."""
    directory.mkdir()
    state = model.state_dict()
    if model.config.tied_head:
        del state["lm_head.weight"]
    save_file(
        {hf._hf_name(name): t.contiguous() for name, t in state.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(config_to_hf(model.config, "float32")))


def equal_directories(one: Path, other: Path) -> bool:
    stored: list[dict[str, Tensor]] = []
    for directory in (one, other):
        stored.append({})
        for file in directory.glob("*.safetensors"):
            with safe_open(file, framework="pt") as handle:
                stored[-1].update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
    names = stored[0].keys() == stored[1].keys()
    return names and all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])


@BOTH
@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)], ids=["fsdp", "hsdp-1x2", "replicas-2x1"])
def test_sharded_round_trip_is_exact_and_reads_only_own_rows(
    workers: Callable[[int], WorkerPool], shape: tuple[int, ...], config: LlamaConfig, tmp_path: Path
) -> None:
    workers(2).run(_round_trip, shape, config, tmp_path)
    config_json = [json.loads((tmp_path / kind / "config.json").read_text()) for kind in ("plain", "sharded")]
    assert config_json[0] == config_json[1]


def _round_trip_with_tensor_parallelism(rank: int, world_size: int, directory: Path) -> None:
    config = dataclasses.replace(CONFIG, ffn_dim=36)
    expected = build(config, seed=3)
    if rank == 0:
        save_hf_alone(expected, directory / "plain")
    torch.distributed.barrier()
    both = mesh(2, 2, names=("dp", "tp"))
    model = sharded(config, both["dp"], both["tp"])
    load_hf(model, directory / "plain")
    # Rows split by tensor parallelism and again by FSDP interleave: no slice of the file is the shard.
    assert local_slices(model.layers[0].mlp.gate_proj._parameters["weight"]) is None  # type: ignore[union-attr]
    for (name, param), full in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), full), name
    torch.testing.assert_close(model(tokens()), expected(tokens()))
    save_hf(model, directory / "sharded")
    assert equal_directories(directory / "plain", directory / "sharded")


def test_round_trip_with_tensor_parallelism(workers: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    workers(4).run(_round_trip_with_tensor_parallelism, tmp_path)


def _export_memory(rank: int, world_size: int, directory: Path) -> int:
    model = sharded(CONFIG, mesh(world_size))
    with LiveBytes(model.parameters()) as live:
        before = live.current_bytes
        save_hf(model, directory, max_shard_bytes=1)
        return live.peak_bytes - before


def test_export_holds_one_parameter_at_a_time(workers: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    largest = 4 * max(param.numel() for param in build().parameters())
    for peak_bytes in workers(2).run(_export_memory, tmp_path):
        assert peak_bytes < 4 * largest  # padding, gathering and joining the rows make temporary copies
    assert 4 * largest < 4 * CONFIG.n_parameters


def _failing_export(rank: int, world_size: int, directory: Path) -> None:
    save_hf(sharded(CONFIG, mesh(world_size)), directory, SEVERAL_FILES)


def test_failure_of_the_writing_rank_is_raised_on_every_rank(
    workers: Callable[[int], WorkerPool], tmp_path: Path
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    with pytest.raises(WorkerError, match=r"OSError: cannot export to .*a-file: ") as caught:
        workers(2).run(_failing_export, blocked)
    assert caught.value.ranks == (0, 1)


# ---- the arithmetic of shards


def _slices(rank: int, world_size: int) -> None:
    full = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
    negative = -full
    meshes = {1: mesh(4), 2: mesh(2, 2)}
    for placements in (
        [Shard(0)],
        [Shard(1)],
        [Replicate()],
        [Replicate(), Shard(0)],
        [Shard(0), Shard(0)],
        [Shard(1), Shard(0)],
    ):
        tensor = distribute_tensor(full.clone(), meshes[len(placements)], placements)
        slices = local_slices(tensor)
        assert slices is not None
        assert torch.equal(tensor.to_local(), full[slices]), placements
        copy_full_(tensor, negative)
        assert torch.equal(tensor.to_local(), negative[slices]), placements


def test_local_slices_are_where_dtensor_puts_rows(workers: Callable[[int], WorkerPool]) -> None:
    workers(4).run(_slices)
    assert local_slices(torch.zeros(3, 2)) == (slice(0, 3), slice(0, 2))
