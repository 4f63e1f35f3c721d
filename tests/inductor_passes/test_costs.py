"""Cost models, profiles, fits: monotone, zero for one rank, an entry for every kind, errors with names."""

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import inductor_passes.costs
from inductor_passes.costs.collective import CollectiveModel, traffic_bytes
from inductor_passes.costs.compute import ComputeModel, Work, rate_dtype
from inductor_passes.costs.fit import fit_affine, fit_hops, groups_to_measure
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.costs.profiles import find_profile_name, load_profile, parse_profile, shipped_profiles
from inductor_passes.costs.topology import COLLECTIVE_KINDS, GroupTopology, mesh_topology, topology_of

SIZES = [1 << power for power in range(10, 31)]
WORLDS = [2, 3, 4, 8, 16, 64, 128, 1024]


def shape(world: int, per_node: int) -> GroupTopology:
    return topology_of(range(world), per_node)


def edited(**changes) -> str:
    data = json.loads(load_profile("h100_sxm").to_json())
    data.update(changes)
    return json.dumps(data)


def with_constant(name, **changes) -> str:
    data = json.loads(load_profile("h100_sxm").to_json())
    data["constants"][name].update(changes)
    return json.dumps(data)


class TestCollectives:
    @pytest.mark.parametrize("name", shipped_profiles())
    @pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
    def test_monotone_in_bytes_and_zero_for_one_rank(self, name, kind):
        model = CollectiveModel(load_profile(name))
        for world in WORLDS:
            for per_node in (1, 8):
                times = [model.time_ns(kind, shape(world, per_node), size) for size in SIZES]
                assert times == sorted(times)
                assert times[0] > 0
                if kind != "barrier":
                    assert times[-1] > times[0]
        assert model.time_ns(kind, GroupTopology(1), 1 << 30) == 0

    @pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
    def test_not_cheaper_on_more_ranks_of_the_same_kind_of_nodes(self, kind):
        model = CollectiveModel(load_profile("h100_sxm"))
        times = [model.time_ns(kind, shape(world, 8), 1 << 28) for world in (8, 16, 32, 64, 256, 1024)]
        assert times == sorted(times)

    def test_unknown_kind_is_an_error_with_the_accepted_ones(self):
        model = CollectiveModel(load_profile("h100_sxm"))
        for world in (1, 8):
            with pytest.raises(
                ValueError, match="unknown collective kind 'all_shuffle'; accepted: all_gather, "
            ):
                model.time_ns("all_shuffle", GroupTopology(world), 8)
        with pytest.raises(ValueError, match="size_bytes must be >= 0"):
            model.time_ns("all_gather", GroupTopology(8), -1)

    def test_traffic_counts_the_larger_direction(self):
        assert traffic_bytes("all_gather", 8, 800) == 700
        assert traffic_bytes("reduce_scatter", 8, 800) == 700
        assert traffic_bytes("all_reduce", 8, 800) == 1400
        assert traffic_bytes("broadcast", 8, 800) == 800
        assert traffic_bytes("barrier", 8, 800) == 0
        assert traffic_bytes("all_gather", 3, 10) == 7

    def test_by_hand(self):
        """8 x H100, 1 GiB gathered: base 14 us + 7 hops of 1.9 us + 7/8 GiB at 78.3 % of 450 GB/s."""
        model = CollectiveModel(load_profile("h100_sxm"))
        time = model.time_ns("all_gather", GroupTopology(8), 1 << 30)
        assert time == 14_000 + 7 * 1_900 + -(-(7 * (1 << 27)) * 10**9 // 352_350_000_000)
        # 128 nodes: 1023 steps, 127 of them over the network.
        assert model.alpha_ns("all_gather", shape(1024, 8)) == 14_000 + 896 * 1_900 + 127 * 4_000
        # A tree all-reduce: up and down 7 links in the node and 7 levels of nodes.
        assert model.alpha_ns("all_reduce", shape(1024, 8)) == 14_000 + 2 * (7 * 1_900 + 7 * 4_000)

    def test_one_rank_per_node_has_one_network_link(self):
        model = CollectiveModel(load_profile("h100_sxm"))
        whole_nodes = model.transfer_ns("all_gather", shape(64, 8), 1 << 30)
        one_each = model.transfer_ns("all_gather", topology_of(range(0, 64, 8), 8), 1 << 30)
        assert one_each > 6 * whole_nodes

    def test_a_measured_collective_replaces_the_model_on_its_group_only(self):
        entry = {
            "kind": "all_gather",
            "group_size": 8,
            "nodes": 1,
            "ranks_per_node": 8,
            "alpha_ns": 5,
            "bandwidth": 10**9,
            "source": "test",
        }
        model = CollectiveModel(parse_profile(edited(collectives=[entry])))
        plain = CollectiveModel(load_profile("h100_sxm"))
        assert model.time_ns("all_gather", GroupTopology(8), 8_000) == 5 + 7_000
        for kind, group in (("reduce_scatter", GroupTopology(8)), ("all_gather", GroupTopology(4))):
            assert model.time_ns(kind, group, 8_000) == plain.time_ns(kind, group, 8_000)

    def test_topology(self):
        assert topology_of([0, 1, 8], 8) == GroupTopology(3, 2, 1)
        assert GroupTopology(16, 2).ranks_per_node == 8
        for bad in ((0, 1, 0), (4, 5, 1), (4, 2, 3)):
            with pytest.raises(ValueError, match=r"group needs size|ranks_per_node must be"):
                GroupTopology(*bad)
        with pytest.raises(ValueError, match="ranks_per_node must be >= 1"):
            topology_of([0], 0)

    def test_every_group_of_a_mesh_dim_has_one_topology(self):
        # 24 ranks on nodes of 8, in shard groups of 6: the first lies on one node, the second on two.
        groups = [range(first, first + 6) for first in range(0, 24, 6)]
        assert {topology_of(group, 8) for group in groups} == {GroupTopology(6), GroupTopology(6, 2, 2)}
        assert {mesh_topology(group, 24, 8) for group in groups} == {GroupTopology(6, 2, 2)}
        replicas = [range(first, 24, 6) for first in range(6)]
        assert len({mesh_topology(group, 24, 8) for group in replicas}) == 1
        # Where all groups lie alike, nothing changes; groups of no mesh stand for themselves.
        for group in (range(8), range(8, 16), range(16)):
            assert mesh_topology(group, 64, 8) == topology_of(group, 8)
        assert mesh_topology(range(3, 64, 8), 64, 8) == GroupTopology(8, 8, 1)
        assert mesh_topology([0, 1, 8], 64, 8) == GroupTopology(3, 2, 1)
        assert mesh_topology([5], 64, 8) == GroupTopology(1)


class TestCompute:
    def test_roofline_by_hand(self):
        """H100: bf16 989.5 Tflop/s at 80.3 %, 3.35 TB/s at 90 %, 2 us per kernel."""
        model = ComputeModel(load_profile("h100_sxm"))
        matmul = Work(flops=2 * 4096**3, moved_bytes=3 * 2 * 4096**2, dtype="torch.bfloat16")
        assert model.time_ns(matmul) == -(-2 * 4096**3 * 10**3 * 10**9 // (989_500_000_000_000 * 803)) + 2_000
        pointwise = Work(flops=1, moved_bytes=1 << 30)
        assert model.time_ns(pointwise) == -(-(1 << 30) * 1000 * 10**9 // (3_350_000_000_000 * 900)) + 2_000
        assert model.time_ns(Work()) == 0

    def test_measured_kernel_replaces_the_model(self):
        model = ComputeModel(parse_profile(edited(kernels={"mm_1": 77})))
        assert model.time_ns(Work(flops=10**12, kernels=("mm_1",))) == 77
        assert model.time_ns(Work(flops=10**12, kernels=("mm_1", "mm_1"))) == 2 * 77
        assert model.time_ns(Work(flops=10**12, kernels=("mm_1", "mm_2"))) > 2 * 77

    def test_dtype_rates(self):
        known = load_profile("h100_sxm").dtypes()
        assert rate_dtype("torch.float8_e4m3fn", known) == "float8"
        assert rate_dtype("torch.float8_e4m3fn", load_profile("a100_sxm").dtypes()) == "bfloat16"
        assert rate_dtype("torch.float16", ("bfloat16", "float32")) == "bfloat16"
        assert rate_dtype("torch.complex64", known) == "float32"
        model = ComputeModel(load_profile("h100_sxm"))
        times = [
            model.time_ns(Work(flops=10**12, dtype=name)) for name in ("float8_e5m2", "bfloat16", "float32")
        ]
        assert times == sorted(times)

    def test_copies_count_read_and_write(self):
        model = ProfileCostModel(load_profile("h100_sxm"))
        assert model.copy_ns(1 << 30) == model.compute_ns(Work(moved_bytes=2 << 30)) - model.kernel_ns()


class TestProfiles:
    def test_the_promised_profiles_ship(self):
        assert shipped_profiles() == ("a100_sxm", "b200_sxm", "cpu_gloo", "h100_sxm", "h200_sxm")

    @pytest.mark.parametrize("name", shipped_profiles())
    def test_round_trip_and_sources(self, name):
        profile = load_profile(name)
        again = parse_profile(profile.to_json())
        assert profile.name == name
        assert again == profile
        assert again.identity() == profile.identity()
        assert all(item.unit and item.source for item in profile.constants.values())

    def test_identity_changes_with_any_constant(self):
        profile = load_profile("h100_sxm")
        for name in profile.constants:
            value = profile.value(name)
            other = parse_profile(with_constant(name, value=value - 1 if value > 1 else value + 1))
            assert other.identity() != profile.identity(), name

    @pytest.mark.parametrize(
        ("device", "name"),
        [
            ("NVIDIA H100 80GB HBM3", "h100_sxm"),
            ("NVIDIA H200", "h200_sxm"),
            ("NVIDIA A100-SXM4-80GB", "a100_sxm"),
            ("NVIDIA B200", "b200_sxm"),
            ("NVIDIA L40S", None),
        ],
    )
    def test_choice_by_device_name(self, device, name):
        assert find_profile_name(device) == name

    def test_load_from_a_path(self, tmp_path):
        path = tmp_path / "mine.json"
        path.write_text(edited(name="mine"))
        assert load_profile(path).name == "mine"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "not JSON"),
            ("[]", '"format" must be 1'),
            (edited(format=2), '"format" must be 1'),
            (edited(name=""), '"name" must be non-empty text'),
            (edited(extra=1), "unknown field 'extra'"),
            (edited(device_names="H100"), '"device_names" must be a list'),
            (edited(kernels={"a": 1.5}), '"kernels" must map kernel keys to whole ns'),
            (edited(constants=[]), '"constants" must be an object'),
            (edited(constants={}), "constant 'memory_bandwidth' is missing"),
            (with_constant("intra_hop", unit="us"), "intra_hop must be in 'ns', got 'us'"),
            (with_constant("intra_hop", value=1.5), "intra_hop must be a whole number >= 0, got 1.5"),
            (with_constant("memory_bandwidth", value=0), "memory_bandwidth must be a whole number >= 1"),
            (with_constant("memory_efficiency", value=1001), "must be 1 to 1000 per mille"),
            (with_constant("inter_hop", source=""), "inter_hop needs a source"),
            (with_constant("inter_hop", more=1), 'must hold exactly "value", "unit" and "source"'),
            (edited(collectives=[{"kind": "all_gather"}]), "must hold exactly kind, group_size"),
        ],
    )
    def test_a_broken_profile_names_the_field(self, text, message):
        with pytest.raises(ValueError, match=message):
            parse_profile(text, where="file")

    def test_unknown_constants_and_names(self, tmp_path):
        data = json.loads(edited())
        data["constants"]["flux"] = {"value": 1, "unit": "ns", "source": "x"}
        with pytest.raises(ValueError, match=r"unknown constant 'flux'; accepted: .*peak_flops.<dtype>"):
            parse_profile(json.dumps(data))
        data = json.loads(edited())
        del data["constants"]["matmul_efficiency.bfloat16"]
        with pytest.raises(ValueError, match=r"'matmul_efficiency.bfloat16' is missing"):
            parse_profile(json.dumps(data))
        with pytest.raises(
            ValueError, match=r"unknown hardware profile 'h1000'; accepted: a100_sxm, .*\.json"
        ):
            load_profile("h1000")
        with pytest.raises(ValueError, match=r"cannot read hardware profile .*none\.json"):
            load_profile(tmp_path / "none.json")

    def test_only_measuring_and_agreeing_know_torch(self):
        root = pathlib.Path(inductor_passes.costs.__file__).parent
        with_torch = [path.name for path in sorted(root.glob("*.py")) if "import torch" in path.read_text()]
        assert with_torch == ["agree.py", "calibrate.py", "measure.py"]


class TestFit:
    @given(st.integers(0, 10**7), st.integers(10**6, 10**12))
    def test_recovers_an_exact_line(self, alpha, bandwidth):
        sizes = [1 << power for power in range(12, 30, 2)]
        fit = fit_affine(sizes, [max(1, alpha + size * 10**9 // bandwidth) for size in sizes])
        predicted = fit.alpha_ns + (1 << 28) * 10**9 // fit.bandwidth
        assert predicted == pytest.approx(alpha + (1 << 28) * 10**9 // bandwidth, rel=0.02, abs=2)

    def test_never_negative(self):
        assert fit_affine([10, 20], [1, 100]).alpha_ns == 0
        flat = fit_affine([10, 20, 40], [100, 90, 80])
        assert flat.alpha_ns >= 0
        assert flat.bandwidth > 0
        assert flat.worst_per_mille < 1000
        with pytest.raises(ValueError, match="at least two different sizes"):
            fit_affine([8, 8], [1, 2])

    def test_hops(self):
        assert fit_hops([1, 3, 7], [120, 160, 240]) == (100, 20)
        assert fit_hops([7], [700]) == (0, 100)
        base, hop = fit_hops([1, 7], [200, 100])
        assert base >= 0
        assert hop >= 0

    def test_groups_to_measure(self):
        assert groups_to_measure(4, 4) == [[[0, 1]], [[0, 1, 2, 3]]]
        assert groups_to_measure(4, 2) == [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]]
        assert groups_to_measure(2, 1) == [[[0, 1]]]
        assert groups_to_measure(1, 1) == []
        with pytest.raises(ValueError, match="must divide the world size 4"):
            groups_to_measure(4, 3)
