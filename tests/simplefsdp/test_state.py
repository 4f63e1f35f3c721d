"""State: dictionaries, checkpoints, initialisation, copies, and whole parameters for evaluation and export."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from simplefsdp import (
    MixedPrecisionPolicy,
    full_parameters,
    full_state_dict,
    load_full_state_dict,
    register_forward_method,
    sharded_parameters,
    simple_fsdp,
)
from tests.helpers.collectives import record_collectives
from tests.helpers.meshes import mesh
from tests.simplefsdp.models import batch, loss_of, make_net


def _same(state: dict, expected: dict) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def _dictionaries(rank: int, world: int, path: str):
    plain = make_net(tied=True)
    expected = plain.state_dict()
    model = simple_fsdp(make_net(tied=True), mesh(world))
    compiled = torch.compile(model, backend="eager")
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    with record_collectives() as seen:
        state = model.state_dict()
    assert not seen, "state_dict() may not communicate"
    assert list(state) == list(expected)
    assert all(isinstance(value, DTensor) for value in state.values())

    _same(full_state_dict(model, rank0_only=False), expected)
    everywhere = full_state_dict(compiled)
    if rank == 0:
        _same(everywhere, expected)
        assert everywhere["embed.weight"] is everywhere["head.weight"]
        make_net(tied=True).load_state_dict(everywhere)
    else:
        assert everywhere == {}

    # From a file, from a dictionary, through plain load_state_dict; tied parameters stay tied.
    if rank == 0:
        torch.save(expected, path)
    dist.barrier()
    for source in (path, expected):
        torch.manual_seed(99)
        other = simple_fsdp(make_net(tied=True), mesh(world))
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        with record_collectives() as seen:
            load_full_state_dict(torch.compile(other, backend="eager"), source)
        assert not seen
        _same(full_state_dict(other, rank0_only=False), expected)
        assert other.head._parameters["weight"] is other.embed._parameters["weight"]
    other.load_state_dict(expected)
    with pytest.raises(RuntimeError, match=r"head.weight|embed.weight"):
        load_full_state_dict(other, {**expected, "head.weight": torch.zeros(2, 2)})
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.0.up.bias"):
        load_full_state_dict(other, {k: v for k, v in expected.items() if k != "blocks.0.up.bias"})


def test_state_dicts_have_the_original_names_and_values(workers, tmp_path):
    workers(2).run(_dictionaries, str(tmp_path / "plain.pt"))


def _initialise(rank: int, world: int, shape: tuple[int, ...]):
    def draw(model: nn.Module) -> None:
        for _ in range(2):  # calls differ
            for param in model.parameters():
                nn.init.trunc_normal_(param, std=0.5, a=-1.0, b=1.0)
                if param.dim() == 2:
                    nn.init.kaiming_uniform_(param, a=math.sqrt(5))
                param.data.add_(1.0)
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(4))

    torch.manual_seed(5)
    expected = make_net()
    torch.manual_seed(6)
    draw(expected)
    after = torch.rand(1)

    with torch.device("meta"):
        deferred = make_net()
    simple_fsdp(deferred, mesh(*shape))
    assert all(p.is_meta for p in deferred.parameters())
    deferred.to_empty(device="cpu")
    torch.manual_seed(6)
    with sharded_parameters(deferred), sharded_parameters(deferred):
        assert isinstance(deferred.head.weight, DTensor)
        draw(deferred)
    _same(full_state_dict(deferred, rank0_only=False), expected.state_dict())
    assert torch.equal(torch.rand(1), after), "the random state goes on as in the unsharded run"

    # Ranks that were seeded apart still agree, and each shard is another draw.
    torch.manual_seed(100 + rank)
    with sharded_parameters(deferred):
        nn.init.normal_(deferred.head.weight)
    weight = deferred.head.weight.full_tensor()
    everyone = [torch.empty_like(weight) for _ in range(world)]
    dist.all_gather(everyone, weight)
    assert all(torch.equal(weight, other) for other in everyone)
    assert weight.unique().numel() == weight.numel()


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_deferred_initialisation_equals_the_unsharded_one(workers, shape):
    workers(math.prod(shape)).run(_initialise, shape)


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.inits = 0
        self.init_weights()

    def init_weights(self) -> None:
        self.inits += 1
        nn.init.ones_(self.linear.weight)
        self.table.copy_(torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.linear.weight
        with sharded_parameters(self):
            assert isinstance(self.linear.weight, DTensor)
            with sharded_parameters(self):
                pass
            assert isinstance(self.linear.weight, DTensor)
        assert not isinstance(seen, DTensor)
        assert seen.shape == (4, 4)
        return self.linear(x) * self.table

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.linear.weight


def _reads(rank: int, world: int):
    with torch.device("meta"):
        model = WithBuffer()
    simple_fsdp(model, mesh(world)).to_empty(device="cpu")
    with sharded_parameters(model):
        model.init_weights()
        nn.init.zeros_(model.linear.bias)
    assert model.inits == 2
    assert torch.equal(model(torch.ones(1, 4)), 4 * torch.arange(4.0)[None])

    # Outside of a forward: shards. Writes reach them, by every usual road.
    assert isinstance(model.linear.weight, DTensor)
    nn.init.constant_(model.linear.weight, 2.0)
    model.linear.bias.data.fill_(3.0)
    assert torch.equal(model(torch.ones(1, 4)), 11 * torch.arange(4.0)[None])
    kept = model.linear._parameters["bias"]
    model.linear.bias = nn.Parameter(torch.arange(4.0), requires_grad=False)
    assert model.linear.bias is kept
    assert not kept.requires_grad
    assert torch.equal(kept.full_tensor(), torch.arange(4.0))
    with pytest.raises(
        ValueError, match=r"shape \(5,\) to the sharded parameter 'linear.bias' of shape \(4,\)"
    ):
        model.linear.bias = nn.Parameter(torch.zeros(5))
    with pytest.raises(TypeError, match=r"assign int to the sharded parameter 'linear.bias'"):
        model.linear.bias = 3
    model.linear.bias = None
    assert model.linear.bias is None
    assert torch.equal(model(torch.ones(1, 4)), 8 * torch.arange(4.0)[None])

    # A method that is not forward reads whole tensors once it is registered.
    register_forward_method(model, "project")
    assert torch.equal(model.project(torch.ones(1, 4)), torch.full((1, 4), 8.0))
    with pytest.raises(AttributeError):
        register_forward_method(model, "missing")
    del model.linear.weight
    with pytest.raises(AttributeError, match="has no attribute 'weight'"):
        _ = model.linear.weight

    # functional_call puts tensors in the parameters' place.
    net = simple_fsdp(nn.Linear(2, 2, bias=False), mesh(world))
    out = torch.func.functional_call(net, {"weight": torch.eye(2)}, torch.ones(1, 2))
    assert torch.equal(out, torch.ones(1, 2))


def test_reads_and_writes_of_wrapped_parameters(workers):
    workers(2).run(_reads)


def _whole(rank: int, world: int):
    model = simple_fsdp(make_net(tied=True), mesh(world))
    expected = make_net(tied=True)
    tokens = batch(0, 0)
    shards = dict(model.named_parameters())
    with full_parameters(model):
        assert not isinstance(model.head.weight, DTensor)
        assert model.head.weight is model.embed.weight
        _same(model.state_dict(), expected.state_dict())
        assert torch.equal(model(tokens), expected(tokens))
        with torch.no_grad():
            model.blocks[0].up.weight.data.fill_(0.5)
            model.head.weight.mul_(2.0)
            expected.blocks[0].up.weight.fill_(0.5)
            expected.head.weight.mul_(2.0)
    assert all(shards[n] is p for n, p in model.named_parameters()), "optimizers keep their parameters"
    _same(full_state_dict(model, rank0_only=False), expected.state_dict())
    with full_parameters(model, writeback=False), torch.no_grad():
        model.head.weight.zero_()
    _same(full_state_dict(model, rank0_only=False), expected.state_dict())


def test_full_parameters_for_evaluation_and_export(workers):
    workers(2).run(_whole)


class Encoder(nn.Module):
    """Reads a parameter of its own in a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside = self.encode(x).dtype
        return self.encode(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    @staticmethod
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x


def _methods(rank: int, world: int):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    model = simple_fsdp(Encoder(), mesh(world), mp_policy=policy)
    register_forward_method(model, "encode")
    register_forward_method(model, "encode")
    x = torch.ones(2, 4)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin._parameters["weight"].mul_(3)
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for net, factor in ((model, 1.0), (twin, 3.0), (loaded, 3.0)):
        assert type(net) is type(model)
        for out in (net.encode(x), net(x), torch.compile(net, backend="eager", fullgraph=True)(x)):
            assert out.dtype is torch.float32
            assert torch.equal(out, factor * x)
        assert net.inside is torch.bfloat16, "casts are the outermost call's"
    model.encode(x).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 2.0))
    for name in ("helper", "training", "Encoder"):
        with pytest.raises((TypeError, AttributeError), match=name):
            register_forward_method(model, name)
    model.encode = lambda x: x
    with pytest.raises(TypeError, match="'encode' of Encoder is not a method that its class defines"):
        register_forward_method(model, "encode")


def test_registered_methods_cast_as_forward_does_and_go_with_copies(workers):
    workers(2).run(_methods)


def _whole_in_bf16(rank: int, world: int):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mesh(world), mp_policy=policy)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    with full_parameters(model):
        assert torch.equal(model(x), expected), "computes as outside"
        assert model[0].weight.dtype is torch.float32
        model[0].bias = nn.Parameter(torch.ones(4))
        model.load_state_dict({**model.state_dict(), "1.bias": torch.full((2,), 5.0)}, assign=True)
    assert torch.equal(model[0].bias.full_tensor(), torch.ones(4))
    assert torch.equal(model[1].bias.full_tensor(), torch.full((2,), 5.0))
    state = {name: value.clone() for name, value in full_state_dict(model, rank0_only=False).items()}
    out = torch.func.functional_call(model, state, x)
    assert torch.equal(out, model(x))

    plain = simple_fsdp(nn.Linear(4, 4), mesh(world))
    with full_parameters(plain, writeback=False):
        plain.half()
        assert plain.state_dict()["weight"].dtype is torch.float16
    plain(x).sum().backward()
    assert plain(x).dtype is plain.weight.dtype is torch.float32


def test_whole_parameters_compute_as_shards_do_and_leave_them_alone(workers):
    workers(2).run(_whole_in_bf16)


def _tied(rank: int, world: int):
    model = simple_fsdp(make_net(tied=True), mesh(world))
    with pytest.raises(ValueError, match=r"'embed.weight', which 2 modules share"):
        model.head.weight = nn.Parameter(torch.zeros_like(make_net(tied=True).head.weight))
    model.head.weight = model.embed.weight  # what tie_weights() of transformers does
    expected = {name: 2 * value for name, value in make_net(tied=True).state_dict().items()}
    model.load_state_dict(expected, assign=True)
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    _same(full_state_dict(model, rank0_only=False), expected)


def test_an_assignment_does_not_change_or_break_a_tie(workers):
    workers(2).run(_tied)


def _compiled_part(rank: int, world: int):
    expected = make_net().state_dict()
    model = simple_fsdp(make_net(), mesh(world))
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    assert any("_orig_mod" in name for name in model.state_dict())
    _same(full_state_dict(model, rank0_only=False), expected)
    doubled = {name: 2 * value for name, value in expected.items()}
    result = load_full_state_dict(model, doubled)
    assert not result.missing_keys
    assert not result.unexpected_keys
    _same(full_state_dict(model, rank0_only=False), doubled)


def test_full_state_dicts_have_no_wrappers_names(workers):
    workers(2).run(_compiled_part)


def _copies(rank: int, world: int):
    model = simple_fsdp(make_net(layers=1, tied=True), mesh(world))
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    assert twin.head._parameters["weight"] is twin.embed._parameters["weight"]
    assert twin.head._parameters["weight"] is not model.head._parameters["weight"]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = full_state_dict(model, rank0_only=False)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        average.update_parameters(model)
        if step == 0:
            middle = full_state_dict(model, rank0_only=False)
    _same(full_state_dict(twin, rank0_only=False), before)
    after = full_state_dict(model, rank0_only=False)
    mean = full_state_dict(average.module, rank0_only=False)
    torch.testing.assert_close(mean["embed.weight"], (middle["embed.weight"] + after["embed.weight"]) / 2)
    loss_of(twin, batch(0, rank)).backward()
    assert twin.head._parameters["weight"].grad is not None
    assert average.module(batch(0, rank)).shape == (2, 5, 11)

    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    _same(full_state_dict(loaded, rank0_only=False), after)
    loss_of(loaded, batch(0, rank)).backward()
    assert loaded.head._parameters["weight"].grad is not None


def test_deepcopy_ema_and_pickle(workers):
    workers(2).run(_copies)


def _exact_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Equal gradients on every rank, on a coarse grid, so that their mean is exact over any number of ranks."""
    optimizer.zero_grad()
    loss_of(model, batch(step, 0)).backward()
    for param in model.parameters():
        param.grad = (param.grad * 4096).round() / 4096
    optimizer.step()


def _save(rank: int, world: int, path: str, shape: tuple[int, ...]):
    model = simple_fsdp(make_net(layers=1), mesh(*shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        _exact_step(model, optimizer, step)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    for step in range(2, 4):
        _exact_step(model, optimizer, step)
    return full_state_dict(model, rank0_only=False)


def _load(rank: int, world: int, path: str, factor: int | None):
    torch.manual_seed(123)
    model = simple_fsdp(make_net(layers=1), sharding_factor=factor)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for step in range(2, 4):
        _exact_step(model, optimizer, step)
    return full_state_dict(model, rank0_only=False)


@pytest.mark.filterwarnings("ignore:.*is being deprecated|.*deprecated.*:FutureWarning")
def test_a_checkpoint_moves_between_world_sizes_and_sharding_factors(workers, tmp_path):
    path = str(tmp_path / "checkpoint")
    expected = workers(4).run(_save, path, (2, 2))[0]
    for world, factor in ((3, None), (2, None), (2, 1), (4, 4)):
        for state in workers(world).run(_load, path, factor):
            _same(state, expected)
