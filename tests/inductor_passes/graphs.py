"""Graphs built by hand, at random, and run with imitated collectives.

`run` executes a graph with collectives that are plain functions of the positions in their input, different for every
rank: whatever is packed, sent or unpacked wrongly changes a value.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from inductor_passes import _compat

aten = torch.ops.aten
funcol = torch.ops._c10d_functional
RANKS = 4
ROWS, COLUMNS = 4, 8


class Builder:
    """Builds a graph node by node. Values are meta tensors: fake ones are a hundred times slower to make."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def call(self, target: Any, *args: Any, param: str = "", **kwargs: Any) -> fx.Node:
        """Add a call; `param` tags it as part of that parameter's unshard."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = _compat.fake_result(node)
        if param:
            module, _, name = param.rpartition(".")
            stack = {"": ("L['self']", torch.nn.Module), module: (f"L['self'].{module}", torch.nn.Linear)}
            node.meta["custom"] = {"simplefsdp": {"param": name, "reshard": True}}
            node.meta["nn_module_stack"] = stack
        return node

    def gather(self, shard: fx.Node, group: str, param: str = "") -> fx.Node:
        start = self.call(funcol.all_gather_into_tensor.default, shard, RANKS, group, param=param)
        return self.call(funcol.wait_tensor.default, start, param=param)

    def reduce_scatter(self, grad: fx.Node, group: str, param: str = "", op: str = "avg") -> fx.Node:
        start = self.call(funcol.reduce_scatter_tensor.default, grad, op, RANKS, group, param=param)
        return self.call(funcol.wait_tensor.default, start, param=param)

    def all_reduce(self, grad: fx.Node, group: str, param: str = "", op: str = "avg") -> fx.Node:
        start = self.call(funcol.all_reduce.default, grad, op, group, param=param)
        return self.call(funcol.wait_tensor.default, start, param=param)

    def finish(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule(torch.nn.Module(), self.graph)


def groups(count: int) -> list[str]:
    """Names of that many process groups of `RANKS` ranks, in a fake world of the same size."""
    return [dist.new_group(list(range(RANKS))).group_name for _ in range(count)]


class _Imitation(fx.Interpreter):
    """Runs a graph; collectives are functions of one rank's input."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is funcol.all_gather_into_tensor.default:
            return torch.cat([args[0] * (rank + 1) + rank for rank in range(RANKS)])
        if target is funcol.reduce_scatter_tensor.default:
            parts = args[0].chunk(RANKS)
            return parts[1] * 2 + parts[3] + len(args[1])
        if target is funcol.all_reduce.default:
            return args[0] * 3 + len(args[1])
        if target is funcol.all_reduce_.default:
            return args[0].mul_(5)
        if target is funcol.wait_tensor.default:
            return args[0]
        return super().call_function(target, args, kwargs)


def run(module: fx.GraphModule) -> list[torch.Tensor]:
    """Results of a graph on inputs that depend on nothing but their shapes."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        inputs.append(torch.rand(value.shape, generator=generator).mul(8).to(value.dtype))
    return list(_Imitation(module).run(*inputs))


def random_graph(seed: int, names: list[str]) -> fx.GraphModule:
    """A graph of gathers, reductions and compute with every complication the passes know.

    Several groups and dtypes, padded and sliced parameters, gathers fed by gathers, reductions in two steps,
    collectives that are not ours, unknown communication, parameters read twice or only returned.
    """
    choose = random.Random(seed)
    build = Builder()
    activation = build.input((ROWS, COLUMNS))
    ramp = build.input((4096,))
    shards = [
        build.input(
            (choose.randint(1, 5), choose.choice((1, 3, 8))), choose.choice((torch.float32, torch.bfloat16))
        )
        for _ in range(choose.randint(1, 5))
    ]
    outputs: list[fx.Node] = []
    fulls: list[tuple[str, fx.Node]] = []

    def mix(value: fx.Node) -> None:
        """Let every element of a value, by its position, have its say in the activation."""
        nonlocal activation
        flat = build.call(aten.reshape.default, value, [-1])
        flat = build.call(aten._to_copy.default, flat, dtype=torch.float32)
        part = build.call(aten.slice.Tensor, ramp, 0, 0, flat.meta["val"].numel())
        activation = build.call(aten.add.Tensor, activation, build.call(aten.dot.default, flat, part))
        activation = build.call(aten.sin.default, activation)

    def unshard(name: str, shard: fx.Node, group: str) -> None:
        if choose.random() < 0.5:
            shard = build.call(aten._to_copy.default, shard, dtype=torch.bfloat16, param=name)
        if choose.random() < 0.3:
            shard = build.call(aten.constant_pad_nd.default, shard, [0, 0, 0, 1], param=name)
        full = build.gather(shard, group, name)
        if choose.random() < 0.3:
            full = build.call(aten.slice.Tensor, full, 0, 0, full.meta["val"].shape[0] - 1, param=name)
        if choose.random() < 0.3:
            full = build.call(aten.t.default, full)
        fulls.append((name, full))
        if choose.random() < 0.1:
            outputs.append(full)
        else:
            mix(full)

    for index, shard in enumerate(shards):
        unshard(f"layers.{index // 3}.p{index}", shard, choose.choice(names))
        event = choose.random()
        if event < 0.15:
            name, full = choose.choice(fulls)
            if full.meta["val"].dim() == 2:
                fed = build.call(aten.slice.Tensor, full, 0, 0, 1, param=name)
                fed = build.call(aten.clone.default, fed, memory_format=torch.contiguous_format, param=name)
                unshard(f"{name}_again", fed, choose.choice(names))
        elif event < 0.3:
            activation = build.all_reduce(activation, choose.choice(names), op="sum")
        elif event < 0.4:
            copy = build.call(aten.clone.default, activation)
            activation = build.call(funcol.all_reduce_.default, copy, "sum", names[0])
        elif event < 0.5:
            mix(choose.choice(fulls)[1])
        weight = build.call(aten.mm.default, activation, build.call(aten.t.default, activation))
        if choose.random() < 0.5:
            mix(weight)
    for index in range(choose.randint(0, 5)):
        name = f"layers.{index // 3}.g{index}"
        shape = [RANKS * choose.randint(1, 3), choose.choice((1, 5))]
        part = build.call(aten.slice.Tensor, ramp, 0, index, index + shape[0] * shape[1])
        total = build.call(aten.sum.default, activation)
        grad = build.call(aten.reshape.default, build.call(aten.mul.Tensor, part, total), shape)
        if choose.random() < 0.4:
            grad = build.call(aten._to_copy.default, grad, dtype=torch.bfloat16, param=name)
        op = choose.choice(("avg", "avg", "sum"))
        form = choose.random()
        if form < 0.6:
            reduced = build.reduce_scatter(grad, choose.choice(names), name, op)
        else:
            reduced = build.all_reduce(grad, choose.choice(names), name, op)
        if form > 0.4:
            reduced = build.all_reduce(reduced, names[-1], name, op)
        outputs.append(build.call(aten._to_copy.default, reduced, dtype=torch.float32, param=name))
        if choose.random() < 0.3:
            mix(total)
        if choose.random() < 0.1:
            mix(reduced)
    return build.finish(activation, *outputs)
