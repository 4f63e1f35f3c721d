"""Tensor-parallel models, sharded again over data-parallel ranks: collectives that are not ours to prefetch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from inductor_passes import PassConfig, aot_eager_backend, options
from inductor_passes.graph import find_tag, group_key, starts
from inductor_passes.plan import Role
from inductor_passes.report import PlanReport, members_of
from inductor_passes.verify import traffic
from simplefsdp import explain, simple_fsdp
from simplefsdp.explainer.schedule import make_timeline
from tests.helpers.meshes import mesh
from tests.inductor_passes.toy import BF16, Traced, trace_wrapped, world

STEPS = 3
WIDTH = 32
ROWS = 8


class Residual(nn.Module):
    """A residual block; its activation is a ReLU, which TorchInductor's kernels round as eager kernels do."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(normed) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def parallel(sequence: bool) -> nn.Module:
    """A stack on a 2x2 mesh; with `sequence`, there are norms, and activations between blocks are sharded over rows."""
    both = mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    model = Stack(normed=sequence)
    for layer in model.layers:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0)),
            }
        parallelize_module(layer, both["tp"], plan)
    return simple_fsdp(model, both["dp"])


def train(run: Any, model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Losses, gradients of the last step and parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank // 2)
        loss = run(torch.randn(ROWS, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
    results += [p.grad.to_local() for p in model.parameters()]
    return [*results, *(p.detach().to_local() for p in model.parameters())]


def config(move: bool) -> PassConfig:
    # A fast network and slow compute: what is exposed can be hidden, so that something moves.
    return PassConfig(profile="cpu_gloo", planner="block", blocks=("layers.*",), move_compute=move)


def graph_values(rank: int, world_size: int) -> list[str]:
    """What was wrong: values that differ with motion and without, failed passes, nothing moved."""
    values, wrong = [], []
    for move in (False, True):
        torch._dynamo.reset()
        model = parallel(sequence=True)
        backend = aot_eager_backend(config(move))
        values.append(train(torch.compile(model, backend=backend, fullgraph=True), model, rank))
        wrong += [record.failure for record in backend.records if record.failure]
    wrong += [f"value {i}" for i, pair in enumerate(zip(*values, strict=True)) if not torch.equal(*pair)]
    (motion,) = (
        item
        for record in backend.records
        if (record.name, record.graph) == ("bucket", "backward")
        for item in record.items[1:]
    )
    if not motion.moved or motion.kept:
        wrong.append(f"nothing moved: {motion}")
    return wrong


def test_values_are_those_without_motion_bit_for_bit(workers):
    assert workers(4).run(graph_values, timeout=150) == [[]] * 4


def kernel_values(rank: int, world_size: int) -> list[str]:
    """TorchInductor with all passes, whose scheduler nodes are moved too, against eager mode."""
    reference, model = parallel(sequence=False), parallel(sequence=False)
    passes = options(config(True))
    expected = train(reference, reference, rank)
    got = train(torch.compile(model, fullgraph=True, options=passes), model, rank)
    wrong = [f"value {i}" for i, pair in enumerate(zip(got, expected, strict=True)) if not torch.equal(*pair)]
    (reorder,) = passes["reorder_for_compute_comm_overlap_passes"]
    wrong += [record.failure for record in reorder.records if record.failure]
    (report,) = (item for record in reorder.records if record.graph == "backward" for item in record.items)
    kinds = [item.key.kind for item in report.placed.problem.collectives if item.role is Role.FIXED]
    if kinds != ["all_reduce"]:  # of the second block's input; the first one's needs no gradient
        wrong.append(f"tensor-parallel collectives seen: {kinds}")
    if report.motion is None:
        wrong.append("nothing was to be moved")
    return wrong


def test_compiled_values_are_those_of_eager_mode_bit_for_bit(workers):
    assert workers(4).run(kernel_values, timeout=170) == [[]] * 4


# Llama 3.1 8B, 8192 tokens. Meta tensors have these sizes without the memory.
BLOCKS, RANKS = 2, 8
WIDE, INNER, HEADS, KEY_HEADS, TOKENS = 4096, 14336, 32, 8, 8192


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDE // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDE), nn.RMSNorm(WIDE)
        self.wq, self.wo = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDE, KEY_HEADS * head, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDE, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            w(y).unflatten(-1, (-1, WIDE // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(attention.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class WideLlama(nn.Module):
    """Llama blocks whose products are sharded over 8 ranks, on any of 8 data-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WideBlock() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def wide_llama(both: DeviceMesh, config: PassConfig | None = None) -> tuple[nn.Module, torch.Tensor]:
    """The model on the meta device, sharded over a mesh of 8 x 8 ranks, and its input."""
    with torch.device("meta"):
        model = WideLlama()
        x = torch.empty(1, TOKENS, WIDE, dtype=torch.bfloat16, requires_grad=True)
    columns = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), ColwiseParallel)
    rows = dict.fromkeys(("wo", "w2"), RowwiseParallel)
    for layer in model.layers:
        parallelize_module(layer, both["tp"], {name: style() for name, style in (columns | rows).items()})
    return simple_fsdp(model, both["dp"], mp_policy=BF16, passes=config), x


@pytest.fixture(scope="module")
def wide_mesh():
    """A mesh of imagined ranks, for all tests of this file that follow."""
    with world(RANKS * RANKS):
        yield init_device_mesh("cpu", (RANKS, RANKS), mesh_dim_names=("dp", "tp"))


@pytest.fixture(scope="module")
def llamas(wide_mesh):
    """The graphs without motion and with it."""
    return tuple(
        trace_wrapped(*wide_llama(wide_mesh), config=PassConfig(profile="h100_sxm", move_compute=move))
        for move in (False, True)
    )


def reports(traced: Traced, graph: str) -> tuple[Any, ...]:
    (record,) = (item for item in traced.backend.records if (item.name, item.graph) == ("bucket", graph))
    assert record.failure == ""
    return record.items


def exposed_ns(report: PlanReport) -> int:
    """How long collectives that are not ours block compute."""
    items, buckets = report.problem.collectives, report.plan.buckets
    return sum(
        item.exposed_ns
        for item in report.plan.exposed
        if items[buckets[item.bucket].members[0]].role is Role.FIXED
    )


def test_llama_backward_is_shorter_and_its_tensor_parallel_time_hidden(llamas):
    (before,), (after, motion) = (reports(traced, "backward") for traced in llamas)
    assert motion.kept == ""
    # A weight gradient for each of 7 products; the first layer's last have nothing behind them.
    assert len(motion.moved) >= BLOCKS * 5
    assert after.plan.step_ns < 0.92 * before.plan.step_ns
    assert exposed_ns(after) < 0.25 * exposed_ns(before)
    assert motion.after.exposed_ns < 0.25 * motion.before.exposed_ns


def test_each_collective_stays_in_its_group_and_none_of_both_kinds_is_merged(llamas):
    for traced in llamas:
        for kind in ("forward", "backward"):
            found = starts(traced.graph(kind))
            ours = [start for start in found if find_tag(start) is not None]
            others = [start for start in found if find_tag(start) is None]
            groups = [{group_key(start).group for start in items} for items in (ours, others)]
            assert len(groups[0]) == len(groups[1]) == 1
            assert groups[0].isdisjoint(groups[1])
            assert all(members_of(start) == ("?",) for start in others)
            assert {group_key(start).kind for start in others} == {"all_reduce"}
    products = [name for name in llamas[1].gathered("backward") if "norm" not in name]
    assert len(products) == len(set(products)) == BLOCKS * 7
    assert len(llamas[1].reduced("backward")) == BLOCKS * 9


def test_motion_changes_no_byte_of_what_is_communicated(llamas):
    for kind in ("forward", "backward"):
        before, after = (traced.graph(kind) for traced in llamas)
        assert traffic(before) == traffic(after)
    assert sorted(llamas[0].reduced("backward")) == sorted(llamas[1].reduced("backward"))
    assert llamas[0].lines("forward") == llamas[1].lines("forward")


def test_a_report_shows_the_order_that_compute_was_moved_to(wide_mesh):
    config = PassConfig(profile="h100_sxm")
    # Without dumps the plan comes by another way, and must be the same.
    found = [explain(*wide_llama(wide_mesh, config), dumps=dumps).graphs for dumps in (True, False)]
    assert found[0] == found[1]
    backward = found[0][1]
    assert backward.motion.startswith("compute motion, done: ")
    assert make_timeline(backward).step_ns == backward.plan.step_ns
    shared = [bucket.members for bucket in backward.plan.buckets if len(bucket.members) > 1]
    items = backward.problem.collectives
    assert all(items[number].role is not Role.FIXED for members in shared for number in members)
