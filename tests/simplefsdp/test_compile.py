"""What the compiler sees: whole graphs, no recompiles, one compilation for equal blocks, equal numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import MixedPrecisionPolicy, simple_fsdp
from tests.helpers.collectives import counts_by_kind, graph_collectives, record_collectives
from tests.helpers.graphs import GraphRecorder
from tests.helpers.meshes import mesh
from tests.helpers.worlds import fake_process_group
from tests.simplefsdp.models import Block, batch, loss_of, make_net
from tests.simplefsdp.reference import Case, check_same, train_reference, train_sharded
from tests.simplefsdp.zoo import features


@pytest.fixture
def world_of_four():
    with fake_process_group(1, 4):
        yield
    torch._dynamo.reset()


def test_one_forward_and_one_backward_graph_hold_every_collective(world_of_four):
    model = simple_fsdp(make_net())
    parameters = sum(1 for _ in model.parameters())
    recorder = GraphRecorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    for step in range(5):
        loss_of(compiled, batch(step, 1)).backward()
    assert recorder.compile_count == 1
    assert len(recorder.forward) == len(recorder.backward) == 1
    forward = counts_by_kind(graph_collectives(recorder.forward[0].graph))
    backward = counts_by_kind(graph_collectives(recorder.backward[0].graph))
    assert forward == {"all_gather": parameters}
    assert backward["reduce_scatter"] == parameters


@pytest.mark.parametrize(
    ("factor", "expected"), [(1, {"all_reduce": 17}), (2, {"reduce_scatter": 17, "all_reduce": 17})]
)
def test_reductions_of_replicated_and_hybrid_meshes(world_of_four, factor, expected):
    model = simple_fsdp(make_net(), sharding_factor=factor)
    recorder = GraphRecorder()
    loss_of(torch.compile(model, backend=recorder, fullgraph=True), batch(0, 1)).backward()
    backward = counts_by_kind(graph_collectives(recorder.backward[0].graph))
    backward.pop("all_gather", None)
    assert backward == expected


def test_every_collective_carries_the_tag_of_its_parameter(world_of_four):
    model = simple_fsdp(make_net(layers=1))
    recorder = GraphRecorder()
    loss_of(torch.compile(model, backend=recorder, fullgraph=True), batch(0, 1)).backward()
    for graph in (recorder.forward[0].graph, recorder.backward[0].graph):
        nodes = [n for n in graph.nodes if "all_gather" in str(n.target) or "reduce_scatter" in str(n.target)]
        assert nodes
        for node in nodes:
            tag = node.meta["custom"]["simplefsdp"]
            assert tag["param"] in ("weight", "bias")
            assert tag["reshard"] is True
            assert tag["passes"]


def test_equal_blocks_compile_once_and_never_again(world_of_four):
    blocks = nn.Sequential(*[Block() for _ in range(6)])
    simple_fsdp(blocks)
    counter = CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
    for _ in range(5):
        blocks(torch.randn(3, 12, requires_grad=True)).sum().backward()
    assert counter.frame_count == 1


def test_a_layer_that_torch_does_not_compile_by_itself_runs(world_of_four):
    """torch skips its own `forward`s: nothing of ours, such as hooks of saved tensors, may be compiled instead."""
    model = simple_fsdp(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)))
    for layer in model:
        layer.compile(backend="aot_eager", fullgraph=True)
    model(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_equal_blocks_with_other_policies_or_meshes_compile_apart(world_of_four):
    """One code object for all: what a block was compiled for must not serve a block of another policy or mesh."""
    flat, hybrid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    fp32, bf16 = torch.float32, torch.bfloat16
    kinds = [
        (flat, MixedPrecisionPolicy(), {("all_gather", 4, fp32), ("reduce_scatter", 4, fp32)}),
        (
            flat,
            MixedPrecisionPolicy(reduce_dtype=bf16),
            {("all_gather", 4, fp32), ("reduce_scatter", 4, bf16)},
        ),
        (flat, MixedPrecisionPolicy(bf16), {("all_gather", 4, bf16), ("reduce_scatter", 4, bf16)}),
        (
            hybrid,
            MixedPrecisionPolicy(),
            {("all_gather", 2, fp32), ("reduce_scatter", 2, fp32), ("all_reduce", 2, fp32)},
        ),
    ]
    kinds.append(kinds[0])  # as the first one again: its code is found, not that of the last
    blocks = nn.ModuleList(Block() for _ in kinds)
    counter = CompileCounterWithBackend("aot_eager")
    for block, (device_mesh, policy, _) in zip(blocks, kinds, strict=True):
        simple_fsdp(block, device_mesh, mp_policy=policy)
        block.compile(backend=counter, fullgraph=True)
    x = torch.randn(3, 12, requires_grad=True)
    for block in blocks:
        block(x).sum().backward()  # compiles
    for block, (_, _, expected) in zip(blocks, kinds, strict=True):
        with record_collectives() as seen:
            block(x).sum().backward()
        assert {(c.kind, c.group_size, c.dtype) for c in seen} == expected
    assert counter.frame_count == 4


def test_each_class_has_compilations_of_its_own(world_of_four):
    counter = CompileCounterWithBackend("eager")
    kinds = [type(f"Block{number}", (Block,), {}) for number in range(3)]
    with torch._dynamo.config.patch(recompile_limit=1):
        for kind in kinds:
            torch.compile(simple_fsdp(kind()), backend=counter, fullgraph=True)(torch.ones(2, 12))
    assert counter.frame_count == len(kinds)


def test_lengths_that_vary_need_two_graphs_at_most(world_of_four):
    model = simple_fsdp(make_net(layers=1))
    recorder = GraphRecorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    for length in (8, 12, 16, 20):
        compiled(torch.zeros(2, length, dtype=torch.int64)).sum().backward()
    assert recorder.compile_count <= 2


class TwoOutputs(nn.Module):
    """A tuple with an alias of the input, a nested dict, and one output that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x, *, extra):
        y = self.linear(x["x"])
        return x["x"], {"y": y.t(), "sum": y.sum() + extra}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_structured_inputs_and_outputs_are_cast_at_the_root(world_of_four, backend):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float64)
    model = simple_fsdp(TwoOutputs(), mp_policy=policy)
    run = model if backend == "eager" else torch.compile(model, backend=backend, fullgraph=True)
    x, out = run({"x": torch.ones(3, 6)}, extra=torch.tensor(1))
    assert x.dtype == out["y"].dtype == out["sum"].dtype == torch.float64
    out["sum"].backward()
    assert model.linear.weight.grad.dtype == torch.float32


class Writes(nn.Module):
    """Changes a parameter after a submodule has run."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.count = nn.Parameter(torch.zeros(3), requires_grad=not frozen)

    def forward(self, x):
        count = self.count
        x = self.linear(x) * count
        with torch.no_grad():
            count.add_(1)
        return x


@pytest.mark.parametrize("frozen", [True, False])
def test_a_write_to_a_gathered_copy_is_refused_when_it_is_compiled(world_of_four, frozen):
    model = simple_fsdp(nn.Sequential(Writes(frozen)))
    with pytest.raises(Exception, match=r"has written to parameter '0\.count'.*in a buffer"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 3))
    model[0].forward = lambda x: model[0].linear(x) * model[0].count
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 3)).sum().backward()


class WithBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


def _train_all_ways(rank: int, world: int):
    """Losses and parameters of a few SGD steps, eager, compiled whole, by block, with a graph break, by Inductor."""
    results = {}
    for way in ("eager", "aot_eager", "blocks", "inductor"):
        torch._dynamo.reset()
        model = simple_fsdp(make_net(layers=2), mesh(world))
        run = model
        if way in ("aot_eager", "inductor"):
            run = torch.compile(model, backend=way, fullgraph=True)
        if way == "blocks":
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            loss = loss_of(run, batch(step, rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results[way] = [torch.stack(losses), *(p.detach().full_tensor() for p in model.parameters())]
    broken = {}
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = simple_fsdp(WithBreak(), mesh(world))
        run = torch.compile(model, backend=backend)
        run(torch.full((2, 6), float(rank + 1))).square().sum().backward()
        broken[backend] = [p.grad.full_tensor() for p in model.parameters()]
    return results, broken


def test_eager_and_every_way_to_compile_agree(workers):
    for results, broken in workers(2).run(_train_all_ways, timeout=150):
        for way in ("aot_eager", "blocks", "inductor"):
            for ours, expected in zip(results[way], results["eager"], strict=True):
                torch.testing.assert_close(ours, expected, msg=lambda m, w=way: f"{w}: {m}")
        for ours, expected in zip(broken["aot_eager"], broken["eager"], strict=True):
            torch.testing.assert_close(ours, expected)


def _broken_equals_reference(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)
    case = Case(WithBreak, features(2, 6))
    model = simple_fsdp(case.module(), mesh(world))
    run = torch.compile(model, backend="aot_eager")
    check_same(train_sharded(case, rank, model, run), train_reference(case, world)[rank], case.rtol)


def test_a_graph_break_leaves_gradients_right(workers):
    workers(2).run(_broken_equals_reference)
