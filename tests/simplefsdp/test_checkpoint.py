"""Checkpoints: what comes back, on how many ranks, after which accidents."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from simplefsdp import simple_fsdp
from simplefsdp.llama.checkpoint import (
    Checkpointer,
    CheckpointError,
    StateMismatchError,
    restore,
    restore_rng,
    rng_state,
    train_state,
)
from simplefsdp.llama.checkpoint_files import CheckpointFiles, Manifest, record_of, write_synced
from tests.helpers.meshes import mesh
from tests.helpers.mortal import MortalRanks

# (shape, dtype, sharded dim); None replicates. Over 4, 3 or 2 ranks these are even, uneven and empty.
AWKWARD = {
    "even": ((8, 4), torch.float32, 0),
    "uneven": ((5, 3), torch.float32, 0),
    "tiny": ((2, 3), torch.float32, 0),
    "one": ((1,), torch.float32, 0),
    "no_elements": ((0, 4), torch.float32, 0),
    "scalar": ((), torch.float32, None),
    "low": ((7,), torch.bfloat16, 0),
    "columns": ((3, 6), torch.float32, 1),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # Its "mu_product" is a plain scalar tensor beside "step".
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
}


def values(name: str, step: int) -> Tensor:
    """Parameter values (step 0) or the gradient of a step: the same full tensor wherever it is called."""
    shape, dtype, _ = AWKWARD[name]
    generator = torch.Generator().manual_seed(sorted(AWKWARD).index(name) * 1000 + step)
    return torch.randn(shape, generator=generator).to(dtype)


class Awkward(nn.Module):
    """Parameters of `AWKWARD`, plain or sharded over a mesh's last dimension, one of them under two names."""

    def __init__(self, on: DeviceMesh | None = None) -> None:
        super().__init__()
        self.on = on
        for name in AWKWARD:
            self.register_parameter(name, nn.Parameter(self.placed(name, values(name, 0))))
        self.tied = nn.Module()
        self.tied.weight = self.even

    def placed(self, name: str, full: Tensor) -> Tensor:
        if self.on is None:
            return full
        dim = AWKWARD[name][2]
        placements = [Replicate()] * (self.on.ndim - 1) + [Replicate() if dim is None else Shard(dim)]
        return distribute_tensor(full, self.on, placements, src_data_rank=None)

    def train_step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        for name in AWKWARD:
            getattr(self, name).grad = self.placed(name, values(name, step))
        optimizer.step()

    def full(self) -> dict[str, Tensor]:
        return {name: _full(tensor) for name, tensor in self.state_dict().items()}


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- what comes back ------------------------------------------------------------------------------------------


def train_and_save(
    rank: int, world_size: int, directory: Path, optimizer_name: str, mesh_shape: tuple[int, ...]
) -> None:
    model = Awkward(mesh(*mesh_shape) if mesh_shape else None)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            model.train_step(optimizer, step)
        checkpointer.save(2, {**train_state(model, optimizer), "trainer": {"step": 2, "position": [7, 9]}})
        model.train_step(optimizer, 3)  # while the save is in flight: must not show in it


def load_and_train(
    rank: int, world_size: int, directory: Path, optimizer_name: str
) -> tuple[dict[str, Tensor], Any]:
    model = Awkward(mesh(world_size))
    for parameter in model.parameters():
        nn.init.constant_(parameter, -1.0)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())  # no state yet
    optimizer.param_groups[0]["lr"] = 99.0
    state = {**train_state(model, optimizer), "trainer": None}
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.load(state) == 2
    restore(model, optimizer, state)
    assert model.tied.weight is model.even
    for entry in optimizer.state.values():
        assert not any(isinstance(entry[key], DTensor) for key in {"step", "mu_product"} & entry.keys())
    for step in (3, 4):
        model.train_step(optimizer, step)
    return model.full(), state["trainer"]


def reference(optimizer_name: str) -> dict[str, Tensor]:
    model = Awkward()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for step in (1, 2, 3, 4):
        model.train_step(optimizer, step)
    return model.full()


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"), [((4,), (4, 3, 2, 1)), ((2, 2), (4, 3)), ((), (2,))], ids=str
)
def test_other_ranks_continue_bitwise(
    workers: Any, tmp_path: Path, saved_on: tuple[int, ...], loaded_on: tuple[int, ...]
) -> None:
    workers(math.prod(saved_on)).run(train_and_save, tmp_path, "adamw", saved_on)
    expected = reference("adamw")
    for ranks in loaded_on:
        for parameters, trainer in workers(ranks).run(load_and_train, tmp_path, "adamw"):
            assert trainer == {"step": 2, "position": [7, 9]}
            assert parameters.keys() == expected.keys() == {*AWKWARD, "tied.weight"}
            for name, tensor in expected.items():
                assert torch.equal(parameters[name], tensor), (name, ranks)


@pytest.mark.parametrize("optimizer", ["momentum", "nadam"])
def test_other_optimizers_continue_bitwise(workers: Any, tmp_path: Path, optimizer: str) -> None:
    workers(4).run(train_and_save, tmp_path, optimizer, (4,))
    parameters, _ = workers(3).run(load_and_train, tmp_path, optimizer)[0]
    expected = reference(optimizer)
    assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())


def train_uninterrupted(rank: int, world_size: int, optimizer_name: str) -> dict[str, Tensor]:
    model = Awkward(mesh(4))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for step in (1, 2, 3, 4):
        model.train_step(optimizer, step)
    return model.full()


def test_fused_optimizer_continues_bitwise_on_equal_ranks(workers: Any, tmp_path: Path) -> None:
    # On another number of ranks the fused kernel rounds the ends of its shards differently.
    workers(4).run(train_and_save, tmp_path, "fused", (4,))
    parameters, _ = workers(4).run(load_and_train, tmp_path, "fused")[0]
    expected = workers(4).run(train_uninterrupted, "fused")[0]
    assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())


class Language(nn.Module):
    """Embedding with tied head around a block that torch.compile wraps, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.block = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embedding(tokens))))


def language_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def compiled_sharded_to_plain(rank: int, world_size: int, directory: Path, front_end: str) -> None:
    torch.manual_seed(1)
    model = Language()
    if front_end == "fully_shard":
        model.block = torch.compile(model.block, backend="aot_eager")
        fully_shard(model)
    else:
        simple_fsdp(model, mesh(2))
        model.block = torch.compile(model.block, backend="aot_eager")
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(
        [{"params": [model.embedding.weight], "weight_decay": 0.5}, {"params": [*model.block.parameters()]}]
    )
    with torch.compiler.set_stance("force_eager"):  # this test is about names
        language_step(model, optimizer)
    state = train_state(compiled, optimizer)
    names = {"embedding.weight", "block.weight", "block.bias", "head.weight"}
    assert names < state["model"].keys()
    assert not any("_orig_mod" in name for name in state["model"])
    assert state["optimizer"]["state"].keys() == names - {"head.weight"}
    expected = {name: _full(tensor) for name, tensor in state["model"].items()}
    moments = {name: _full(entry["exp_avg"]) for name, entry in state["optimizer"]["state"].items()}

    plain = Language()
    plain_optimizer = torch.optim.AdamW(
        [{"params": [plain.embedding.weight]}, {"params": [*plain.block.parameters()]}]
    )
    loaded = train_state(plain, plain_optimizer)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state, blocking=True)
        assert checkpointer.load(loaded) == 1
        restore(plain, plain_optimizer, loaded)
        assert plain_optimizer.param_groups[0]["weight_decay"] == 0.5
        for name, tensor in plain.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
        for name, parameter in plain.named_parameters():
            if name in moments:
                assert torch.equal(plain_optimizer.state[parameter]["exp_avg"], moments[name])

        # And back, into the compiled sharded model.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.0)
        state = train_state(compiled, optimizer)
        checkpointer.load(state)
        restore(compiled, optimizer, state)
    for name, tensor in train_state(compiled)["model"].items():
        assert torch.equal(_full(tensor), expected[name]), name


@pytest.mark.parametrize("front_end", ["simple_fsdp", "fully_shard"])
def test_wrapped_and_sharded_names_fit_the_plain_model(workers: Any, tmp_path: Path, front_end: str) -> None:
    workers(2).run(compiled_sharded_to_plain, tmp_path, front_end)


class Weighted(nn.Module):
    """Awkward parameters whose gradients are whole numbers: their mean over any number of ranks is exact."""

    def __init__(self) -> None:
        super().__init__()
        for name in AWKWARD:
            self.register_parameter(name, nn.Parameter(values(name, 0)))

    def forward(self, step: int) -> Tensor:
        weighted = [getattr(self, name) * values(name, step).mul(8).round() for name in AWKWARD]
        return torch.stack([term.float().sum() for term in weighted]).sum()

    def train_steps(self, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            self(step).backward()
            optimizer.step()
            optimizer.zero_grad()


def weighted_on(on: DeviceMesh | None) -> tuple[Weighted, torch.optim.Optimizer]:
    model = Weighted()
    if on is not None:
        simple_fsdp(model, on)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_simple_fsdp_and_save(rank: int, world_size: int, directory: Path) -> None:
    model, optimizer = weighted_on(mesh(4))
    model.train_steps(optimizer, range(1, 3))
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(2, train_state(model, optimizer))


def load_simple_fsdp_and_train(rank: int, world_size: int, directory: Path) -> dict[str, Tensor]:
    model, optimizer = weighted_on(mesh(world_size))
    state = train_state(model, optimizer)
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.load(state) == 2
    restore(model, optimizer, state)
    model.train_steps(optimizer, range(3, 5))
    return {name: _full(tensor) for name, tensor in model.state_dict().items()}


def test_simple_fsdp_on_four_ranks_to_fewer_continues_bitwise(workers: Any, tmp_path: Path) -> None:
    workers(4).run(train_simple_fsdp_and_save, tmp_path)
    model, optimizer = weighted_on(None)
    model.train_steps(optimizer, range(1, 5))
    expected = model.state_dict()
    for ranks in (3, 2):
        for parameters in workers(ranks).run(load_simple_fsdp_and_train, tmp_path):
            assert parameters.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(parameters[name], tensor), (name, ranks)


def counted_layers() -> nn.Sequential:
    """Layers whose values are all different, with sizes that neither 2 nor 4 ranks share evenly."""
    layers = nn.Sequential(nn.Linear(3, 10), nn.Linear(10, 6), nn.Linear(6, 7))
    with torch.no_grad():
        for index, parameter in enumerate(layers.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 100 * index)
    return layers


def save_tensor_parallel(rank: int, world_size: int, directory: Path) -> None:
    both = mesh(2, 2, names=("data", "tensor"))
    model = counted_layers()
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()}
    parallelize_module(model, both["tensor"], plan)
    simple_fsdp(model, both["data"])
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, train_state(model))


def load_data_parallel(rank: int, world_size: int, directory: Path) -> dict[str, Tensor]:
    model = counted_layers()
    simple_fsdp(model, mesh(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1.0)
    state = train_state(model)
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(state)
    restore(model, None, state)
    return {name: _full(tensor) for name, tensor in model.state_dict().items()}


def test_tensor_parallel_to_data_parallel(workers: Any, tmp_path: Path) -> None:
    workers(4).run(save_tensor_parallel, tmp_path)
    expected = counted_layers().state_dict()
    for parameters in workers(4).run(load_data_parallel, tmp_path):
        assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())


def save_random_state(rank: int, world_size: int, directory: Path) -> Tensor:
    torch.manual_seed(100 + rank)
    random.seed(rank)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, {"rng": rng_state()})
    return torch.rand(3)


def load_random_state(rank: int, world_size: int, directory: Path) -> tuple[Tensor, bool]:
    state: dict[str, Any] = {"rng": rng_state()}
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(state)
    restore_rng(state["rng"], seed=0, step=1)
    return torch.rand(3), state["rng"] is None


def test_random_state_continues_per_rank_and_is_reseeded_on_other_ranks(workers: Any, tmp_path: Path) -> None:
    expected = workers(4).run(save_random_state, tmp_path)
    same = workers(4).run(load_random_state, tmp_path)
    assert [
        (torch.equal(drawn, known), absent) for (drawn, absent), known in zip(same, expected, strict=True)
    ] == [(True, False)] * 4
    (first, absent), (second, _) = workers(2).run(load_random_state, tmp_path)
    assert absent
    assert not torch.equal(first, second)
    assert not any(torch.equal(first, known) for known in expected)


def save_on_some_ranks(rank: int, world_size: int, directory: Path) -> None:
    group = dist.new_group([1, 2])
    on = DeviceMesh("cpu", [1, 2])
    if rank in (1, 2):
        weight = distribute_tensor(torch.arange(5.0), on, [Shard(0)], src_data_rank=None)
        with Checkpointer(directory, process_group=group) as checkpointer:
            checkpointer.save(1, {"model": {"weight": weight.clone()}})
            state = {"model": {"weight": weight.zero_()}}
            assert checkpointer.load(state) == 1
        assert torch.equal(state["model"]["weight"].full_tensor(), torch.arange(5.0))
        dist.barrier(group)  # closing has not ended a group that was only lent


def test_group_of_some_ranks(workers: Any, tmp_path: Path) -> None:
    workers(3).run(save_on_some_ranks, tmp_path)


# -- saves and their failures ---------------------------------------------------------------------------------


def number_state(
    value: float, shape: tuple[int, ...] = (6,), dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    weight = distribute_tensor(torch.full(shape, value, dtype=dtype), mesh(2), [Shard(0)], src_data_rank=None)
    return {"model": {"weight": weight}, "trainer": {"value": value}}


def loaded_number(
    checkpointer: Checkpointer, step: int | None = None, **options: Any
) -> tuple[int | None, float]:
    state = number_state(0.0)
    found = checkpointer.load(state, step, **options)
    full = _full(state["model"]["weight"])
    assert torch.equal(full, full[:1].expand(6))
    assert state["trainer"]["value"] == full[0]
    return found, float(full[0])


def save_in_background(rank: int, world_size: int, directory: Path) -> None:
    with Checkpointer(directory, keep_last=2) as checkpointer:
        assert checkpointer.load(number_state(0.0)) is None
        assert checkpointer.latest_step() is None
        state = number_state(1.0)
        checkpointer.save(1, state)
        with torch.no_grad():
            state["model"]["weight"].fill_(-1.0)
        for step in (2, 3):
            checkpointer.save(step, number_state(float(step)))  # waits for the one before
            assert checkpointer.last_saved_step == step - 1
            if step == 2:
                assert loaded_number(checkpointer, 1) == (1, 1.0)  # waits as well
        checkpointer.wait()
        assert sorted(path.name for path in directory.iterdir()) == ["step-000000002", "step-000000003"]
        assert checkpointer.latest_step() == 3
        # Resumed from an earlier step: the step is replaced, later ones stay until they are.
        checkpointer.save(2, number_state(2.5), blocking=True)
        assert loaded_number(checkpointer, 2) == (2, 2.5)
        assert loaded_number(checkpointer) == (3, 3.0)


def test_saves_in_background_and_keeps_the_newest(workers: Any, tmp_path: Path) -> None:
    workers(2).run(save_in_background, tmp_path)


def fail_in_background(rank: int, world_size: int, directory: Path) -> list[str]:
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, number_state(1.0), blocking=True)
    messages = []

    def expect_failure(step: int, state: dict[str, Any]) -> None:
        checkpointer.save(step, state)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(step + 1, number_state(0.0))
        messages.append(str(caught.value))

    if rank == 0:
        (directory / "step-000000002.tmp").write_text("a file where the directory should be")
    dist.barrier()
    expect_failure(2, number_state(2.0))
    dist.barrier()
    if rank == 0:
        (directory / "step-000000002.tmp").unlink()
    expect_failure(10, {"trainer": {"value": rank}})
    expect_failure(20, {"trainer": {"value": rng_state if rank == 1 else 0}})
    expect_failure(30, {"rng": object()})
    # All ranks are in step: the next save works.
    assert loaded_number(checkpointer) == (1, 1.0)
    checkpointer.save(40, number_state(4.0))
    checkpointer.close()
    assert sorted(path.name for path in directory.iterdir()) == ["step-000000001", "step-000000040"]
    return messages


def test_failed_save_is_raised_at_the_next_call_on_every_rank(workers: Any, tmp_path: Path) -> None:
    for blocked, differing, unsupported, bad_rng in workers(2).run(fail_in_background, tmp_path):
        assert blocked.startswith("saving step 2 failed: rank 0: ")
        assert "step-000000002.tmp: Not a directory" in blocked
        assert differing == (
            "saving step 10 failed: state['trainer'] differs between ranks 0 and 1: only state['rng'] may"
        ) or differing.endswith("ranks 1 and 0: only state['rng'] may")
        assert unsupported.startswith(
            "saving step 20 failed: the state may hold tensors and values of builtin"
        )
        assert bad_rng.startswith(
            "saving step 30 failed: state['rng'] may hold tensors and values of builtin"
        )


def refuse_mismatch(rank: int, world_size: int, directory: Path) -> list[str]:
    messages = []
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(5, number_state(5.0))

        def expect(kind: type[Exception], state: dict[str, Any], step: int | None = None) -> None:
            with pytest.raises(kind) as caught:
                checkpointer.load(state, step)
            messages.append(str(caught.value))

        expect(StateMismatchError, number_state(0.0, shape=(3, 2)))
        expect(StateMismatchError, number_state(0.0, dtype=torch.bfloat16))
        expect(StateMismatchError, {"model": {}})
        expect(StateMismatchError, {"model": {**number_state(0.0)["model"], "bias": torch.zeros(1)}})
        expect(StateMismatchError, {"optimizer": {}})
        expect(CheckpointError, number_state(0.0), 4)
        partial = {"model": number_state(0.0)["model"]}  # without "trainer"
        assert checkpointer.load(partial) == 5
        assert partial.keys() == {"model"}
    return messages


def test_state_that_does_not_fit_is_refused_by_name(workers: Any, tmp_path: Path) -> None:
    for messages in workers(2).run(refuse_mismatch, tmp_path):
        assert messages == [
            "model.weight: (6,), torch.float32 in the checkpoint, (3, 2), torch.float32 in the model",
            "model.weight: (6,), torch.float32 in the checkpoint, (6,), torch.bfloat16 in the model",
            "model: 'weight' is only there",
            "model: 'bias' is not in the saved state",
            "the checkpoint has no section 'optimizer'; it has ['model', 'trainer']",
            f"{tmp_path} has no step 4; it has [5]",
        ]


# -- damage ---------------------------------------------------------------------------------------------------


def damage_and_load(rank: int, world_size: int, directory: Path) -> list[tuple[str, ...]]:
    """Damage the newest checkpoint in several ways; return what each load had to say about it."""
    said = []
    newest = directory / "step-000000002"
    copy = directory.with_name("undamaged")
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {**number_state(float(step)), "rng": rng_state()})
        checkpointer.wait()

        def load_after(change: Callable[[], object]) -> None:
            if rank == 0:
                shutil.copytree(newest, copy)
                change()
            dist.barrier()
            assert loaded_number(checkpointer) == (1, 1.0)
            said.append(checkpointer.skipped)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(newest)
                copy.rename(newest)
            dist.barrier()
            assert loaded_number(checkpointer) == (2, 2.0)
            assert checkpointer.skipped == ()

        data = newest / "__1_0.distcp"
        load_after(lambda: os.truncate(data, data.stat().st_size - 1))
        load_after(data.unlink)
        load_after(lambda: flip_bit(data, data.read_bytes().find(torch.full((3,), 2.0).numpy().tobytes())))
        load_after(lambda: flip_bit(newest / ".metadata", 5))
        load_after(lambda: flip_bit(newest / "rng-00001.pt", 700))
        load_after((newest / "manifest.json").unlink)
        load_after(lambda: (newest / "manifest.json").write_text('{"format": 1}'))
        load_after(lambda: (newest / "manifest.json").write_bytes(b"\xff\x00"))
        load_after(lambda: (newest / "manifest.json").write_text('{"format": 7}'))
    return said


def flip_bit(path: Path, offset: int) -> None:
    assert offset >= 0
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_damaged_newest_is_reported_and_the_one_before_used(workers: Any, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    first, second = workers(2).run(damage_and_load, directory)
    assert first == second
    newest = directory / "step-000000002"
    prefix = "checkpoint of step 2 is damaged and passed over: "
    found = [line.removeprefix(prefix).removeprefix(str(newest)) for (line,) in first]
    assert found[0].startswith("/__1_0.distcp: ")
    assert "bytes long, must be" in found[0]
    assert found[1:] == [
        "/__1_0.distcp: No such file or directory",
        "/__1_0.distcp: contents differ from what was written (sha256)",
        "/.metadata: contents differ from what was written (sha256)",
        "/rng-00001.pt: contents differ from what was written (sha256)",
        "/manifest.json: No such file or directory",
        "/manifest.json: not a manifest",
        "/manifest.json: not a manifest",
        "/manifest.json: format 7; this version reads format 1",
    ]


def load_nothing_but_damage(rank: int, world_size: int, directory: Path) -> list[str]:
    messages = []
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, number_state(1.0), blocking=True)
        # Past the data that is read: only a full comparison finds it.
        path = directory / "step-000000001" / "__0_0.distcp"
        if rank == 0:
            flip_bit(path, path.stat().st_size - 1)
        dist.barrier()
        for step in (None, 1):
            with pytest.raises(CheckpointError) as caught:
                checkpointer.load(number_state(0.0), step, verify="full")
            messages.append(str(caught.value))
    return messages


def test_nothing_but_damage_is_an_error(workers: Any, tmp_path: Path) -> None:
    for newest, asked_for in workers(2).run(load_nothing_but_damage, tmp_path):
        assert newest.startswith(f"no undamaged checkpoint in {tmp_path}: checkpoint of step 1 is damaged")
        assert asked_for.startswith(
            f"checkpoint of step 1 is damaged: {tmp_path}/step-000000001/__0_0.distcp: "
        )


# -- directories ----------------------------------------------------------------------------------------------


def refuse_directories(rank: int, world_size: int, directory: Path) -> list[str]:
    (directory / "file").touch()
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, number_state(1.0))
    messages = []
    # The last one is a different directory on each rank.
    for bad in ("file", "file/below", "step-000000001", f"own/{rank}"):
        with pytest.raises(CheckpointError) as caught:
            Checkpointer(directory / bad)
        messages.append(str(caught.value))
    return messages


def test_directory_that_cannot_hold_checkpoints_is_refused(workers: Any, tmp_path: Path) -> None:
    for messages in workers(2).run(refuse_directories, tmp_path):
        assert messages[0].startswith(f"cannot write checkpoints to {tmp_path}/file: ")
        assert messages[1] == f"cannot write checkpoints to {tmp_path}/file/below: Not a directory"
        assert messages[2] == (
            f"{tmp_path}/step-000000001 is one checkpoint, not a directory of checkpoints: pass {tmp_path}"
        )
        assert "is not the same directory on all ranks" in messages[3]
        assert "missing on ranks [1]" in messages[3]


def test_needs_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="init_process_group"):
        Checkpointer(tmp_path)
    with pytest.raises(ValueError, match="keep_last must be at least 1, got 0"):
        Checkpointer(tmp_path, keep_last=0)


# -- accidents ------------------------------------------------------------------------------------------------


def save_until_killed(rank: int, world_size: int, directory: Path) -> None:
    """Continue from the newest checkpoint and write one per step; step n holds the value n everywhere."""
    with Checkpointer(directory, keep_last=2) as checkpointer:
        found, value = loaded_number(checkpointer)
        step = found or 0
        assert value == step
        assert checkpointer.skipped == ()
        print(f"at {step}", flush=True)
        while True:
            step += 1
            checkpointer.save(step, {**number_state(float(step)), "rng": rng_state()})
            print(f"saving {step}", flush=True)  # the one before is complete


def test_kill_at_any_moment_leaves_a_checkpoint(tmp_path: Path) -> None:
    """Kill both ranks in the middle of a save, together or one after the other, several times over."""
    moments = random.Random(20)
    complete = 0
    for attempt in range(5):
        ranks = MortalRanks(save_until_killed, 2, tmp_path / f"attempt{attempt}", tmp_path / "checkpoints")
        ranks.wait_for_line("at ", [0])
        start = int(ranks.log(0).splitlines()[0].removeprefix("at "))
        assert start >= complete
        ranks.wait_for_line(f"saving {start + 1}", [0])
        started_at = time.monotonic()
        ranks.wait_for_line(f"saving {start + 2}", [0])
        time.sleep(moments.uniform(0.0, time.monotonic() - started_at))
        for pid in moments.sample(ranks.pids, 2):
            os.kill(pid, signal.SIGKILL)
            time.sleep(moments.choice([0.0, 0.02]))
        complete = start + 1
        assert -signal.SIGKILL in ranks.wait(), ranks.log(0)
    assert complete >= 5


class Crash(BaseException):
    """Stands for the end of the process: nothing handles it."""


def write_step(files: CheckpointFiles, step: int, content: bytes) -> None:
    directory = files.begin(step)
    for name in ("a", "b"):
        write_synced(directory / name, content)
    files.publish(Manifest(step, 1, {}, {name: record_of(directory / name) for name in ("a", "b")}))


@pytest.mark.parametrize(("step", "keep_last"), [(3, 1), (2, 2)], ids=["new step", "replaced step"])
def test_crash_at_any_file_operation_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, keep_last: int
) -> None:
    """Crash before the 1st, 2nd, ... operation of a save with its pruning, until one save gets through."""
    operations_left = 0

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal operations_left
            if operations_left == 0:
                raise Crash
            operations_left -= 1
            return operation(*args, **kwargs)

        return run

    files = CheckpointFiles(tmp_path / "checkpoints")
    files.create().unlink()
    crashes = 0
    while True:
        shutil.rmtree(files.root)
        files.root.mkdir()
        for old_step in (1, 2):
            write_step(files, old_step, b"old")
        operations_left = crashes
        try:
            with monkeypatch.context() as patch:
                for name in ("mkdir", "rename", "fsync", "unlink", "rmdir"):
                    patch.setattr(os, name, counted(getattr(os, name)))
                write_step(files, step, b"new")
                files.prune(step, keep_last)
        except Crash:
            files.clean()
            assert all("." not in entry.name for entry in files.root.iterdir())
            newest = files.steps()[-1]
            assert newest in (2, step)
            assert files.find_damage(newest, contents_of=("a", "b")) is None
            crashes += 1
        else:
            break
    assert crashes >= 10
    assert files.steps() == ([3] if step == 3 else [1, 2])
    assert (files.path(step) / "a").read_bytes() == b"new"


def test_clean_leaves_files_of_others_alone(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path)
    for name in ("step-000000001.tmp", "step-000000002.deleting", "notes.tmp", "step-1.tmp", "step-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "metrics.jsonl").touch()
    files.clean()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "notes.tmp",
        "step-1.tmp",
        "step-x",
    ]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path)
    for step in (1, 2, 3, 4):
        write_step(files, step, b"content")
    (files.path(3) / "a").unlink()
    files.prune(4, keep_last=2)
    assert files.steps() == [2, 3, 4]


def test_manifest_belongs_to_its_step(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path)
    write_step(files, 1, b"content")
    files.path(1).rename(files.path(2))
    assert files.find_damage(2) == f"{files.path(2)}/manifest.json: belongs to step 1"
    assert json.loads((files.path(2) / "manifest.json").read_text())["files"]["a"]["size_bytes"] == 7
