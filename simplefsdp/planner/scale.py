"""The facts of a fully sharded step on another number of devices, without another trace.

Owns the arithmetic of shards and group sizes. Must not know FX or models. Compute stays what it is (weak scaling: each
device keeps its batch); collectives carry the same whole tensors in other shares, between other ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.costs.profiles import HardwareProfile
from inductor_passes.costs.topology import topology_of
from inductor_passes.plan import Role
from inductor_passes.planners import plan_collectives
from simplefsdp.explainer.draw import INSTALL_HINT
from simplefsdp.explainer.facts import GraphFacts
from simplefsdp.explainer.hardware import GIB
from simplefsdp.planner.predict import Prediction
from simplefsdp.planner.text import table

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class ScalePoint:
    """A prediction for one number of devices."""

    devices: int
    prediction: Prediction


def rescale(facts: GraphFacts, profile: HardwareProfile, devices: int) -> GraphFacts:
    """The facts of the same graph when parameters are sharded over another number of devices.

    Padding of shards that do not divide is left as it was traced.

    Args:
        facts: of a step that is fully sharded over one group.
        profile: hardware.
        devices: ranks of the group.

    Returns:
        The facts, planned anew by the same planner.

    Raises:
        ValueError: the step has several groups, or collectives other than gathers and reduce-scatters of parameters.
    """
    problem, cost = facts.problem, ProfileCostModel(profile)
    if len({item.key.group for item in problem.collectives}) > 1 or any(
        item.role is Role.FIXED or item.key.kind not in ("all_gather", "reduce_scatter")
        for item in problem.collectives
    ):
        raise ValueError(
            "only steps that are fully sharded over one group can be scaled without tracing them again"
        )
    group = topology_of(range(devices), profile.value("ranks_per_node"))
    items, traffic = [], []
    for item, held in zip(problem.collectives, facts.traffic, strict=True):
        share = -(-item.size_bytes // devices)
        is_gather = item.role is Role.GATHER
        sent, received = (share, item.size_bytes) if is_gather else (item.size_bytes, share)
        items.append(
            dataclasses.replace(
                item,
                transfer_ns=cost.transfer_ns(item.key.kind, group, item.size_bytes),
                copy_in_ns=cost.copy_ns(sent),
                copy_out_ns=cost.copy_ns(received),
            )
        )
        traffic.append(dataclasses.replace(held, sent_bytes=sent, received_bytes=received))
    problem = dataclasses.replace(
        problem,
        collectives=tuple(items),
        alpha_ns={key: cost.alpha_ns(key.kind, group) for key in problem.alpha_ns},
    )
    plan = plan_collectives(problem, facts.plan.planner)
    return dataclasses.replace(facts, problem=problem, traffic=tuple(traffic), plan=plan)


def scaling_text(points: Sequence[ScalePoint]) -> str:
    """One line per number of devices: weak scaling, each device keeps its batch."""
    base = points[0].prediction.step_ns
    rows = []
    for point in points:
        item = point.prediction
        rows.append(
            (
                f"{point.devices}",
                f"{item.step_ns / 1e6:.1f}",
                f"{item.exposed_ns / item.step_ns:.1%}",
                "-" if item.tokens_per_s is None else f"{item.tokens_per_s:,.0f}",
                "-" if item.mfu is None else f"{item.mfu:.1%}",
                f"{base / item.step_ns:.1%}",
                f"{item.memory.total_bytes / GIB:.1f}",
            )
        )
    head = (
        "devices",
        "step ms",
        "exposed",
        "tokens/s/device",
        "MFU",
        f"speed to {points[0].devices}",
        "peak GiB",
    )
    return table(head, rows)


def plot_scaling(points: Sequence[ScalePoint], title: str, path: Path) -> None:
    """Draw the step over the number of devices, split into compute, exposed communication and optimizer.

    Args:
        points: at least one.
        title: above the picture; says that all is modelled, and with what.
        path: file to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib: {INSTALL_HINT}") from error
    names = [str(point.devices) for point in points]
    exposed = [point.prediction.exposed_ns / 1e6 for point in points]
    optimizer = [point.prediction.optimizer_ns / 1e6 for point in points]
    compute = [
        point.prediction.step_ns / 1e6 - waits - update
        for point, waits, update in zip(points, exposed, optimizer, strict=True)
    ]
    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.bar(names, compute, color="#4c78a8", label="forward and backward")
    axes.bar(names, exposed, bottom=compute, color="#e45756", label="waiting for communication")
    below = [one + other for one, other in zip(compute, exposed, strict=True)]
    axes.bar(names, optimizer, bottom=below, color="#bab0ac", label="optimizer")
    axes.set_title(title, loc="left", fontsize=9, wrap=True)
    axes.set_xlabel("devices, each with the same batch")
    axes.set_ylabel("step (ms, modelled)")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    figure.savefig(path)
