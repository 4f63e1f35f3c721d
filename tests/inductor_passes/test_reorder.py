"""The final order of scheduler nodes: a permutation that obeys every dependency and hides what it can."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import fx

from inductor_passes import PassConfig, _compat, options, reorder
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.costs.profiles import load_profile
from inductor_passes.graph import find_wait, is_start, is_wait
from inductor_passes.hooks import ReorderHook
from inductor_passes.inorder import plan_in_order
from inductor_passes.lowered import lowered_order
from inductor_passes.reorder import check_schedule, permutation, read_schedule, reorder_pass
from inductor_passes.setups import Setup
from inductor_passes.verify import VerificationError
from simplefsdp import simple_fsdp
from tests.inductor_passes.graphs import Builder, aten, groups, random_graph
from tests.inductor_passes.toy import BF16, Mlp, world

COST = ProfileCostModel(load_profile("h100_sxm"))


@dataclass(eq=False)
class Kernel:
    """A scheduler node as the pass sees it: one graph node, what it needs."""

    node: fx.Node
    needs: list[str] = field(default_factory=list)
    number: int = 0

    def get_name(self) -> str:
        return self.node.name


@pytest.fixture(scope="module")
def names():
    with world(64):
        yield groups(2)


@pytest.fixture(autouse=True)
def kernels_stand_for_graph_nodes(monkeypatch, request):
    if "compiled" in request.node.name:
        return
    monkeypatch.setattr(_compat, "is_collective_kernel", lambda kernel: is_start(kernel.node))
    monkeypatch.setattr(_compat, "is_wait_kernel", lambda kernel: is_wait(kernel.node))
    monkeypatch.setattr(_compat, "is_opaque_kernel", lambda kernel: kernel.node.target is aten.mm.default)
    monkeypatch.setattr(
        _compat, "is_reduction_kernel", lambda kernel: kernel.node.target is aten.sum.dim_IntList
    )
    monkeypatch.setattr(_compat, "origins", lambda kernel: [kernel.node])
    monkeypatch.setattr(_compat, "written_buffers", lambda kernel: [kernel.node.name])
    monkeypatch.setattr(_compat, "read_buffers", lambda kernel: kernel.needs)
    monkeypatch.setattr(
        _compat,
        "reads_graph_inputs",
        lambda kernel: any(source.op == "placeholder" for source in kernel.node.all_input_nodes),
    )
    monkeypatch.setattr(_compat, "order_only_buffers", lambda kernel: [])
    monkeypatch.setattr(_compat, "peak_bytes", lambda kernels: None)
    monkeypatch.setattr(_compat, "lowered_position", lambda kernel: kernel.number)


def lower(module: fx.GraphModule, monkeypatch) -> list[Kernel]:
    """One kernel per call, with the order of collectives frozen by dependencies, as torch does."""
    monkeypatch.setattr(_compat, "lowered_graph", lambda: module.graph)
    kernels, last = [], None
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        needs = [source.name for source in node.all_input_nodes if source.op == "call_function"]
        if is_start(node):
            needs += [last] if last else []
            last = node.name
        kernels.append(Kernel(node, needs, len(kernels)))
    return kernels


def two_blocks(names) -> fx.GraphModule:
    build = Builder()
    x = build.input((64, 64))
    for index in range(3):
        shard = build.input((16, 64))
        cast = build.call(aten._to_copy.default, shard, dtype=torch.float64, param=f"layers.{index}.w")
        full = build.gather(cast, names[0], f"layers.{index}.w")
        weight = build.call(aten._to_copy.default, full, dtype=torch.float32, param=f"layers.{index}.w")
        for _ in range(8):
            x = build.call(aten.mm.default, x, weight)
    return build.finish(x)


def weight_gradients_last(names, monkeypatch) -> tuple[list[Kernel], list[Kernel]]:
    """Kernels of a backward as its graph has them, and with all weight gradients at the end."""
    build = Builder()
    grad = build.input((64, 64))
    reduced, gradients = [], set()
    for index in range(4):
        weight_grad = build.call(aten.mm.default, build.input((64, 64)), grad)
        gradients.add(weight_grad)
        reduced.append(build.reduce_scatter(weight_grad, names[0], f"layers.{index}.w"))
        weight = build.input((64, 64))
        for _ in range(8):
            grad = build.call(aten.mm.default, grad, weight)
    kernels = lower(build.finish(grad, *reduced), monkeypatch)
    late = [k for k in kernels if k.node in gradients or is_start(k.node) or is_wait(k.node)]
    return kernels, [k for k in kernels if k not in late] + late


def compute_of(order: list[Kernel]) -> list[Kernel]:
    return [kernel for kernel in order if not is_start(kernel.node) and not is_wait(kernel.node)]


def shuffled(kernels: list[Kernel], seed: int) -> list[Kernel]:
    """Another order that obeys every dependency."""
    choose, order, placed, left = random.Random(seed), [], set(), list(kernels)
    while left:
        kernel = choose.choice([kernel for kernel in left if placed.issuperset(kernel.needs)])
        left.remove(kernel)
        order.append(kernel)
        placed.add(kernel.get_name())
    return order


def position(order: list[Kernel], node: fx.Node) -> int:
    return [kernel.node for kernel in order].index(node)


def test_starts_rise_with_their_packing_and_waits_stay_at_their_use(names, monkeypatch):
    module = two_blocks(names)
    order, report = reorder_pass(lower(module, monkeypatch), COST, 8, None)
    assert report.placed.plan.step_ns < report.found.step_ns
    starts = [node for node in module.graph.nodes if is_start(node)]
    products = [node for node in module.graph.nodes if node.target is aten.mm.default]
    for index in (1, 2):
        start, wait = starts[index], find_wait(starts[index])
        assert position(order, start) < position(order, products[8 * index - 1])
        assert position(order, start.args[0]) < position(order, start)
        assert position(order, products[8 * index - 1]) < position(order, wait)
        assert position(order, next(iter(wait.users))) > position(order, wait)


def test_without_budget_nothing_starts_before_it_is_needed(names, monkeypatch):
    order, report = reorder_pass(lower(two_blocks(names), monkeypatch), COST, 8, 0)
    assert report.placed.plan.peak_in_flight_bytes == 0
    assert len(order) == len({kernel.node for kernel in order})


@pytest.mark.parametrize("batch", range(3))
def test_random_schedules_are_permutations_that_obey_every_dependency(names, monkeypatch, batch):
    placed_graphs = 0
    for seed in range(batch * 20, (batch + 1) * 20):
        module = random_graph(seed, names)
        kernels = lower(module, monkeypatch)
        budget = random.Random(seed).choice((None, 0, 100, 10**9))
        if plan_in_order(read_schedule(kernels, COST, 8, budget).problem) is None:
            continue
        placed_graphs += 1
        order, _ = reorder_pass(kernels, COST, 8, budget)
        assert sorted(kernel.get_name() for kernel in order) == sorted(
            kernel.get_name() for kernel in kernels
        )
        placed: set[str] = set()
        for kernel in order:
            assert placed.issuperset(kernel.needs), seed
            placed.add(kernel.get_name())
        before, after = ([k for k in nodes if is_start(k.node)] for nodes in (kernels, order))
        assert before == after, seed
    assert placed_graphs >= 15


def test_compute_goes_back_to_the_order_of_the_graph_where_the_order_found_exposes_reductions(
    names, monkeypatch
):
    kernels, found = weight_gradients_last(names, monkeypatch)
    order, report = reorder_pass(found, COST, 8, 10**9)
    assert compute_of(order) == compute_of(kernels)
    assert report.restored
    assert "compute back in the order of the graph" in str(report)
    straight, _ = reorder_pass(kernels, COST, 8, 10**9)
    assert order == straight
    assert report.step_ns < 0.9 * plan_in_order(read_schedule(found, COST, 8, 10**9).problem).step_ns


def test_the_order_found_stays_where_that_of_the_graph_holds_too_much_or_gains_little(names, monkeypatch):
    kernels, found = weight_gradients_last(names, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(reorder, "_WORTH_PER_MILLE", 900)
        order, report = reorder_pass(found, COST, 8, None)
        assert (compute_of(order), report.restored) == (compute_of(found), False)
    in_graph = compute_of(kernels)
    monkeypatch.setattr(_compat, "peak_bytes", lambda order: 2 * 10**9 * (compute_of(order) == in_graph))
    order, report = reorder_pass(found, COST, 8, 10**9)
    assert (compute_of(order), report.restored) == (compute_of(found), False)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_graph_is_found_from_any_other(names, monkeypatch, seed):
    kernels = lower(two_blocks(names), monkeypatch)
    schedule = read_schedule(shuffled(kernels, seed), COST, 8, None)
    assert list(schedule.snodes) != kernels
    assert lowered_order(schedule.snodes, schedule.inputs, schedule.anchored) == kernels


def test_nothing_passes_a_kernel_that_draws_random_numbers(names, monkeypatch):
    build = Builder()
    x, y = build.input((64, 64)), build.input((64, 64))
    values = [build.call(aten.sin.default, x), build.call(aten.bernoulli.default, x)]
    values += [build.call(aten.cos.default, y), build.call(aten.bernoulli.default, y)]
    values += [build.gather(x, names[0], "w"), build.gather(y, names[0], "v")]
    kernels = lower(build.finish(*values), monkeypatch)
    found = [kernels[number] for number in (2, 3, 0, 1, 4, 6, 5, 7)]
    schedule = read_schedule(found, COST, 8, None)
    order = lowered_order(schedule.snodes, schedule.inputs, schedule.anchored)
    assert [kernel.number for kernel in order] == [2, 3, 0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize("damage", ["lost", "early", "collectives"])
def test_verification_sees_damage(names, monkeypatch, damage):
    schedule = read_schedule(lower(two_blocks(names), monkeypatch), COST, 8, None)
    order = permutation(schedule, schedule.found)
    check_schedule(schedule, order)
    if damage == "lost":
        order.pop()
    elif damage == "early":
        order.insert(0, order.pop())
    else:
        for kernel in schedule.snodes:
            schedule.inputs[kernel] = ()
        starts = [kernel for kernel in order if is_start(kernel.node)]
        first, second = order.index(starts[0]), order.index(starts[1])
        order[first], order[second] = order[second], order[first]
    with pytest.raises(VerificationError):
        check_schedule(schedule, order)


def test_a_rising_peak_keeps_the_order(names, monkeypatch):
    kernels = lower(two_blocks(names), monkeypatch)
    monkeypatch.setattr(_compat, "peak_bytes", lambda order: 0 if order == kernels else 2 * 10**9)
    order, report = reorder_pass(kernels, COST, 8, 10**9)
    assert order == kernels
    assert "the peak would rise from 0 to 2000000000 bytes" in report.kept


def test_a_failure_keeps_the_order_and_warns_once(names, monkeypatch):
    kernels = lower(two_blocks(names), monkeypatch)
    hook = ReorderHook((Setup(PassConfig(), load_profile("h100_sxm")),), pinned=True)
    monkeypatch.setattr(reorder, "permutation", lambda schedule, plan: list(schedule.snodes)[1:])
    with pytest.warns(RuntimeWarning, match="the reorder pass keeps the forward graph as it was"):
        assert hook(kernels) is kernels
    assert hook(kernels) is kernels
    assert "not a permutation" in hook.records[-1].failure


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # importing TorchInductor
def test_compiled_code_issues_each_gather_before_the_block_in_front_of_its_own(names, monkeypatch):
    """The wrapper that TorchInductor emits; its kernels are never built, since nothing here reads a value."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, arguments, source: lambda *values: None)
    model = simple_fsdp(Mlp(dim=64), mp_policy=BF16)
    passes = options(PassConfig(planner="block", blocks=("layers.*",), profile="h100_sxm"))

    def step() -> None:
        x = torch.randn(4, 64, requires_grad=True)
        torch.compile(model, fullgraph=True, options=passes)(x).sum().backward()

    with config.patch(fx_graph_cache=False):
        _, (forward, backward) = run_and_get_code(step)
    what = {"all_gather_into_tensor.default(": "gather", "reduce_scatter_tensor.default(": "reduce"}
    what |= {"wait_tensor.default(": "wait", "extern_kernels.mm(": "mm", "extern_kernels.addmm(": "mm"}

    def events(code: str) -> list[str]:
        found = ((name for text, name in what.items() if text in line) for line in code.splitlines())
        return [name for names in found for name in names if not name.startswith("import")]

    assert events(forward) == ["gather", "gather", "wait", "mm", "mm", "wait", "mm", "mm"]
    later = events(backward)
    assert later.count("gather") == later.count("reduce") == 2
    second = [at for at, name in enumerate(later) if name == "gather"][1]
    assert second < later.index("wait")
    assert later[-1] == "wait"
