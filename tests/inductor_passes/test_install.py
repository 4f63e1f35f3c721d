"""Registration with TorchInductor: chaining, choice of configuration, identity, and leaving others alone."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._dynamo.utils import counters

import inductor_passes
from inductor_passes import PassConfig, _compat, install, installed, options, setups, uninstall
from inductor_passes._compat import CustomGraphPass, PassChain
from inductor_passes.costs.profiles import load_profile, parse_profile
from inductor_passes.hooks import GraphHook, JointHook, PostGradHook, ReorderHook
from inductor_passes.setups import Setup
from simplefsdp import simple_fsdp
from tests.inductor_passes.graphs import Builder, aten
from tests.inductor_passes.toy import world

GRAPH_HOOKS = ("joint_custom_post_pass", "post_grad_custom_post_pass")
SCHEDULER = ("reorder_for_compute_comm_overlap", "reorder_for_compute_comm_overlap_passes")
HOOKS = (*GRAPH_HOOKS, *SCHEDULER)
UNSET = (None, None, False, [])


@pytest.fixture(autouse=True)
def clean_hooks():
    with inductor_config.patch(dict(zip(HOOKS, UNSET, strict=True))):
        yield


def settings() -> tuple:
    return tuple(getattr(inductor_config, name) for name in HOOKS)


def graph_hooks() -> list:
    return [hook for hook in installed() if isinstance(hook, GraphHook)]


class Other(CustomGraphPass):
    """A pass of somebody else that notes what it saw."""

    def __init__(self, name: str = "other") -> None:
        self.name = name
        self.seen: list[str] = []

    def __call__(self, graph) -> None:
        self.seen.append(self.name)

    def uuid(self):
        return self.name


def tagged(passes="", count=1):
    build = Builder()
    node = build.input((4, 4))
    for index in range(count):
        node = build.call(aten.neg.default, node, param=f"layer.p{index}")
        if passes != "":
            node.meta["custom"]["simplefsdp"]["passes"] = passes
    return build.finish(node).graph


def test_importing_changes_nothing():
    code = (
        "import json, torch._inductor.config as config; from inductor_passes import PassConfig, install, options; "
        f"print(json.dumps([getattr(config, name) for name in {HOOKS!r}]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(out.stdout) == list(UNSET)


@pytest.mark.parametrize("as_list", [False, True])
def test_passes_of_others_stay_before_and_after(as_list):
    before, after = Other("before"), Other("after")
    inductor_config.post_grad_custom_post_pass = [before] if as_list else before
    install()
    ours = [item for item in installed() if isinstance(item, PostGradHook)]
    assert _compat.hook_passes("post_grad_custom_post_pass") == [before, *ours]
    inductor_config.post_grad_custom_post_pass = [*inductor_config.post_grad_custom_post_pass, after]
    install(PassConfig(planner="greedy"))
    kinds = [type(item) for item in _compat.hook_passes("post_grad_custom_post_pass")]
    assert kinds == [Other, PostGradHook, Other]
    uninstall()
    assert _compat.hook_passes("post_grad_custom_post_pass") == [before, after]
    assert inductor_config.joint_custom_post_pass is None


def test_uninstall_restores_and_may_be_repeated():
    other = Other()
    inductor_config.post_grad_custom_post_pass = other
    install()
    uninstall()
    uninstall()
    assert settings() == (None, other, False, [])
    assert list(installed()) == []


def test_a_wrapper_of_somebody_else_keeps_nothing_running_after_uninstall():
    install()
    ours = graph_hooks()[0]
    active = ours.uuid()
    inductor_config.joint_custom_post_pass = PassChain([Other(), ours])
    held = graph_hooks()[0]
    assert held is ours
    uninstall()
    assert ours.find_setup(tagged()) is None
    assert ours.uuid() != active


def test_installing_again_is_idempotent_and_each_graph_finds_its_own():
    first, second = PassConfig(planner="greedy"), PassConfig(planner="none")
    keys = [install(config) for config in (first, second, first)]
    assert keys[0] == keys[2] != keys[1]
    assert [type(hook) for hook in installed()] == [JointHook, PostGradHook, ReorderHook]
    for hook in installed():
        assert [setup.config for setup in hook.setups] == [second, first]
        assert hook.find_setup(tagged()).config == first
        for key, config in zip(keys, (first, second), strict=False):
            assert hook.find_setup(tagged(key)).config == config
        assert hook.find_setup(tagged(None)) is None
        assert hook.find_setup(tagged("unknown")) is None


def test_simple_fsdp_installs_and_names_its_configuration():
    with world(4):
        config = PassConfig(planner="none", memory_budget_gb=1.0)
        simple_fsdp(nn.Linear(4, 4), passes=config)
    assert all(hook.setups[-1].config == config for hook in installed())


def test_graphs_without_tags_are_left_alone():
    build = Builder()
    graph = build.finish(build.call(aten.neg.default, build.input((4, 4)))).graph
    text, nodes = str(graph), list(graph.nodes)
    install()
    for hook in graph_hooks():
        hook(graph)
        assert not hook.records
    assert str(graph) == text
    assert list(graph.nodes) == nodes


def test_options_change_nothing_global_and_keep_the_passes_of_others():
    other = Other()
    inductor_config.post_grad_custom_post_pass = other
    install(PassConfig(planner="none"))
    before = settings()
    chosen = options(PassConfig(planner="greedy"))
    assert settings() == before
    assert sorted(chosen) == sorted(HOOKS)
    first, ours = chosen["post_grad_custom_post_pass"]
    assert first is other
    # Pinned: whatever a tag names, these options decide.
    assert ours.find_setup(tagged("unknown")).config == PassConfig(planner="greedy")
    assert options(PassConfig(planner="greedy")) == chosen


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="config must be a PassConfig or None, got dict"):
        install({"planner": "auto"})
    with pytest.raises(ValueError, match="unknown hardware profile 'no_such'"):
        install(PassConfig(profile="no_such"))
    assert list(installed()) == []


def test_identity_follows_every_option_profile_source_and_version(monkeypatch):
    profile = load_profile("h100_sxm")
    changed = parse_profile(profile.to_json().replace('"value": 3350000000000', '"value": 3350000000001'))
    assert changed.identity() != profile.identity()
    some = [
        Setup(PassConfig(), profile),
        Setup(PassConfig(planner="greedy"), profile),
        Setup(PassConfig(reshard=False), profile),
        Setup(PassConfig(memory_budget_gb=1.0), profile),
        Setup(PassConfig(), changed),
    ]
    uuids = [cls((setup,)).uuid() for setup in some for cls in (JointHook, PostGradHook, ReorderHook)]
    assert len(set(uuids)) == len(uuids)
    assert JointHook((Setup(PassConfig(), load_profile("h100_sxm")),)).uuid() == uuids[0]
    assert JointHook((some[0],), pinned=True).uuid() != uuids[0]
    assert JointHook((some[0], some[1])).uuid() != JointHook((some[1], some[0])).uuid(), (
        "the last one decides"
    )
    monkeypatch.setattr(setups, "source_hash", lambda *_: "edited")
    assert JointHook((some[0],)).uuid() != uuids[0]
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert JointHook((some[0],)).uuid() != uuids[0]


def test_the_scheduler_pass_is_pickled_by_what_decides_it():
    """TorchInductor keys it by its pickle: equal for equal setups, whatever it has recorded meanwhile."""
    profile = load_profile("h100_sxm")
    first, same = (ReorderHook((Setup(PassConfig(), profile),)) for _ in range(2))
    same.records.append("anything")
    other = ReorderHook((Setup(PassConfig(memory_budget_gb=1.0), profile),))
    assert pickle.dumps(first) == pickle.dumps(same) != pickle.dumps(other)
    assert pickle.loads(pickle.dumps(first)).setups == first.setups


def test_scheduler_passes_of_others_run_before_ours_and_stay_off_if_they_were_off():
    def other(snodes):
        return snodes

    inductor_config.reorder_for_compute_comm_overlap_passes = [other]
    install()
    enabled, passes = settings()[2:]
    assert enabled
    assert [type(item) for item in passes] == [ReorderHook]
    uninstall()
    assert settings()[2:] == (False, [other])
    inductor_config.reorder_for_compute_comm_overlap = True
    install()
    assert [type(item) for item in settings()[3]] == [type(other), ReorderHook]
    uninstall()
    assert settings()[2:] == (True, [other])


def test_without_reorder_the_scheduler_is_left_alone():
    install(PassConfig(reorder=False))
    assert settings()[2:] == (False, [])
    assert "reorder_for_compute_comm_overlap" in options(PassConfig(reorder=False))
    assert options(PassConfig(reorder=False))["reorder_for_compute_comm_overlap"] is False


def test_a_chain_has_the_identities_of_its_members():
    ours = JointHook((Setup(PassConfig(), load_profile("h100_sxm")),))
    assert PassChain([Other("a"), ours]).uuid() != PassChain([Other("b"), ours]).uuid()
    assert PassChain([ours, lambda graph: None]).uuid() is None


def compile_once(config: PassConfig, **arguments) -> dict[str, int]:
    """Compile forward and backward in a fresh Dynamo; how often the FX graph cache answered.

    Nothing but matrix products and collectives: no kernel has to be built.
    """
    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    simple_fsdp(model, passes=config, **arguments)
    torch.compile(model, fullgraph=True)(torch.randn(2, 8)).sum().backward()
    found = counters["inductor"]
    return {what: found[f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass")}


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # importing TorchInductor
def test_the_compile_cache_answers_for_equal_configurations_only():
    none = PassConfig(planner="none")
    with world(4):
        assert compile_once(none) == {"hit": 0, "miss": 2, "bypass": 0}
        assert compile_once(none) == {"hit": 2, "miss": 0, "bypass": 0}
        other = PassConfig(planner="none", memory_budget_gb=1.0)
        assert compile_once(other) == {"hit": 0, "miss": 2, "bypass": 0}
        # The first configuration again, with another one installed beside it; and a tag that says to keep weights.
        assert compile_once(none)["bypass"] == 0
        assert compile_once(none, reshard_after_forward=False)["miss"] == 2


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # importing TorchInductor
def test_all_graphs_of_a_model_get_the_passes_and_those_of_a_plain_model_do_not():
    with world(4):
        compile_once(PassConfig(planner="none", memory_budget_gb=2.0))
        graphs = [record.graph for hook in installed() for record in hook.records]
        assert graphs == ["joint", "forward", "backward", "forward", "backward"]
        torch.compile(nn.Linear(4, 4, bias=False))(torch.randn(2, 4)).sum().backward()
        assert [record.graph for hook in installed() for record in hook.records] == graphs


def test_public_names():
    assert sorted(inductor_passes.__all__) == [
        "PassConfig",
        "aot_eager_backend",
        "install",
        "installed",
        "options",
        "uninstall",
    ]


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # importing TorchInductor
def test_a_pass_of_somebody_else_runs_on_each_graph_before_ours(monkeypatch):
    other, ours = Other("runs first"), PostGradHook.__call__
    inductor_config.post_grad_custom_post_pass = other

    def noting(hook, graph):
        other.seen.append("ours")
        ours(hook, graph)

    monkeypatch.setattr(PostGradHook, "__call__", noting)
    with world(4):
        found = compile_once(PassConfig(planner="none", memory_budget_gb=3.0))
    assert found == {"hit": 0, "miss": 2, "bypass": 0}
    assert other.seen == ["runs first", "ours"] * 2
