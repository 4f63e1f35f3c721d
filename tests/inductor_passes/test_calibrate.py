"""Measuring a machine, and agreeing on a profile, on real ranks."""

import dataclasses
import json
import time

import pytest
import torch

from inductor_passes.costs import calibrate as calibration
from inductor_passes.costs.agree import CPU_PROFILE, agree_on_profile
from inductor_passes.costs.collective import CollectiveModel
from inductor_passes.costs.measure import EFFORTS, MEASURED_KINDS, Effort, compute_ns
from inductor_passes.costs.profiles import load_profile, parse_profile
from inductor_passes.costs.topology import GroupTopology

LITTLE = Effort(
    repeats=2, warmups=1, matmul_size=32, copy_bytes=1 << 16, payload_bytes=(1 << 10, 1 << 14, 1 << 18)
)


def calibrated(rank, world_size):
    profile = calibration.calibrate("here", torch.device("cpu"), load_profile("h100_sxm"), LITTLE, world_size)
    return profile.to_json()


def agreed(rank, world_size, name):
    return agree_on_profile(name if rank == 0 else "only rank 0 reads this").profile.identity()


def refused(rank, world_size):
    with pytest.raises(ValueError, match="first rank: unknown hardware profile 'nope'; accepted: a100_sxm"):
        agree_on_profile("nope")


def detected(rank, world_size):
    return agree_on_profile().profile.name


def test_a_calibrated_profile_is_valid_and_prices_what_was_measured(workers):
    profile = parse_profile(workers(2).run(calibrated)[0])
    assert [item.kind for item in profile.collectives] == list(MEASURED_KINDS)
    assert {(item.group_size, item.nodes, item.ranks_per_node) for item in profile.collectives} == {(2, 1, 2)}
    model = CollectiveModel(profile)
    for item in profile.collectives:
        assert model.alpha_ns(item.kind, GroupTopology(2)) == item.alpha_ns
    measured = ["memory_bandwidth", "kernel_overhead", "intra_bandwidth", "intra_hop", "collective_issue"]
    for name in [*measured, "peak_flops.float32", "peak_flops.bfloat16"]:
        assert profile.constants[name].source.startswith("calibrate, 20"), name
        assert profile.value(name) >= (name != "intra_hop")  # a busy machine may hide what a start costs
    assert profile.constants["inter_bandwidth"].source.startswith("not measured, from h100_sxm")
    assert profile.value("ranks_per_node") == 2


def compute_times(rank, world_size):
    """Times of something that takes the second rank longer, and how often the first rank did it."""
    calls = []

    def call():
        calls.append(rank)
        time.sleep(0.02 * (1 + 4 * rank))

    effort = dataclasses.replace(LITTLE, compute_ns=200 * 10**6)
    return compute_ns(call, torch.device("cpu"), effort), len(calls)


def test_compute_is_measured_on_all_ranks_at_once_and_the_slowest_counts(workers):
    (first, calls), (second, _) = workers(2).run(compute_times)
    assert first == second >= 100 * 10**6
    assert calls > LITTLE.warmups + LITTLE.repeats, "it goes on while the other rank computes"


def test_every_rank_gets_the_profile_of_rank_0(workers):
    assert workers(2).run(agreed, "h100_sxm") == [load_profile("h100_sxm").identity()] * 2


def test_every_rank_fails_when_rank_0_cannot_read_it(workers):
    workers(2).run(refused)


def test_cpu_is_detected(workers):
    assert workers(2).run(detected) == [CPU_PROFILE] * 2
    assert agree_on_profile().profile.name == CPU_PROFILE
    assert agree_on_profile("b200_sxm").profile.name == "b200_sxm"


def test_command_line(tmp_path, monkeypatch, capsys):
    """One process measures compute only, writes the file and says how to use it."""
    monkeypatch.setitem(EFFORTS, "cpu", LITTLE)
    path = tmp_path / "mine.json"
    assert calibration.main(["--out", str(path), "--device", "cpu"]) == 0
    assert f"PassConfig(profile='{path}')" in capsys.readouterr().out
    profile = load_profile(path)
    assert profile.name == "mine"
    assert profile.collectives == ()
    assert json.loads(path.read_text())["format"] == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "mine.txt"], "--out must end in .json, got 'mine.txt'"),
        (["--out", "mine.json", "--base", "nope"], "unknown hardware profile 'nope'"),
    ],
)
def test_command_line_refusals(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        calibration.main(arguments)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err
