"""Which gathered parameters are gathered again in backward, and what is saved instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inductor_passes import PassConfig, aot_eager_backend
from inductor_passes.graph import starts
from simplefsdp import simple_fsdp
from tests.inductor_passes.toy import BF16, Mlp, Traced, members, saved_gathers, trace, trace_wrapped, world


@pytest.fixture(scope="module", autouse=True)
def _world():
    with world(8):
        yield


WEIGHTS = [f"layers.{index}.{name}.weight" for index in (0, 1) for name in ("norm", "up", "down")]


def example() -> torch.Tensor:
    return torch.randn(4, 16, requires_grad=True)


@pytest.mark.parametrize("how", ["argument", "config"])
def test_without_reshard_backward_gathers_nothing(how):
    options = {"reshard_after_forward": False} if how == "argument" else {}
    config = PassConfig(reshard=False) if how == "config" else None
    traced = trace(Mlp(), example(), config=config, mp_policy=BF16, **options)
    assert traced.gathered("backward") == []
    # Every weight is kept, once, in the dtype it is computed in.
    kept = saved_gathers(traced)
    assert len(kept) == len(WEIGHTS)
    assert all(node.meta["val"].dtype == torch.bfloat16 for node in kept)
    assert {item.action for item in traced.record("reshard").items} == {"keep"}


class Derived(nn.Module):
    """Reads each weight only through operators that make another full-size tensor of it."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed, self.sliced, self.cast, self.left, self.right = (
            nn.Parameter(torch.randn(16, 16)) for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.transposed.t().contiguous())
        x = torch.tanh(x[:, :8] @ self.sliced[:8].clone())
        x = torch.tanh(x @ self.cast.double().float())
        return x @ torch.cat([self.left + self.right, self.left * 2.0], dim=1)


def test_nothing_derived_only_from_gathers_is_saved():
    traced = trace(Derived(), example())
    assert saved_gathers(traced) == []
    assert sorted(traced.gathered("backward")) == ["cast", "left", "right", "sliced", "transposed"]


class Uneven(nn.Module):
    """Weights that must be padded, sharded along dim 1, or hold a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, 13), nn.Linear(13, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_padding_and_other_dims_are_part_of_the_chain():
    from torch.distributed.tensor import Shard

    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.shape == (13, 12) else None

    traced = trace(Uneven(), torch.randn(4, 12), shard_placement_fn=placement)
    assert saved_gathers(traced) == []
    assert sorted(traced.gathered("backward")) == ["second.weight", "third.weight"]


def test_frozen_weights_are_gathered_again_but_not_reduced():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    model[2].requires_grad_(False)
    traced = trace(model, torch.randn(4, 16))
    assert traced.gathered("backward") == ["4.weight", "2.weight"]
    assert sorted(traced.reduced("backward")) == ["0.bias", "0.weight", "4.bias", "4.weight"]


@pytest.mark.parametrize(("rows", "action"), [(64, "gather again"), (1, "forward only")])
def test_a_value_is_gathered_again_when_that_is_cheaper_than_keeping_the_result(rows, action):
    """A gain of 16 numbers is worth gathering to avoid keeping 64 rows of 16, and not to avoid keeping 4."""

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.randn(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x + self.gain[:4])

    traced = trace(Gain(), torch.randn(rows, 4, requires_grad=True))
    assert (traced.gathered("backward") == ["gain"]) == (action == "gather again")
    assert saved_gathers(traced) == []


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_blocks_gather_each_weight_once_per_direction(mode):
    traced = trace(Mlp(mode), example(), mp_policy=BF16)
    assert traced.gathered("forward") == WEIGHTS
    assert sorted(traced.gathered("backward")) == sorted(WEIGHTS)
    assert saved_gathers(traced) == []


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_blocks_gather_nothing_in_backward_without_reshard(mode):
    traced = trace(Mlp(mode), example(), mp_policy=BF16, reshard_after_forward=False)
    assert traced.gathered("backward") == []
    # Checkpointing still does its work: inside blocks, only what the policy names is saved.
    inner = [
        node.target
        for node in traced.graph("forward").output_node().args[0]
        if node.meta["val"].shape[-1] == 32
    ]
    inner = [target for target in inner if target not in (torch.ops._c10d_functional.wait_tensor.default,)]
    assert torch.ops.aten.tanh.default not in inner
    assert (torch.ops.aten.mm.default in inner) == (mode == "selective")


class Nested(nn.Module):
    """A module that keeps its weights inside one that frees them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.freed = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.kept(torch.tanh(self.freed(torch.tanh(x)))))


def test_modules_choose_for_themselves_and_the_configuration_overrides():
    def build() -> nn.Module:
        model = Nested()
        simple_fsdp(model.kept, reshard_after_forward=False)
        simple_fsdp(model.freed)
        return model

    assert trace_wrapped(build(), example()).gathered("backward") == ["freed.weight"]
    forced = trace_wrapped(build(), example(), config=PassConfig(reshard=True))
    assert forced.gathered("backward") == ["kept.weight", "freed.weight"]


def test_tied_weights_are_gathered_once_per_direction():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.embedding(tokens)))

    traced = trace(Tied(), torch.arange(8))
    assert len(traced.gathered("forward")) == 1
    assert len(traced.gathered("backward")) == 1
    assert saved_gathers(traced) == []


def test_an_unread_gather_leaves_no_trace():
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.unread = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _ = self.unread
            return x @ self.read

    assert trace(Unread(), torch.randn(4, 8)).gathered("forward") == ["read"]
    backend = aot_eager_backend(PassConfig(planner="block", blocks=("*",), profile="h100_sxm"))
    with torch.no_grad():
        torch.compile(simple_fsdp(Unread()), backend=backend, fullgraph=True)(torch.randn(4, 8))
    assert Traced(backend).gathered("inference") == ["read"]
    assert [record.failure for record in backend.records if record.failure] == []


def test_replicated_parameters_are_cast_again_rather_than_kept():
    traced = trace(Mlp(), example(), mp_policy=BF16, sharding_factor=1)
    assert traced.gathered("forward") == []
    saved = traced.graph("forward").output_node().args[0][1:]
    shapes = {(32, 16), (16, 32)}
    weights = [node for node in saved if tuple(node.meta["val"].shape) in shapes]
    assert weights
    assert all(node.op == "placeholder" for node in weights)


def test_inference_graphs_are_left_alone():
    model = simple_fsdp(Mlp(), mp_policy=BF16)
    backend = aot_eager_backend()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(4, 16))
    assert Traced(backend).gathered("inference") == WEIGHTS
    assert Traced(backend).record("reshard").items == ()


def test_lengths_that_vary_pass_through_with_symbolic_sizes():
    torch._dynamo.reset()
    model = simple_fsdp(Mlp(), mp_policy=BF16)
    config = PassConfig(planner="block", blocks=("layers.*",), profile="h100_sxm")
    backend = aot_eager_backend(config)
    run = torch.compile(model, backend=backend, fullgraph=True)
    for rows in (8, 12, 16, 20):
        run(torch.randn(rows, 16)).sum().backward()
    forwards = [gm.graph for kind, gm in backend.graphs if kind == "forward"]
    assert len(forwards) == 2  # one for 8 rows, one for any number
    assert [record.failure for record in backend.records if record.failure] == []
    for graph in forwards:
        assert sorted(members(graph, "all_gather")) == sorted(WEIGHTS)
        assert len(starts(graph)) == 2  # a bucket for each block
    torch._dynamo.reset()
