"""Time of collectives by size: measured points, fitted alpha and beta per kind, a hardware profile and a picture.

    sudo python -m benchmarks.sweep --ranks 2 --rate 1gbit          # network namespaces with a rate limit
    python -m benchmarks.sweep --ranks 2                            # loopback

The points and the fit are those of `inductor_passes.costs.calibrate`, with more sizes. The profile is written beside
the result; use it with `PassConfig(profile=...)`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.netbed import open_bed, rate_argument
from benchmarks.pictures import draw_fits
from benchmarks.record import RESULTS, command_line, conditions, markdown, write
from inductor_passes.costs.calibrate import calibrate, device_name
from inductor_passes.costs.collective import traffic_bytes
from inductor_passes.costs.fit import fit_affine
from inductor_passes.costs.measure import EFFORTS, MEASURED_KINDS, Effort, collective_times
from inductor_passes.costs.profiles import HardwareProfile, MeasuredCollective, load_profile, parse_profile
from inductor_passes.costs.topology import topology_of

_POWERS = range(12, 25)  # 4 KiB to 16 MiB
_TIMEOUT_S = 900.0
_NS_PER_MS = 1e6


def work(name: str, repeats: int) -> None:
    """What every rank does; rank 0 prints points and profile as JSON."""
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    ranks = dist.get_world_size()
    base = EFFORTS["cpu"]
    effort = dataclasses.replace(base, repeats=repeats, payload_bytes=tuple(1 << power for power in _POWERS))
    load = os.getloadavg()[0]
    profile = calibrate(name, device, load_profile("cpu_gloo"), base, ranks)
    points = {kind: measure(kind, device, effort) for kind in MEASURED_KINDS}
    if dist.get_rank() == 0:
        profile = with_fits(profile, points, ranks, f"sweep, {datetime.date.today()}, {device_name(device)}")
        found = {"points": points, "profile": profile.to_json(), "load": [load, os.getloadavg()[0]]}
        print(json.dumps(found))
    dist.destroy_process_group()


def measure(kind: str, device: torch.device, effort: Effort) -> list[tuple[int, int]]:
    """Traffic in bytes and time in ns of one kind over all ranks, at every size."""
    group = dist.group.WORLD
    assert group is not None
    payloads, times, _ = collective_times(kind, group, device, effort)
    traffic = [traffic_bytes(kind, dist.get_world_size(), payload) for payload in payloads]
    return list(zip(traffic, times, strict=True))


def with_fits(
    profile: HardwareProfile, points: dict[str, list[tuple[int, int]]], ranks: int, source: str
) -> HardwareProfile:
    """A profile whose collectives over all ranks are those fitted to points.

    Args:
        profile: gives everything else.
        points: traffic in bytes and time in ns, by kind.
        ranks: of the group that was measured, on one node.
        source: where the points come from.
    """
    shape = topology_of(range(ranks), ranks)
    fitted = []
    for kind, measured in points.items():
        fit = fit_affine([traffic for traffic, _ in measured], [time for _, time in measured])
        text = f"{source}; {len(measured)} sizes, worst point {fit.worst_per_mille / 10} % off the fit"
        fitted.append(
            MeasuredCollective(
                kind, shape.size, shape.nodes, shape.ranks_per_node, fit.alpha_ns, fit.bandwidth, text
            )
        )
    others = [item for item in profile.collectives if item.group_size != ranks]
    return dataclasses.replace(profile, collectives=(*others, *fitted))


def fits_of(profile: HardwareProfile, ranks: int) -> dict[str, MeasuredCollective]:
    """The fits of a profile for a group of so many ranks, by kind."""
    return {item.kind: item for item in profile.collectives if item.group_size == ranks}


def record(
    network: str,
    command: str,
    ranks: int,
    found: dict[str, Any],
    profile: HardwareProfile,
    names: tuple[str, str],
) -> str:
    """The text of a result file; `names` are the picture and the profile."""
    points = found["points"]
    fits = fits_of(profile, ranks)
    rows = [
        (
            kind,
            f"{fits[kind].alpha_ns / _NS_PER_MS:.3f}",
            f"{fits[kind].bandwidth / 10**6:.1f}",
            fits[kind].source.rsplit("; ")[-1],
        )
        for kind in points
    ]
    sizes = [
        (kind, traffic, f"{time / _NS_PER_MS:.3f}", f"{_fitted_ns(fits[kind], traffic) / _NS_PER_MS:.3f}")
        for kind, measured in points.items()
        for traffic, time in measured
    ]
    return "\n".join(
        [
            f"# Collectives, {network}",
            "",
            *conditions(command, found["load"]),
            f"- fitted: time = alpha + traffic / bandwidth, squares by time least; profile: [{names[1]}]({names[1]})",
            "",
            f"![Fit and measurement]({names[0]})",
            "",
            *markdown(("kind", "alpha, ms", "bandwidth, MB/s", "fit"), rows),
            "",
            *markdown(("kind", "traffic per rank, bytes", "measured, ms", "fitted, ms"), sizes),
            "",
        ]
    )


def _fitted_ns(fit: MeasuredCollective, traffic: int) -> float:
    return fit.alpha_ns + traffic * 10**9 / fit.bandwidth


def main(arguments: list[str]) -> int:
    """Entry point; see the module docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--rate",
        type=rate_argument,
        help="bits per second of each link, for example 1gbit; loopback when not given",
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed repetitions of each size")
    parser.add_argument("--out", type=pathlib.Path, help=f"result file; in {RESULTS.name}/ when not given")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker, options.repeats)
        return 0
    name = f"sweep_{options.ranks}_{options.rate or 'loopback'}"
    out = options.out or RESULTS / f"{name}.md"
    worker = [sys.executable, "-m", "benchmarks.sweep", *arguments, "--worker", name]
    with open_bed(options.ranks, options.rate) as bed:
        found = bed.result(worker, _TIMEOUT_S)
        network = bed.description
    profile = parse_profile(found["profile"])
    picture, written = out.with_suffix(".png"), out.with_suffix(".json")
    fits = {
        item.kind: (item.alpha_ns, item.bandwidth)
        for item in profile.collectives
        if item.group_size == options.ranks
    }
    draw_fits(fits, found["points"], network, picture)
    written.write_text(profile.to_json() + "\n", encoding="utf-8")
    command = command_line("sweep", arguments)
    write(out, record(network, command, options.ranks, found, profile, (picture.name, written.name)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
