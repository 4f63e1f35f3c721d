"""The ways to train one Llama that benchmarks compare: from a model to something that computes its loss.

Owns how each contestant is set up, and nothing about time. Every contestant starts from equal weights and gives equal
losses. "reshard" contestants free gathered parameters after forward and gather them again in backward.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import inductor_passes
from inductor_passes import PassConfig
from simplefsdp import simple_fsdp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from simplefsdp.llama.model import Llama

BLOCKS = ("layers.*",)
_NO_PASSES = PassConfig(planner="none", bucketing=False, reorder=False, move_compute=False)


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to train.

    Args:
        name: what tables call it.
        build: from a model on this rank and a mesh of all ranks to a callable that gives the loss; its parameters stay
            those of the model.
    """

    name: str
    build: Callable[[Llama, DeviceMesh], nn.Module]


def contestants(reshard: bool, profile: str | None) -> list[Contestant]:
    """All contestants.

    Args:
        reshard: free gathered parameters after forward. DDP never gathers and is the same in both cases.
        profile: hardware profile for our planners: a shipped name or a path; None detects the device.
    """
    ours = [
        Contestant(f"ours, {planner}", _ours(reshard, PassConfig(planner, BLOCKS, profile=profile)))
        for planner in ("none", "block", "greedy", "auto")
    ]
    return [
        Contestant("DDP", lambda model, mesh: DistributedDataParallel(model)),
        Contestant("FSDP2 eager", _fsdp2(reshard, compiled=False)),
        Contestant("FSDP2, compiled blocks", _fsdp2(reshard, compiled=True)),
        Contestant("ours, eager", _ours_eager(reshard)),
        Contestant("ours, no passes", _ours_stock(reshard, {})),
        Contestant("stock overlap scheduling", _ours_stock(reshard, _OVERLAP_SCHEDULING)),
        Contestant("stock bucketing, reordering", _ours_stock(reshard, _BUCKET_AND_REORDER)),
        *ours,
    ]


# TorchInductor's own passes, as its configuration names them (torch 2.13).
_OVERLAP_SCHEDULING = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
}
_BUCKET_AND_REORDER = {
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}


def _fsdp2(reshard: bool, *, compiled: bool) -> Callable[[Llama, DeviceMesh], nn.Module]:
    def build(model: Llama, mesh: DeviceMesh) -> nn.Module:
        for layer in model.layers:
            if compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return model

    return build


def _ours_eager(reshard: bool) -> Callable[[Llama, DeviceMesh], nn.Module]:
    def build(model: Llama, mesh: DeviceMesh) -> nn.Module:
        return simple_fsdp(model, mesh, reshard_after_forward=reshard)

    return build


def _ours(reshard: bool, config: PassConfig) -> Callable[[Llama, DeviceMesh], nn.Module]:
    def build(model: Llama, mesh: DeviceMesh) -> nn.Module:
        simple_fsdp(model, mesh, reshard_after_forward=reshard, passes=config)
        options = inductor_passes.options(config)
        inductor_passes.uninstall()  # what is installed serves every compilation; here each has options of its own
        return _compile(model, options)

    return build


def _ours_stock(reshard: bool, options: dict[str, Any]) -> Callable[[Llama, DeviceMesh], nn.Module]:
    """Our front end with TorchInductor's passes; of ours only the one that gathers again in backward, when asked."""

    def build(model: Llama, mesh: DeviceMesh) -> nn.Module:
        simple_fsdp(model, mesh, reshard_after_forward=reshard, passes=_NO_PASSES)
        hooks = inductor_passes.options(_NO_PASSES)
        inductor_passes.uninstall()
        kept = {"joint_custom_post_pass": hooks["joint_custom_post_pass"]} if reshard else {}
        return _compile(model, kept | options)

    return build


def _compile(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    compiled = torch.compile(model, fullgraph=True, options=options)
    assert isinstance(compiled, nn.Module)
    return compiled
