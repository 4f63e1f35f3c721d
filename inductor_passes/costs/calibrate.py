"""Measure the machine at hand and write a hardware profile.

Owns the command line, the order of measurements and the sources written into the profile. Timing is in
``measure``, fitting in ``fit``. Run it on as many ranks as the job will use on a node, better on two nodes::

    torchrun --nproc-per-node 8 -m inductor_passes.costs.calibrate --out my_cluster.json
    python -m inductor_passes.costs.calibrate --out my_machine.json        # compute only, one process

What is not measured (collectives with one process, the network with one node) is taken from ``--base`` and
says so. Use the result with ``PassConfig(profile="my_cluster.json")``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import pathlib
import platform
import sys

import torch
import torch.distributed as dist

from inductor_passes.costs.collective import traffic_bytes
from inductor_passes.costs.fit import fit_affine, fit_hops, groups_to_measure
from inductor_passes.costs.measure import (
    EFFORTS,
    MEASURED_KINDS,
    Effort,
    collective_times,
    copy_bandwidth,
    kernel_overhead_ns,
    matmul_rate,
)
from inductor_passes.costs.profiles import Constant, HardwareProfile, MeasuredCollective, load_profile
from inductor_passes.costs.topology import topology_of

_DTYPES = {
    "cpu": {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16},
    "cuda": {
        "float64": torch.float64,
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
    },
}
_BASES = {"cpu": "cpu_gloo", "cuda": "h100_sxm"}


def calibrate(
    name: str, device: torch.device, base: HardwareProfile, effort: Effort, ranks_per_node: int
) -> HardwareProfile:
    """Measure compute on all ranks at once, and collectives when a process group of more than one rank is up.

    Args:
        name: Name of the new profile.
        device: Device to measure.
        base: Profile that gives the constants which cannot be measured here.
        effort: Sizes and repetitions.
        ranks_per_node: Consecutive ranks that share a node.

    Returns:
        The profile. It is complete on rank 0; others may lack collectives of groups they are not in.
    """
    conditions = (
        f"calibrate, {datetime.date.today().isoformat()}, torch {torch.__version__}, {device_name(device)}"
    )
    constants = {
        key: dataclasses.replace(item, source=f"not measured, from {base.name}: {item.source}")
        for key, item in base.constants.items()
        if "." not in key
    }
    constants.update(_compute_constants(device, effort, conditions))
    constants["ranks_per_node"] = Constant(ranks_per_node, "ranks", conditions)
    collectives: list[MeasuredCollective] = []
    if dist.is_initialized() and dist.get_world_size() > 1:
        collectives, issue_ns = _measure_collectives(device, effort, ranks_per_node, conditions)
        constants.update(_link_constants(collectives, conditions))
        if device.type == "cpu":
            constants["collective_issue"] = Constant(issue_ns, "ns", f"{conditions}; median async start")
    names = (device_name(device),) if device.type == "cuda" else ()
    return HardwareProfile(name, names, dict(sorted(constants.items())), tuple(collectives))


def device_name(device: torch.device) -> str:
    """How the measured device calls itself."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _compute_constants(device: torch.device, effort: Effort, conditions: str) -> dict[str, Constant]:
    whole = Constant(1000, "per mille", f"{conditions}; the rate itself is measured")
    bandwidth = copy_bandwidth(device, effort)
    out = {
        "memory_bandwidth": Constant(bandwidth, "byte/s", f"{conditions}; copy of {effort.copy_bytes} bytes"),
        "memory_efficiency": whole,
        "kernel_overhead": Constant(
            kernel_overhead_ns(device, effort), "ns", f"{conditions}; tiny adds in a row"
        ),
    }
    for dtype_name, dtype in _DTYPES[device.type].items():
        rate = matmul_rate(dtype, device, effort)
        text = f"{conditions}; square matmul of side {effort.matmul_size}"
        out[f"peak_flops.{dtype_name}"] = Constant(rate, "flop/s", text)
        out[f"matmul_efficiency.{dtype_name}"] = whole
    return out


def _measure_collectives(
    device: torch.device, effort: Effort, ranks_per_node: int, conditions: str
) -> tuple[list[MeasuredCollective], int]:
    out: list[MeasuredCollective] = []
    issues: list[int] = []
    for rank_lists in groups_to_measure(dist.get_world_size(), ranks_per_node):
        groups = [(ranks, dist.new_group(ranks)) for ranks in rank_lists]
        for ranks, group in groups:
            if dist.get_rank() not in ranks:
                continue
            shape = topology_of(ranks, ranks_per_node)
            for kind in MEASURED_KINDS:
                payloads, times, issue = collective_times(kind, group, device, effort)
                fit = fit_affine([traffic_bytes(kind, shape.size, payload) for payload in payloads], times)
                text = f"{conditions}; worst point {fit.worst_per_mille / 10} % off the fit"
                out.append(
                    MeasuredCollective(
                        kind, shape.size, shape.nodes, shape.ranks_per_node, fit.alpha_ns, fit.bandwidth, text
                    )
                )
                issues.append(issue)
        dist.barrier()
    return out, sorted(issues)[len(issues) // 2] if issues else 0


def _link_constants(measured: list[MeasuredCollective], conditions: str) -> dict[str, Constant]:
    whole = Constant(1000, "per mille", f"{conditions}; the bandwidth itself is measured")
    gathers = [item for item in measured if item.kind == "all_gather"]
    inside = [item for item in gathers if item.nodes == 1]
    across = [item for item in gathers if item.nodes > 1 and item.ranks_per_node == 1]
    out: dict[str, Constant] = {}
    if inside:
        largest = max(inside, key=lambda item: item.group_size)
        base, hop = fit_hops([item.group_size - 1 for item in inside], [item.alpha_ns for item in inside])
        text = f"{conditions}; all-gather over {largest.group_size} ranks of a node"
        out["collective_base"] = Constant(base, "ns", text)
        out["intra_hop"] = Constant(hop, "ns", text)
        out["intra_bandwidth"] = Constant(largest.bandwidth, "byte/s", text)
        out["intra_efficiency"] = whole
    if across:
        item = across[0]
        base = out["collective_base"].value if inside else 0
        text = f"{conditions}; all-gather over one rank on each of {item.nodes} nodes"
        out["inter_hop"] = Constant(max(0, (item.alpha_ns - base) // (item.nodes - 1)), "ns", text)
        out["inter_bandwidth"] = Constant(item.bandwidth, "byte/s", text)
        out["inter_efficiency"] = whole
    return out


def main(arguments: list[str] | None = None) -> int:
    """Entry point; see the module docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m inductor_passes.costs.calibrate", description=__doc__)
    parser.add_argument("--out", required=True, help="profile file to write, ending in .json")
    parser.add_argument("--name", help="name of the profile; the file's stem when not given")
    parser.add_argument("--device", choices=sorted(EFFORTS), help="cuda where there is one, else cpu")
    parser.add_argument(
        "--base", help="profile for what cannot be measured here: a shipped name or a .json path"
    )
    options = parser.parse_args(arguments)
    path = pathlib.Path(options.out)
    if path.suffix != ".json":
        parser.error(f"--out must end in .json, got {options.out!r}")
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        base = load_profile(options.base or _BASES[kind])
    except ValueError as error:
        parser.error(str(error))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    in_job = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if kind == "cuda":
        torch.cuda.set_device(device)
    if in_job:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        profile = calibrate(options.name or path.stem, device, base, EFFORTS[kind], per_node)
        if not in_job or dist.get_rank() == 0:
            path.write_text(profile.to_json() + "\n", encoding="utf-8")
            print(f"wrote {path}: use it with PassConfig(profile={str(path)!r})")
    finally:
        if in_job:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
