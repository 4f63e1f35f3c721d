"""Costs of kernels after fusion: what one compilation writes down, the next one plans with."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from inductor_passes import PassConfig, graph_plan, hooks, options, work
from inductor_passes.costs.agree import agree_on_profile
from inductor_passes.costs.kernel_file import add_kernels, load_kernels, with_kernels
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.costs.profiles import load_profile
from simplefsdp import simple_fsdp
from tests.helpers.emitted import emitted_code
from tests.helpers.worlds import fake_process_group
from tests.inductor_passes.toy import BF16, DIM, Block

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*script_method.*:DeprecationWarning"
)  # importing TorchInductor


def compile_with(config: PassConfig, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[graph_plan.Program]:
    """Compile a block for one rank up to the finished code; returns what the planners were asked."""
    programs: list[graph_plan.Program] = []
    read = graph_plan.read_program

    def note(*args, **kwargs):
        programs.append(read(*args, **kwargs))
        return programs[-1]

    torch.manual_seed(0)
    with monkeypatch.context() as patch, fake_process_group(rank, 8):
        patch.setattr(graph_plan, "read_program", note)
        model = simple_fsdp(nn.Sequential(Block(), Block()), mp_policy=BF16)
        emitted_code(model, torch.randn(2, 16, DIM, requires_grad=True), options=options(config))
    return programs


def test_the_second_compilation_plans_with_what_the_first_saw(tmp_path, monkeypatch):
    path = tmp_path / "kernels.json"
    config = PassConfig("block", ("0", "1"), profile="h100_sxm", kernel_costs=path)
    compile_with(config, 1, monkeypatch)
    assert not path.exists(), "only the first rank writes"
    first = compile_with(config, 0, monkeypatch)
    seen = load_kernels(path)
    text = path.read_text()
    second = compile_with(config, 0, monkeypatch)
    assert path.read_text() == text, "what a run plans with stays"

    cost = ProfileCostModel(with_kernels(load_profile("h100_sxm"), seen))
    changed = 0
    for before, after in zip(first, second, strict=True):
        light = [node for region in after.regions for node in region if work.is_light(node)]
        assert all(work.light_key(node, 1) in seen for node in light)
        regions = zip(after.regions, before.problem.region_ns, after.problem.region_ns, strict=True)
        for region, guessed_ns, known_ns in regions:
            assert known_ns == sum(map(cost.compute_ns, work.kernels(region, 1)))
            changed += known_ns != guessed_ns
    assert changed > 0


def test_a_file_is_merged_kept_and_part_of_what_identifies_the_profile(tmp_path):
    path = tmp_path / "new" / "kernels.json"
    plain = agree_on_profile("h100_sxm", kernel_costs=path).profile
    assert plain.identity() == load_profile("h100_sxm").identity()
    add_kernels(path, {"fused_a": 5})
    add_kernels(path, {"fused_a": 7, "fused_b": 9})
    assert load_kernels(path) == {"fused_a": 5, "fused_b": 9}
    known = agree_on_profile("h100_sxm", kernel_costs=path).profile
    assert known.kernels == {"fused_a": 5, "fused_b": 9}
    assert known.identity() != plain.identity()
    assert [file.name for file in path.parent.iterdir()] == ["kernels.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", json.dumps({"format": 2, "kernels": {}}), '{"format": 1, "kernels": {"a": -1}}']
)
def test_a_broken_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "kernels.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"kernels\.json.*delete it to start anew"):
        load_kernels(path)


def test_a_file_that_cannot_be_written_leaves_a_record_and_the_compilation_alone(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    path = folder / "kernels.json"
    monkeypatch.setattr(hooks, "add_kernels", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    records = []
    monkeypatch.setattr(hooks.Hook, "note", lambda self, record: records.append(record))
    compile_with(PassConfig("none", profile="h100_sxm", kernel_costs=path), 0, monkeypatch)
    assert {record.failure for record in records if record.name == "kernel costs"} == {"OSError: disk full"}
    assert any(record.name == "reorder" and not record.failure for record in records)
