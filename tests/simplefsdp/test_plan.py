"""`simplefsdp plan`: repetition of layers, prediction, and what the command says."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn

from inductor_passes.costs.profiles import load_profile
from simplefsdp.cli import main
from simplefsdp.explainer.facts import BEFORE
from simplefsdp.explainer.hardware import GIB, find_hardware
from simplefsdp.explainer.schedule import make_timeline
from simplefsdp.llama.config import get_config
from simplefsdp.llama.model import Llama
from simplefsdp.planner.build import Parameter, Traced
from simplefsdp.planner.extend import TRACED_LAYERS, ExtensionError, extend
from simplefsdp.planner.predict import MemorySplit, Stored, predict
from simplefsdp.planner.stack import cut, find_stack, restore
from simplefsdp.planner.text import fit_text, fit_word, speed_cells
from tests.helpers.tower import Tower, explained


def build():
    """What `--model tests.simplefsdp.test_plan:build` names."""
    return Tower(6), (torch.zeros(4, 32, dtype=torch.int64),)


def facts_of(make, layers):
    return explained(lambda: make(layers), sharding_factor=4, planner="greedy").graphs


@pytest.fixture(scope="module")
def four():
    """Forward and backward of four checkpointed layers on 16 ranks, in groups of 4 that hold one copy each."""
    return facts_of(Tower, TRACED_LAYERS)


def test_repeating_a_layer_equals_tracing_all(four):
    for few, all_ in zip(four, facts_of(Tower, 6), strict=True):
        assert extend(few, "layers", 6) == all_


def test_repeating_a_llama_layer_that_keeps_its_activations_equals_tracing_all():
    def make(layers):
        return Llama(dataclasses.replace(get_config("debug"), n_layers=layers))

    for few, all_ in zip(facts_of(make, TRACED_LAYERS), facts_of(make, 6), strict=True):
        assert extend(few, "layers", 6) == all_


class Reaching(Tower):
    """A tower whose layers also read what the layer before the last one made."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        before = x
        for layer in self.layers:
            before, x = x, layer(x + before)
        return self.head(x)


def test_layers_that_hand_on_further_than_to_the_next_are_refused():
    report = explained(lambda: Reaching(TRACED_LAYERS), eager=True)
    for facts in (*report.graphs, *report.eager):
        with pytest.raises(ExtensionError):
            extend(facts, "layers", 6)


def test_memory_of_saved_activations_grows_by_a_layer_each(four):
    peaks = [
        make_timeline(extend(four[0], "layers", count)).memory[-1].total_bytes for count in (4, 5, 6, 12)
    ]
    assert peaks[1] - peaks[0] == peaks[2] - peaks[1] == (peaks[3] - peaks[2]) // 6 > 0


def test_layers_that_differ_are_refused(four):
    forward = four[0]
    regions = list(forward.problem.region_ns)
    at = next(i for i, region in enumerate(forward.regions) if region.module.startswith("layers.2.up"))
    regions[at] += 1
    problem = dataclasses.replace(forward.problem, region_ns=tuple(regions))
    with pytest.raises(ExtensionError, match="different times"):
        extend(dataclasses.replace(forward, problem=problem), "layers", 8)
    with pytest.raises(ExtensionError, match="run in the order"):
        extend(forward, "blocks", 8)
    with pytest.raises(ExtensionError, match="3 layers"):
        extend(forward, "layers", 3)


def test_a_stack_is_found_by_structure_and_can_be_cut_and_restored():
    layers = [nn.Linear(4, 4) for _ in range(6)]
    model = nn.ModuleDict({"few": nn.ModuleList(layers[:2]), "many": nn.ModuleList(layers)})
    stack = find_stack(model)
    assert stack is not None
    assert (stack.name, stack.layers) == ("many", 6)
    removed = cut(model, stack)
    assert len(model["many"]) == TRACED_LAYERS
    restore(model, stack, removed)
    assert list(model["many"]) == layers
    layers[-1].bias.requires_grad_(False)
    assert find_stack(model) is None


def test_stored_bytes_count_the_largest_shard():
    tensors = {
        "matrix": torch.empty(10, 3),
        "vector": torch.empty(4),
        "number": torch.empty(()),
        "none": torch.empty(0, 3),
        "half": torch.empty(2, dtype=torch.bfloat16),
    }
    parameters = {name: Parameter.of(nn.Parameter(tensor)) for name, tensor in tensors.items()}
    traced = Traced((), (), parameters, "", ())
    assert traced.stored(4).total == 4 * (3 * 3 + 1 + 1) + 2
    assert traced.stored(1).total == 4 * (30 + 4 + 1) + 4


def test_a_prediction_is_the_sum_of_its_parts(four):
    profile = load_profile("h100_sxm")
    item = predict(
        four, profile, Stored(1_000_000, 1_000_000), planner="none", tokens=64, flops_per_token=1e6
    )
    ahead = predict(
        four, profile, Stored(1_000_000, 1_000_000), planner="auto", tokens=64, flops_per_token=1e6
    )
    assert item.step_ns == sum(line.step_ns for line in item.timelines) + item.optimizer_ns
    # 10 passes over 1 MB at 90 % of 3.35 TB/s
    assert item.optimizer_ns == pytest.approx(10 * 1e6 / (0.9 * 3.35e12) * 1e9, rel=1e-3)
    assert item.tokens_per_s == pytest.approx(64 / (item.step_ns / 1e9))
    assert item.mfu == pytest.approx(item.tokens_per_s * 1e6 / 989.5e12)
    assert item.bound_ns <= ahead.step_ns < item.step_ns
    assert ahead.exposed_ns < item.exposed_ns
    assert (item.memory.parameters, item.memory.optimizer) == (1_000_000, 2_000_000)
    assert Stored(1_000_000, 1_000_000).least == 4_000_000, "and gradients"
    peak = max(line.peak.total_bytes for line in item.timelines)
    assert item.memory.total_bytes == 3_000_000 + peak + item.memory.fragments
    saved = sum(value.size_bytes for value in four[1].values if value.born == BEFORE)
    assert item.memory.activations <= saved + peak


def test_fit_is_judged_by_the_memory_of_the_device():
    def split(gib):
        return MemorySplit(int(gib * GIB), 0, 0, 0, 0, 0)

    hardware = find_hardware("h100")
    assert fit_text(split(40), hardware).startswith("it fits: 50% of 80 GiB")
    assert fit_text(split(76), hardware).startswith("it may not fit: 95%")
    assert fit_text(split(81), hardware).startswith("it does not fit: 101%")
    assert "not known" in fit_text(split(1), find_hardware("cpu"))
    words = [fit_word(total, 100) for total in (90, 91, 100, 101)]
    assert words == ["yes", "tight", "tight", "no"]
    assert fit_word(1, None) == "?"


def test_speed_has_a_dash_where_there_are_no_tokens():
    assert speed_cells(1234.4, 0.4321) == ("1,234", "43.2%")
    assert speed_cells(1234.4, None) == ("1,234", "-")
    assert speed_cells(None, None) == ("-", "-")


def test_the_command_compares_planners_and_repeats_layers(capsys):
    arguments = [
        "--model",
        "tests.simplefsdp.test_plan:build",
        "--gpus",
        "16",
        "--planners",
        "none",
        "greedy",
    ]
    assert main(["plan", *arguments]) == 0
    said = capsys.readouterr().out
    assert "modelled, hardware profile h100_sxm; 4 of the 6 equal layers of 'layers' traced" in said
    assert "checkpointing" not in said.splitlines()[0], "the model decides"
    rows = [line.split()[0] for line in said.splitlines() if line.startswith(("none ", "greedy "))]
    assert rows == ["none", "greedy"]
    assert "it fits: 0% of 80 GiB" in said


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--model", "9b"], "--model 9b: unknown; there are debug, 1b, 8b, 70b, 405b"),
        (
            ["--hardware", "abacus"],
            "unknown hardware 'abacus'; there are h100, h100-96gb, h200, a100, b200, cpu",
        ),
        (["--model", "debug", "--gpus", "6", "--sharding-factor", "4"], "possible: 1, 2, 3, 6"),
        (["--plot", "scale.png"], "--plot belongs to --scale: give both"),
        (["--scale", "--plot", "scale.abc"], "--plot scale.abc: must end in .png, .pdf, .svg"),
        (["--scale", "--plot", "/proc/none/scale.png"], "--plot /proc/none: No such file or directory"),
        (["--global-batch", "64"], "--global-batch belongs to --scale: give both"),
        (["--scale", "--global-batch", "0"], "--global-batch 0: must be at least 1"),
        (["--search", "--scale"], "--search and --scale answer different questions: give one"),
        (["--search", "--hardware", "cpu"], "--search: the memory of cpu is not known; give --memory-gib"),
        (["--search", "--best", "0"], "--best 0: must be at least 1"),
        (["--memory-gib", "-1"], "--memory-gib -1: must be more than 0"),
        (["--memory-budget-gb", "-1"], "--memory-budget-gb -1.0: must be at least 0"),
        (["--planners"], "--planners: name at least one of auto, greedy, block, none"),
        (["--local-batch", "0"], "--local-batch 0: must be at least 1"),
        (["--gpus", "7", "--sharding-factor", "3"], "must divide --gpus 7; possible: 1, 7"),
        (["--hardware", "nowhere.json"], "--hardware: nowhere.json: no such file"),
        (["--model", "tests.simplefsdp.test_plan:build", "--seq", "100"], "--seq is for a Llama; tests."),
        (["--model", "tests.simplefsdp.test_plan:build", "--ac", "full"], "--ac is for a Llama; tests."),
        (["--model", "nowhere:build"], "--model nowhere:build: cannot import 'nowhere'"),
        (["--model", "models:"], "must be module:function, as in mypackage.models:build"),
        (["--emit-ptx"], "--emit-ptx adds to what --emit-triton writes: give both"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(arguments, answer, capsys):
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert answer in said
    assert said.count("\n") == 1


def only_a_norm():
    """A backward whose compute is one light region or none."""
    return nn.LayerNorm(4), (torch.ones(2, 4),)


def nothing_to_shard():
    return nn.ReLU(), (torch.ones(2, 4),)


def broken():
    raise KeyError("no weights")


def test_odd_models_get_a_plan_or_a_reason(capsys):
    assert main(["plan", "--model", f"{__name__}:only_a_norm", "--gpus", "7", "--planners", "none"]) == 0
    assert "sharded over 7" in capsys.readouterr().out
    assert main(["plan", "--model", f"{__name__}:nothing_to_shard", "--gpus", "2"]) == 1
    assert (
        "nothing_to_shard has no parameters: there is nothing to shard or plan\n" in capsys.readouterr().err
    )
    assert main(["plan", "--model", f"{__name__}:broken"]) == 1
    said = capsys.readouterr().err
    assert "broken cannot be built at " in said
    assert said.endswith("KeyError: 'no weights'\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_mistakes_are_answered_without_torch(command):
    program = (
        "import sys\n"
        "from simplefsdp.cli import main\n"
        f"for words in (['--model', '9b'], ['--hardware', 'abacus'], ['--gpus', '6', '--sharding-factor', '4'],\n"
        "              ['--model', 'debug', '--seq', '4096'], ['--model', 'nowhere:build']):\n"
        f"    assert main(['{command}', *words]) == 2, words\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0
