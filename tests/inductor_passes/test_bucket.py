"""Applying plans to graphs: values, order, layouts, and what happens when a plan does not fit."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import fx, nn

from inductor_passes import PassConfig, bucket_ops, hooks
from inductor_passes.costs.profiles import load_profile
from inductor_passes.graph import find_kind, find_wait, is_barrier, is_wait, starts, tensors_of
from inductor_passes.hooks import PostGradHook, bucket_pass
from inductor_passes.report import members_of
from inductor_passes.setups import Setup
from inductor_passes.verify import Snapshot, VerificationError
from tests.helpers.effort import count_calls
from tests.inductor_passes.graphs import RANKS, Builder, aten, funcol, groups, random_graph, run
from tests.inductor_passes.toy import trace, world


@pytest.fixture(scope="module")
def names():
    """Three process groups, in the world of the 64 ranks that the Llama is traced for."""
    with world(64):
        yield groups(3)


def setup(planner: str = "block", **options) -> Setup:
    options.setdefault("blocks", ("layers.*",))
    return Setup(PassConfig(planner=planner, **options), load_profile("h100_sxm"))


def bucketed(module: fx.GraphModule, how: Setup | None = None) -> hooks.PlanReport:
    return bucket_pass(module.graph, how or setup(), Snapshot(module.graph))


def sizes(module: fx.GraphModule, kind: str) -> list[int]:
    """Members of each collective of a kind, in order of issue."""
    return [len(members_of(start)) for start in starts(module.graph) if find_kind(start) == kind]


SEEDS_PER_TEST = 50


@pytest.mark.parametrize("batch", range(10))
def test_random_graphs_keep_their_values_bit_for_bit(names, batch):
    for seed in range(batch * SEEDS_PER_TEST, (batch + 1) * SEEDS_PER_TEST):
        choose = random.Random(seed)
        module = random_graph(seed, names)
        expected = run(module)
        walls = [node for node in module.graph.nodes if is_barrier(node)]
        before = {start.name: _barriers_passed(module.graph, start, walls) for start in starts(module.graph)}
        planner = choose.choice(("none", "block", "greedy", "auto"))
        budget = choose.choice((None, 0, 1e-6, 4.0))
        bucketed(module, setup(planner, memory_budget_gb=budget))
        for got, want in zip(run(module), expected, strict=True):
            assert got.dtype == want.dtype, seed
            assert torch.equal(got, want), seed
        for start in starts(module.graph):
            if start.name in before:
                assert _barriers_passed(module.graph, start, walls) == before[start.name], seed


def _barriers_passed(graph: fx.Graph, start: fx.Node, walls: list[fx.Node]) -> int:
    order = {node: position for position, node in enumerate(graph.nodes)}
    return sum(order[wall] < order[start] for wall in walls)


def test_random_graphs_do_merge(names):
    merged = 0
    for seed in range(40):
        module = random_graph(seed, names)
        count = len(starts(module.graph))
        bucketed(module)
        merged += count - len(starts(module.graph))
    assert merged > 10


def two_gathers(names, *, second_group=0, second_dtype=torch.float32, second_rows=3):
    build = Builder()
    x, first = build.input((4, 8)), build.input((2, 8))
    second = build.input((second_rows, 8), second_dtype)
    full = build.gather(first, names[0], "layers.0.a")
    other = build.gather(second, names[second_group], "layers.0.b")
    total = build.call(
        aten.add.Tensor, build.call(aten.sum.default, full), build.call(aten.sum.default, other)
    )
    return build.finish(build.call(aten.mul.Tensor, x, total))


def test_only_equal_keys_share_a_bucket(names):
    same = two_gathers(names)
    bucketed(same)
    assert sizes(same, "all_gather") == [2]
    for different in ({"second_group": 1}, {"second_dtype": torch.bfloat16}):
        module = two_gathers(names, **different)
        bucketed(module)
        assert sizes(module, "all_gather") == [1, 1]


def test_a_gather_fed_by_another_is_never_in_its_bucket(names):
    build = Builder()
    full = build.gather(build.input((2, 8)), names[0], "layers.0.a")
    fed = build.call(aten.slice.Tensor, full, 0, 0, 2, param="layers.0.a")
    module = build.finish(build.call(aten.sum.default, build.gather(fed, names[0], "layers.0.b")))
    for planner in ("block", "greedy", "auto"):
        bucketed(module, setup(planner))
        assert sizes(module, "all_gather") == [1, 1]


@pytest.mark.parametrize("wall", ["communication", "side effect"])
def test_nothing_crosses_what_the_passes_do_not_understand(names, wall):
    build = Builder()
    x = build.input((4, 8))
    first, second = build.input((2, 8)), build.input((2, 8))
    total = build.call(aten.sum.default, build.gather(first, names[0], "layers.0.a"))
    if wall == "communication":
        total = build.call(funcol.all_reduce_.default, build.call(aten.clone.default, total), "sum", names[0])
    else:
        build.call(aten.copy_.default, x, build.call(aten.neg.default, x))
    other = build.call(aten.sum.default, build.gather(second, names[0], "layers.0.b"))
    module = build.finish(build.call(aten.add.Tensor, total, other))
    for planner in ("block", "greedy", "auto"):
        bucketed(module, setup(planner))
        kinds = [find_kind(n) or "wall" for n in module.graph.nodes if find_kind(n) or is_barrier(n)]
        assert kinds == ["all_gather", "wall", "all_gather"]


def test_equal_gradients_are_reduced_once_and_do_not_share_memory(names):
    """What common-subexpression elimination leaves of two equal gradients: one start, two waits, two results."""
    build = Builder()
    grad = build.input((RANKS * 2, 8))
    first = build.reduce_scatter(grad, names[0], "layers.0.a")
    second = build.call(funcol.wait_tensor.default, first.args[0], param="layers.0.b")
    module = build.finish(first, build.call(aten.t.default, second))
    expected = run(module)
    hook = PostGradHook((setup(),), pinned=True)
    hook(module.graph)
    one, other = run(module)
    assert torch.equal(one, expected[0])
    assert torch.equal(other, expected[1])
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    assert sizes(module, "reduce_scatter") == [1]


def test_two_reads_of_one_gather_are_one_value(names):
    build = Builder()
    first = build.gather(build.input((2, 8)), names[0], "layers.0.a")
    second = build.call(funcol.wait_tensor.default, first.args[0], param="layers.0.a")
    module = build.finish(build.call(aten.sum.default, first), build.call(aten.mean.default, second))
    PostGradHook((setup(),), pinned=True)(module.graph)
    assert sum(map(is_wait, module.graph.nodes)) == 1
    assert not any(node.target is aten.clone.default for node in module.graph.nodes)


def test_layout_of_a_gather_bucket(names):
    """One row is sent, one row comes from each rank, every member is some columns; no constant of one rank."""
    module = two_gathers(names)
    shards = [node for node in module.graph.nodes if node.op == "placeholder"][1:]
    bucketed(module)
    (start,) = starts(module.graph)
    packed = start.args[0]
    assert packed.target is bucket_ops.pack
    assert packed.args == (shards, 1, torch.float32)
    assert tuple(packed.meta["val"].shape) == (1, 40)
    wait = find_wait(start)
    assert tuple(wait.meta["val"].shape) == (RANKS, 40)
    (unpack,) = wait.users
    assert unpack.target is bucket_ops.unpack
    assert unpack.args == (wait, [16, 24])


def test_layout_of_a_reduction_bucket(names):
    """A row for each rank is sent, one row comes back, and results are places in it: nothing is copied out."""
    build = Builder()
    grads = [build.input((RANKS * 2, 8)), build.input((RANKS * 3, 8))]
    module = build.finish(
        *(build.reduce_scatter(grad, names[0], f"layers.0.{i}") for i, grad in enumerate(grads))
    )
    bucketed(module)
    (start,) = starts(module.graph)
    assert start.args[0].target is bucket_ops.pack
    assert start.args[0].args == (grads, RANKS, torch.float32)
    wait = find_wait(start)
    assert tuple(wait.meta["val"].shape) == (1, 40)
    assert [node.target for node in wait.users] == [aten.slice.Tensor] * 2
    assert [node.args[1:] for node in wait.users] == [(1, 0, 16), (1, 16, 40)]


@pytest.mark.parametrize("kind", ["gather", "reduction"])
def test_buckets_are_packed_from_what_was_to_be_cast_and_laid_out(names, kind):
    """Casts, clones and views that only prepare a member are left to the copy; a second cast, or one read elsewhere, is
    not."""
    build = Builder()
    convert = torch.ops.prims.convert_element_type.default
    x, y, z = (build.input((4 * RANKS, 6), torch.float64) for _ in range(3))
    permuted = build.call(aten.permute.default, build.call(aten.view.default, x, [4, RANKS, 6]), [1, 0, 2])
    cast = build.call(convert, permuted, torch.float32)
    cloned = build.call(aten.clone.default, cast, memory_format=torch.contiguous_format)
    sent = [build.call(aten.view.default, cloned, [4 * RANKS, 6])]
    once = build.call(convert, y, torch.bfloat16)
    sent.append(build.call(convert, once, torch.float32))
    sent.append(build.call(convert, z, torch.float32))
    collective = build.gather if kind == "gather" else build.reduce_scatter
    results = [collective(node, names[0], f"layers.0.{i}") for i, node in enumerate(sent)]
    module = build.finish(
        *(build.call(aten.mul.Tensor, item, 2.0) for item in results), build.call(aten.neg.default, sent[2])
    )
    expected = run(module)
    bucketed(module)
    (start,) = starts(module.graph)
    assert start.args[0].args[0] == [permuted, once, sent[2]]
    assert all(map(torch.equal, run(module), expected))
    assert cloned not in module.graph.nodes


def test_a_copy_that_protects_from_an_overwrite_stays(names):
    build = Builder()
    shards = [build.input((2, 8)) for _ in range(2)]
    sent = [build.call(aten.clone.default, shard, param=f"layers.0.{i}") for i, shard in enumerate(shards)]
    fulls = [build.gather(node, names[0], f"layers.0.{i}") for i, node in enumerate(sent)]
    total = build.call(aten.add.Tensor, *fulls)
    build.call(aten.copy_.default, shards[0], build.call(aten.neg.default, shards[0]))
    module = build.finish(total)
    expected = run(module)
    bucketed(module)
    (start,) = starts(module.graph)
    assert start.args[0].args[0] == [sent[0], shards[1]]
    assert all(map(torch.equal, run(module), expected))


def test_values_of_new_nodes_are_those_of_the_fake_mode(names):
    """The short way to the meta kernels gives the tensors of the long way: layout, device, and whose memory it is."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    build = Builder()
    with FakeTensorMode() as mode:
        shards = [torch.empty(2, 8), torch.empty(3, 8)[:, ::2]]
        grads = [torch.empty(RANKS, 6), torch.empty(6, 2 * RANKS).t()]
    nodes = [build.input((1,)) for _ in (*shards, *grads)]
    for node, value in zip(nodes, (*shards, *grads), strict=True):
        node.meta["val"] = value
    fulls = [build.gather(node, names[0], f"layers.0.p{i}") for i, node in enumerate(nodes[:2])]
    means = [build.reduce_scatter(node, names[0], f"layers.0.g{i}") for i, node in enumerate(nodes[2:])]
    module = build.finish(*(build.call(aten.sum.default, full) for full in fulls), *means)
    found = {node.name for node in module.graph.nodes}
    bucketed(module)
    added = [node for node in module.graph.nodes if node.name not in found]
    assert {node.target for node in added} >= {
        *(bucket_ops.pack, bucket_ops.unpack),
        *(aten.reshape.default, aten.slice.Tensor),
    }

    def layout(value, sources):
        storage = value.untyped_storage()._cdata
        shared = [storage == source.untyped_storage()._cdata for source in sources]
        strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
        return value.shape, strides, value.storage_offset(), value.dtype, value.device, shared

    for node in added:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        with mode:
            expected = node.target(*args, **kwargs)
        sources = [value for source in node.all_input_nodes for value in tensors_of(source)]
        wanted = expected if isinstance(expected, list) else [expected]
        for value, want in zip(tensors_of(node), wanted, strict=True):
            assert value.fake_mode is mode
            assert layout(value, sources) == layout(want, sources), node.format_node()


def test_effort_grows_with_the_graph_and_no_faster(names):
    def effort(blocks: int) -> float:
        build = Builder()
        x = build.input((8, 8))
        for block in range(blocks):
            for part in "abc":
                full = build.gather(build.input((2, 8)), names[0], f"layers.{block}.{part}")
                x = build.call(aten.relu.default, build.call(aten.mm.default, x, full))
        graph = build.finish(x).graph
        nodes = len(graph.nodes)
        return count_calls(lambda: PostGradHook((setup("none"),), pinned=True)(graph)) / nodes

    effort(2)  # what Python does only once
    small, large = effort(40), effort(160)
    assert large < 1.1 * small


def test_symbolic_sizes_stay_alone(names):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    build = Builder()
    inputs = [build.input((2, 8)) for _ in range(3)]
    for node, kind in zip(inputs, (DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC), strict=True):
        context = StatelessSymbolicContext(dynamic_sizes=[kind, DimDynamic.STATIC])
        node.meta["val"] = mode.from_tensor(torch.empty(6, 8), symbolic_context=context)
    fulls = [build.gather(node, names[0], f"layers.0.p{i}") for i, node in enumerate(inputs)]
    module = build.finish(*(build.call(aten.sum.default, full) for full in fulls))
    bucketed(module)
    assert sorted(sizes(module, "all_gather")) == [1, 2]


def test_a_second_run_changes_nothing(names):
    module = random_graph(5, names)
    hook = PostGradHook((setup("auto"),), pinned=True)
    hook(module.graph)
    text = module.graph.python_code("self").src
    hook(module.graph)
    assert module.graph.python_code("self").src == text
    assert len(hook.records) == 1


def test_a_graph_whose_pass_fails_stays_as_it_was(names, monkeypatch):
    module = random_graph(3, names)
    expected, text = run(module), module.graph.python_code("self").src
    hook = PostGradHook((setup(),), pinned=True)

    def spoil(graph, program, plan):
        unread = real(graph, program, plan)
        last = starts(graph)[-1]
        graph.output_node().prepend(last.all_input_nodes[0])
        return unread

    real = hooks.apply_plan
    monkeypatch.setattr(hooks, "apply_plan", spoil)
    with pytest.warns(
        RuntimeWarning, match="the bucket pass keeps the forward graph as it was: .*stands before"
    ):
        hook(module.graph)
    assert module.graph.python_code("self").src == text
    assert all(map(torch.equal, run(module), expected))
    assert "VerificationError" in hook.records[0].failure
    hook(module.graph)  # warns once
    monkeypatch.undo()
    hook(module.graph)
    assert hook.records[-1].failure == ""


def test_a_graph_that_cannot_be_described_stays_as_it_was(names, monkeypatch):
    module = random_graph(3, names)
    text = module.graph.python_code("self").src
    hook = PostGradHook((setup(),), pinned=True)

    def fail(graph):
        raise ValueError("a collective without a value")

    monkeypatch.setattr(hooks, "schedule_lines", fail)
    with pytest.warns(
        RuntimeWarning, match="keeps the forward graph as it was: .*a collective without a value"
    ):
        hook(module.graph)
    assert module.graph.python_code("self").src == text


@pytest.mark.parametrize("damage", ["drop", "swap", "bytes"])
def test_verification_sees_damage(names, damage):
    module = two_gathers(names)
    snapshot = Snapshot(module.graph)
    wait = find_wait(starts(module.graph)[0])
    if damage == "drop":
        start = wait.args[0]
        wait.replace_all_uses_with(start)
    elif damage == "swap":
        wait.args[0].append(wait.args[0].args[0])
    else:
        wait.replace_all_uses_with(find_wait(starts(module.graph)[1]))
    from inductor_passes.verify import check_graph

    with pytest.raises(VerificationError):
        check_graph(module.graph, snapshot)


def test_plans_that_the_graph_cannot_follow_are_refused(names):
    from inductor_passes.bucket import apply_plan
    from inductor_passes.costs.model import ProfileCostModel
    from inductor_passes.planners import plan_collectives
    from inductor_passes.program import read_program

    module = two_gathers(names)
    program = read_program(module.graph, ProfileCostModel(load_profile("h100_sxm")), 8)
    plan = plan_collectives(program.problem, "none")
    late = len(program.regions)
    events = tuple(dataclasses.replace(event, slot=late) for event in plan.events)
    with pytest.raises(VerificationError, match="before the plan has it"):
        apply_plan(module.graph, program, dataclasses.replace(plan, events=events))


@pytest.mark.parametrize(
    ("factor", "kinds"), [(1, {"all_reduce.avg"}), (2, {"reduce_scatter.avg", "all_reduce.avg"})]
)
def test_all_reduces_of_replicas_are_bucketed_too(names, factor, kinds):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    config = PassConfig(planner="block", blocks=("Sequential",), profile="h100_sxm")
    traced = trace(model, torch.randn(4, 16), sharding_factor=factor, config=config)
    reductions = [line.split()[:2] for line in traced.lines("backward") if "all_gather" not in line]
    assert {kind for kind, _ in reductions} == kinds
    assert all(members.count("+") == 5 for _, members in reductions)
    assert len(reductions) == len(kinds)
