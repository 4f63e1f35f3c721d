"""Which layers a plan takes as equal, and what it does with models that are not a stack of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import simplefsdp
from inductor_passes.costs.profiles import load_profile
from simplefsdp.cli import main
from simplefsdp.explainer.hardware import find_hardware
from simplefsdp.explainer.target import Target
from simplefsdp.explainer.wrapping import find_blocks
from simplefsdp.planner.build import Parameter, Traced, trace
from simplefsdp.planner.compare import predict_peers
from simplefsdp.planner.extend import TRACED_LAYERS
from simplefsdp.planner.predict import MemorySplit, Prediction, predict
from simplefsdp.planner.stack import find_stack
from simplefsdp.planner.text import best_text, memory_text
from tests.helpers.tower import Tower

LAYERS = TRACED_LAYERS + 3


def test_layers_that_differ_in_a_setting_are_no_stack():
    for change in (
        lambda layer: setattr(layer, "activation", torch.relu),
        lambda layer: setattr(layer, "is_global", True),
        lambda layer: setattr(layer.up, "bits", 4),
        lambda layer: layer.up.register_module("adapter", nn.Identity()),
    ):
        model = Tower(LAYERS)
        for layer in model.layers:
            layer.is_global, layer.up.bits = False, 8
        assert find_stack(model) is not None
        change(model.layers[-1])
        assert find_stack(model) is None


def test_a_layer_may_know_its_number():
    model = Tower(LAYERS)
    for number, layer in enumerate(model.layers):
        layer.layer_idx = layer.up.number = number
    assert find_stack(model) is not None
    model.layers[2].layer_idx = 7
    assert find_stack(model) is None


def test_lists_side_by_side_are_no_stack():
    pairs = nn.ModuleDict({name: nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS)) for name in "ab"})
    assert find_stack(pairs) is None
    assert find_stack(nn.ModuleDict({"a": pairs["a"], "b": pairs["b"][:2]})).name == "a"


def test_blocks_are_the_items_of_the_longest_list_that_holds_most_of_the_model():
    assert find_blocks(Tower(2)) == find_blocks(Tower(9)) == "layers.*"
    assert find_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == "*"
    inner = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    assert find_blocks(nn.ModuleDict({"h": nn.ModuleList([inner, nn.Linear(4, 30)])})) == "h.*"
    assert find_blocks(nn.Linear(2, 2)) is None


class Counting(Tower):
    """A tower whose forward knows how many layers it has."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number in range(LAYERS):
            x = self.layers[number](x)
        return self.head(x)


def _traced(model: nn.Module, *inputs: Tensor, **options: object) -> Traced:
    hardware = find_hardware("h100")
    return trace(Target("tower", model, inputs), hardware, gpus=4, planner="greedy", **options)


def test_a_model_that_counts_its_layers_is_traced_whole():
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    traced = _traced(Counting(LAYERS), tokens)
    assert traced.note == "every layer traced: with fewer layers of 'layers' the model cannot be traced"
    assert traced.graphs == _traced(Counting(LAYERS), tokens, whole=True).graphs
    blocks = {item.block for item in traced.graphs[0].problem.collectives}
    assert {f"layers.{number}" for number in range(LAYERS)} < blocks, "peers bucket by these"


def test_frozen_parameters_have_no_optimizer_states_and_buffers_are_stored():
    model = nn.ModuleDict({"frozen": nn.Linear(10, 4, bias=False), "adapter": nn.Linear(10, 2, bias=False)})
    model["frozen"].requires_grad_(False)
    parameters = {name: Parameter.of(item) for name, item in model.named_parameters()}
    stored = Traced((), (), parameters, "", (), buffer_bytes=1000).stored(2)
    assert (stored.total, stored.trained) == (4 * (20 + 10) + 1000, 4 * 10)
    assert (stored.optimizer, stored.least) == (80, 1120 + 3 * 40)
    model.register_buffer("mask", torch.zeros(8, 8, dtype=torch.bool))
    sample = nn.Sequential(model["frozen"], nn.Linear(4, 4))
    sample.register_buffer("mask", model.mask)
    assert _traced(sample, torch.zeros(2, 10)).buffer_bytes == 64


@dataclasses.dataclass
class Output:
    loss: Tensor


class Opaque(nn.Linear):
    def forward(self, x: Tensor) -> Output:
        return Output(super().forward(x).sum())


def test_an_output_without_tensors_in_sight_is_not_taken_for_a_model_without_backward():
    with pytest.raises(RuntimeError, match="the output of Opaque is a Output; return tensors"):
        simplefsdp.explain(Opaque(4, 4), torch.ones(2, 4), ranks=2, profile="h100_sxm")
    report = simplefsdp.explain(
        Opaque(4, 4), torch.ones(2, 4), ranks=2, profile="h100_sxm", loss=lambda out: out.loss
    )
    assert [facts.kind for facts in report.graphs] == ["forward", "backward"]


def relu():
    """What `--model tests.simplefsdp.test_plan_stack:relu` names."""
    return nn.ReLU(), (torch.zeros(4),)


def test_a_model_without_parameters_is_answered_in_a_line(capsys, tmp_path):
    assert main(["explain", "--model", f"{__name__}:relu", "--gpus", "2", "--out", str(tmp_path)]) == 1
    assert "relu has no parameters: there is nothing to shard or explain" in capsys.readouterr().err


def test_what_to_do_where_a_step_does_not_fit_depends_on_whose_model_it_is():
    memory = MemorySplit(2**40, 0, 0, 0, 0, 0)
    hardware = find_hardware("h100")
    assert "it does not fit" in memory_text(memory, hardware)
    assert "--ac" in memory_text(memory, hardware)
    assert "--ac" not in memory_text(memory, hardware, is_own=True)


class Piecewise(nn.Module):
    """A layer in two pieces: they are compiled once, and all layers share what comes out."""

    def __init__(self, width: int, broken: bool) -> None:
        super().__init__()
        self.up, self.down, self.broken = nn.Linear(width, width), nn.Linear(width, width), broken

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.up(x))
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.down(x)


class Mix(nn.Module):
    """Compute without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) @ torch.cos(x).T @ x


class Pieces(nn.Module):
    """Layers, then a piece without parameters, then a head: the graph may break between them, or inside of a layer."""

    def __init__(self, layers: int = 6, width: int = 256, *, broken: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Piecewise(width, broken == "inside") for _ in range(layers))
        self.mix, self.head, self.broken = Mix(), nn.Linear(width, width), broken

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.broken:
            torch._dynamo.graph_break()
        x = self.mix(x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.head(x)


def pieces(broken: str) -> Traced:
    torch.compiler.reset()
    target = Target("pieces", Pieces(broken=broken), (torch.zeros(64, 256),), None, None)
    return trace(target, find_hardware("h100"), gpus=8, planner="none")


def step_of(traced: Traced) -> Prediction:
    profile = load_profile("h100_sxm")
    return predict(traced.graphs, profile, traced.stored(8), runs=traced.runs, planner="none")


@pytest.mark.parametrize("broken", ["behind", "inside"])
def test_a_broken_graph_takes_the_time_and_memory_of_all_its_pieces(broken):
    """The same model in one graph is the oracle: kernels fuse differently, so times and bytes differ a little."""
    whole, traced = pieces(""), pieces(broken)
    assert any("graph break" in line for line in traced.warnings)
    flops = [sum(item.graphs[run.graph].flops for run in item.runs) for item in (whole, traced)]
    assert flops[0] == flops[1] > 0
    sent = [
        sum(part.received_bytes for run in item.runs for part in item.graphs[run.graph].traffic)
        for item in (whole, traced)
    ]
    assert sent[0] == sent[1] > 0
    peers = predict_peers(traced.graphs, (), load_profile("h100_sxm"), traced.stored(8), runs=traced.runs)
    assert "a step is one forward and one backward" in str(peers.left_out)
    one, many = step_of(whole), step_of(traced)
    assert many.step_ns == pytest.approx(one.step_ns, rel=0.1)
    assert many.memory.total_bytes == pytest.approx(one.memory.total_bytes, rel=0.1)
    if broken == "inside":
        assert len(traced.runs) > len(traced.graphs), "layers share their graphs"
        assert "breaks inside a layer" in traced.note
        assert "backward" in best_text(many)
        assert f"in {len(traced.runs) // 2} pieces" in best_text(many)
    else:
        assert "4 of the 6 equal layers" in traced.note
