"""Parameters that tensor parallelism has sharded before: shapes, values, gradients, dtypes and checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from simplefsdp import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    full_state_dict,
    load_full_state_dict,
    sharded_parameters,
    simple_fsdp,
)
from tests.helpers.collectives import record_collectives
from tests.helpers.meshes import mesh


class Mlp(nn.Module):
    """Colwise then rowwise; 10 hidden rows over tp 2 x dp 2 are uneven (3, 2), and share tensor dim 0 with FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def _plain() -> Mlp:
    torch.manual_seed(11)
    return Mlp()


def _parallel(policy: MixedPrecisionPolicy | None = None, sequence: bool = False):
    device_mesh = mesh(2, 2, names=("dp", "tp"))
    model = _plain()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
    parallelize_module(model, device_mesh["tp"], plan)
    return simple_fsdp(model, device_mesh["dp"], mp_policy=policy)


def _input(step: int, dp_rank: int) -> torch.Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(100 * step + dp_rank))


def _train(rank: int, world: int, backend: str, sequence: bool):
    model, reference = _parallel(sequence=sequence), _plain()
    for name, param in model.named_parameters():
        expected = reference.get_parameter(name)
        assert param.shape == expected.shape, f"{name}: global shape {param.shape} on rank {rank}"
        assert torch.equal(param.full_tensor(), expected), name
    run = model if backend == "eager" else torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    dp_rank = rank // 2
    for step in range(3):
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        run(_input(step, dp_rank)).square().mean().backward()
        (sum(reference(_input(step, r)).square().mean() for r in range(2)) / 2).backward()
        norm = clip_grad_norm_(model.parameters(), 0.05)
        expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        torch.testing.assert_close(norm, expected_norm)
        optimizer.step()
        reference_optimizer.step()
        for name, param in model.named_parameters():
            expected = reference.get_parameter(name)
            torch.testing.assert_close(param.full_tensor(), expected.data, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(
                param.grad.full_tensor(), expected.grad, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_training_equals_the_unsharded_model(workers, backend):
    workers(4).run(_train, backend, False, timeout=150)


def test_training_with_sequence_parallel_norms(workers):
    workers(4).run(_train, "eager", True)


def _reduce_dtype(rank: int, world: int):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    model = _parallel(policy, sequence=True)
    loss = model(_input(0, rank // 2)).square().mean()
    with record_collectives() as seen:
        loss.backward()
    return [str(c.dtype) for c in seen if c.kind in ("all_reduce", "reduce_scatter") and c.group_size == 2], [
        p.grad.dtype for p in model.parameters()
    ]


def test_gradients_of_replicated_weights_are_summed_in_the_reduce_dtype(workers):
    """The norm's gradient is a partial sum over tp ranks; adding it up in bf16 would lose bits."""
    for dtypes, grads in workers(4).run(_reduce_dtype):
        # 2 norm parameters over tp, down.bias over tp, 6 parameters over dp. Activations travel by gather and scatter.
        assert dtypes.count("torch.float32") >= 9
        assert set(grads) == {torch.float32}


def _save(rank: int, world: int, path: str):
    model = _parallel()
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    plain = _plain().state_dict()
    for name, value in full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, plain[name])
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with record_collectives() as seen:
        load_full_state_dict(model, plain)
    assert not seen
    for name, value in full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, plain[name]), name
    torch.manual_seed(3)
    with sharded_parameters(model):
        nn.init.normal_(model.up.weight)
    torch.manual_seed(3)
    assert torch.equal(model.up.weight.full_tensor(), nn.init.normal_(torch.empty(10, 6)))


def _load(rank: int, world: int, path: str):
    model = simple_fsdp(Mlp())
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=path)
    for name, value in full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, _plain().state_dict()[name]), name


def test_checkpoint_from_two_by_two_loads_on_four_data_parallel_ranks(workers, tmp_path):
    workers(4).run(_save, str(tmp_path / "checkpoint"))
    workers(4).run(_load, str(tmp_path / "checkpoint"))


class Holder(nn.Module):
    def __init__(self, param: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(param)


def _shapes(rank: int, world: int):
    device_mesh = mesh(2, 2, names=("dp", "tp"))
    for full in (torch.arange(6.0), torch.arange(5.0), torch.arange(1.0), torch.arange(30.0).view(10, 3)):
        for placement in (Shard(0), Replicate()):
            param = distribute_tensor(full, device_mesh["tp"], [placement])
            model = simple_fsdp(Holder(param), device_mesh["dp"])
            assert model.weight.shape == full.shape
            assert torch.equal(model.weight.full_tensor(), full), f"{tuple(full.shape)} {placement}"
    wide = distribute_tensor(torch.arange(12.0).view(2, 6), device_mesh["tp"], [Shard(1)])
    model = simple_fsdp(Holder(wide), device_mesh["dp"], shard_placement_fn=lambda p: Shard(1))
    assert isinstance(model.weight, DTensor)
    assert torch.equal(model.weight.full_tensor(), wide.full_tensor())


def test_even_uneven_and_tiny_shapes_keep_their_values(workers):
    workers(4).run(_shapes)


def _refusals(rank: int, world: int):
    device_mesh = mesh(2, 2, names=("dp", "tp"))
    param = distribute_tensor(torch.ones(4), device_mesh["dp"], [Shard(0)])
    with pytest.raises(
        ValueError, match=r"parameter 'weight' is a DTensor on the mesh .* data-parallel mesh"
    ):
        simple_fsdp(Holder(param), device_mesh["dp"])
    other = distribute_tensor(torch.ones(4), mesh(4), [Shard(0)])
    with pytest.raises(ValueError, match=r"parameter 'weight'.*slice both out of one mesh"):
        simple_fsdp(Holder(other), device_mesh["dp"])


def test_meshes_that_cannot_be_joined_are_refused_by_name(workers):
    workers(4).run(_refusals)
