"""Reading graphs: tags, module names, sizes, chains, and the division into regions and windows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from inductor_passes import graph as fxg
from inductor_passes import work
from inductor_passes.chains import find_gathered_values
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.costs.profiles import load_profile
from inductor_passes.labels import name_collectives
from inductor_passes.plan import GroupKey, Role
from inductor_passes.program import find_block, read_program
from inductor_passes.report import schedule_lines
from tests.inductor_passes.graphs import RANKS, Builder, aten, funcol, groups
from tests.inductor_passes.toy import world


@pytest.fixture(scope="module")
def names():
    with world(RANKS):
        yield groups(2)


def read(module, blocks=()):
    return read_program(module.graph, ProfileCostModel(load_profile("h100_sxm")), 8, blocks)


@pytest.mark.parametrize(
    ("path", "fqn"),
    [
        ("L['self']", ""),
        ("L['self'].layers.0.wq", "layers.0.wq"),
        ("L['fn']._modules['layers']._modules['0']", "layers.0"),
        ("L['model'].blocks[3].mlp", "blocks.3.mlp"),
    ],
)
def test_module_names(path, fqn):
    node = Builder().input((1,))
    node.meta["nn_module_stack"] = {"a": ("L['self']", nn.Module), "b": (path, nn.Linear)}
    assert fxg.module_fqn(node) == fqn
    node.meta["fwd_nn_module_stack"] = node.meta.pop("nn_module_stack")
    assert fxg.module_fqn(node) == fqn


class Base(nn.Module):
    pass


class Derived(Base):
    pass


@pytest.mark.parametrize(
    ("blocks", "found"),
    [
        (("layers.*",), "layers.0"),
        (("layers.*", "layers.*.attention"), "layers.0.attention"),
        (("Base",), "layers.0"),
        ((f"{Derived.__module__}.Derived",), "layers.0"),
        (("*",), "layers"),
        (("layers.1",), None),
        ((), None),
    ],
)
def test_blocks_are_named_by_path_glob_or_class(blocks, found):
    node = Builder().input((1,))
    node.meta["nn_module_stack"] = {
        "a": ("L['self']", nn.Sequential),
        "b": ("L['self'].layers.0", Derived),
        "c": ("L['self'].layers.0.attention.wq", nn.Linear),
    }
    assert find_block(node, blocks) == found


def test_collectives_are_described_by_kind_group_dtype_and_operation(names):
    build = Builder()
    gather = build.gather(build.input((2, 3), torch.bfloat16), names[0], "a").args[0]
    scatter = build.reduce_scatter(build.input((RANKS, 2)), names[1], "b", "sum").args[0]
    assert fxg.group_key(gather) == GroupKey("all_gather", names[0], "bfloat16", "")
    assert fxg.group_key(scatter) == GroupKey("reduce_scatter", names[1], "float32", "sum")
    assert fxg.full_bytes(gather) == RANKS * 2 * 3 * 2
    assert fxg.full_bytes(scatter) == RANKS * 2 * 4
    assert fxg.world_of(build.all_reduce(build.input((2,)), names[0]).args[0]) == RANKS
    with pytest.raises(ValueError, match="starts no collective"):
        fxg.get_kind(fxg.input_of(gather))


def test_tags_that_are_none_are_none():
    build = Builder()
    node = build.call(aten.neg.default, build.input((2,)))
    for custom in (None, {}, {"simplefsdp": None}, {"simplefsdp": {"reshard": True}}, "text"):
        node.meta["custom"] = custom
        assert fxg.find_tag(node) is None


def test_a_chain_ends_where_anything_else_joins_in(names):
    build = Builder()
    x = build.input((RANKS * 2, 8))
    full = build.gather(build.input((2, 8)), names[0], "w")
    cast = build.call(aten._to_copy.default, full, dtype=torch.float64)
    ones = build.call(aten.ones.default, [RANKS * 2, 8], device="meta")
    doubled = build.call(aten.add.Tensor, cast, ones)
    random = build.call(aten.rand_like.default, doubled)
    mixed = build.call(aten.mul.Tensor, doubled, x)
    graph = build.finish(mixed, random).graph
    values = find_gathered_values(graph, set())
    assert {full.args[0], full, cast, doubled} == set(values)
    assert all(values.values())


def test_overwritten_parameters_and_untagged_gathers_are_no_chains(names):
    build = Builder()
    shard, other = build.input((2, 8)), build.input((2, 8))
    full = build.gather(shard, names[0], "w")
    plain = build.gather(other, names[0])
    copy = build.call(aten.copy_.default, shard, build.call(aten.neg.default, shard))
    values = find_gathered_values(build.finish(full, plain, copy).graph, set())
    assert values == {full.args[0]: False, full: False}


def test_windows_follow_producers_readers_and_barriers(names):
    build = Builder()
    x = build.input((RANKS * 2, 8))
    full = build.gather(build.input((2, 8)), names[0], "w")  # collective 0
    y = build.call(aten.mm.default, build.input((8, RANKS * 2)), full)  # region 0
    z = build.call(aten.mm.default, y, y)  # region 1
    grad = build.call(aten.mm.default, x, z)  # region 2
    cast = build.call(aten._to_copy.default, grad, dtype=torch.bfloat16, param="w")
    reduced = build.reduce_scatter(cast, names[0], "w")  # collective 1
    build.call(aten.copy_.default, x, grad)  # region 3, a barrier
    late = build.gather(build.input((2, 8)), names[1], "v")  # collective 2
    end = build.call(aten.mm.default, late, z)  # region 4
    program = read(build.finish(reduced, end))
    assert [[node.name for node in region] for region in program.regions] == [
        ["mm_default"],
        ["mm_default_1"],
        ["mm_default_2"],
        ["copy__default"],
        ["mm_default_3"],
    ]
    gather, reduction, second = program.problem.collectives
    assert (gather.role, gather.earliest_issue, gather.latest_issue, gather.latest_wait) == (
        Role.GATHER,
        0,
        0,
        0,
    )
    assert (reduction.role, reduction.earliest_issue, reduction.latest_issue) == (Role.REDUCE, 3, 3)
    assert (second.earliest_issue, second.latest_issue, second.key.group) == (4, 4, "group1")
    assert min(program.problem.region_ns) > 0


def test_results_that_feed_another_collective_are_dependencies(names):
    build = Builder()
    grad = build.call(aten.neg.default, build.input((RANKS * 2, 8)))
    reduced = build.reduce_scatter(grad, names[0], "w")
    total = build.all_reduce(reduced, names[1], "w")
    fixed = build.all_reduce(build.call(aten.neg.default, grad), names[0])
    program = read(build.finish(total, build.call(aten.neg.default, fixed)))
    first, second, third = program.problem.collectives
    assert second.depends_on == (0,)
    assert third.role is Role.FIXED
    assert third.earliest_issue == third.latest_issue == 2
    assert first.latest_wait == second.latest_issue == len(program.regions)


def test_padding_is_no_compute_so_ranks_agree(names):
    problems = []
    for pad in (False, True):
        build = Builder()
        shard = build.input((1 if pad else 2, 8))
        if pad:
            shard = build.call(aten.constant_pad_nd.default, shard, [0, 0, 0, 1], param="w")
        full = build.gather(shard, names[0], "w")
        grad = build.call(aten.mm.default, full, build.call(aten.t.default, full))
        reduced = build.reduce_scatter(build.call(aten.clone.default, grad), names[0], "w")
        if pad:
            reduced = build.call(aten.slice.Tensor, reduced, 0, 0, 1, param="w")
        problems.append(read(build.finish(reduced)).problem)
    assert problems[0] == problems[1]


def test_symbolic_sizes_count_a_nominal_number(names):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def flops(length: int) -> int:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        build = Builder()
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        x, weight = build.input((length, 8)), build.input((8, 8))
        x.meta["val"] = mode.from_tensor(torch.empty(length, 8), symbolic_context=context)
        weight.meta["val"] = mode.from_tensor(torch.empty(8, 8))
        node = build.call(aten.mm.default, x, weight)
        nominal = work.nominal_size(build.finish(node).graph)
        (kernel,) = work.kernels([node], nominal)
        return kernel.flops

    assert flops(6) == flops(7) == 2 * work.NOMINAL_SYMBOLIC_ELEMENTS * 8 * 8


def test_light_neighbours_are_one_kernel(names):
    build = Builder()
    x, y = build.input((4, 8)), build.input((8, 4))
    view = build.call(aten.t.default, build.call(aten.sin.default, x))
    total = build.call(aten.add.Tensor, view, y)
    module = build.finish(build.call(aten.mm.default, total, x))
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    heavy, light = work.kernels(nodes, 1)
    assert heavy.flops == 2 * 8 * 4 * 8
    assert light.moved_bytes == 4 * (32 + 32 + 32)  # x, y and the sum; the sine never leaves the kernel
    assert heavy.dtype == light.dtype == "float32"


def test_what_is_only_viewed_is_not_read(names):
    build = Builder()
    x, y = build.input((4, 8)), build.input((16,))
    viewed, used = build.call(aten.t.default, x), build.call(aten.view.default, y, [4, 4])
    result = build.call(aten.sin.default, used)
    build.finish(viewed, result)
    (kernel,) = work.kernels([viewed, used, result], 1)
    assert kernel.moved_bytes == 4 * (16 + 16)  # y, through its view, and the sine


def test_names_of_collectives_show_parameter_and_configuration(names):
    build = Builder()
    first = build.gather(build.input((2, 8)), names[0], "layers.0.wq")
    graph = build.finish(first).graph
    name_collectives(graph, "abc")
    assert first.args[0].name == "all_gather_layers_0_wq_abc"
    name_collectives(graph, "abc")
    assert first.args[0].name == "all_gather_layers_0_wq_abc"


def test_schedule_lines_count_heavy_operators(names):
    build = Builder()
    x = build.input((8, 8))
    full = build.gather(build.input((2, 8)), names[0], "w")
    unread = build.call(funcol.all_reduce.default, x, "sum", names[0])
    y = build.call(aten.mm.default, x, x)
    total = build.all_reduce(build.call(aten.mm.default, y, full), names[0], "w")
    assert schedule_lines(build.finish(total, unread).graph) == [
        "all_gather w 256 B float32: start 0, wait 0",
        "all_reduce.sum ? 256 B float32: start 0, wait -",
        "all_reduce.avg w 256 B float32: start 2, wait 2",
    ]
