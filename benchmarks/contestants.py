"""The ways to train one Llama that benchmarks compare: from a model to something that computes its loss.

Owns how each contestant is set up, and nothing about time. Every contestant starts from equal weights and gives equal
losses. "reshard" contestants free gathered parameters after forward and gather them again in backward.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import inductor_passes
from benchmarks import stock
from benchmarks.names import (
    DDP,
    EAGER,
    FSDP2,
    FSDP2_COMPILED,
    NO_PASSES,
    PLANNED,
    STOCK_BLOCKS,
    STOCK_OVERLAP,
)
from inductor_passes import PassConfig
from inductor_passes.costs.profiles import load_profile
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
        config: the options of our passes, for contestants that run them.
        unavailable: why it cannot run here, "" if it can.
    """

    name: str
    build: Callable[[Llama, DeviceMesh], nn.Module]
    config: PassConfig | None = None
    unavailable: str = ""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all contestants of a run share.

    Args:
        reshard: free gathered parameters after forward. DDP never gathers and is the same in both cases.
        profile: hardware profile for our planners and the stock passes: a shipped name or a path.
        policy: precision, the same for FSDP2 and ours; DDP trains in fp32.
        memory_budget_gb: of our passes, in 10**9 bytes; None is their default.
    """

    reshard: bool
    profile: str
    policy: MixedPrecisionPolicy = dataclasses.field(default_factory=MixedPrecisionPolicy)
    memory_budget_gb: float | None = None


def contestants(setting: Setting) -> list[Contestant]:
    """All contestants, those that compile slowest last."""
    why_not = stock.unavailable()
    return [
        Contestant(DDP, lambda model, mesh: DistributedDataParallel(model)),
        Contestant(FSDP2, _fsdp2(setting, compiled=False)),
        Contestant(FSDP2_COMPILED, _fsdp2(setting, compiled=True)),
        Contestant(EAGER, _ours_eager(setting)),
        Contestant(NO_PASSES, _ours_stock(setting, lambda model, mesh: {})),
        *(
            Contestant(PLANNED[p], _ours(setting, config_of(setting, p)), config_of(setting, p))
            for p in PLANNED
        ),
        Contestant(STOCK_BLOCKS, _ours_stock(setting, _per_block(setting)), unavailable=why_not),
        Contestant(STOCK_OVERLAP, _ours_stock(setting, _overlap(setting)), unavailable=why_not),
    ]


def config_of(setting: Setting, planner: str) -> PassConfig:
    """The options of our passes with a planner."""
    config = PassConfig(planner, BLOCKS, profile=setting.profile)
    if setting.memory_budget_gb is None:
        return config
    return dataclasses.replace(config, memory_budget_gb=setting.memory_budget_gb)


def _fsdp2(setting: Setting, *, compiled: bool) -> Callable[[Llama, DeviceMesh], nn.Module]:
    def build(model: Llama, mesh: DeviceMesh) -> nn.Module:
        for layer in model.layers:
            if compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh, reshard_after_forward=setting.reshard, mp_policy=setting.policy)
        # Unless told, FSDP2 keeps the root's parameters gathered until backward, which needs them first.
        root = None if setting.reshard else False
        fully_shard(model, mesh=mesh, reshard_after_forward=root, mp_policy=setting.policy)
        return model

    return build


def _ours_eager(setting: Setting) -> Callable[[Llama, DeviceMesh], nn.Module]:
    def build(model: Llama, mesh: DeviceMesh) -> nn.Module:
        return _wrap(model, mesh, setting, config_of(setting, "none"))

    return build


def _ours(setting: Setting, config: PassConfig) -> Callable[[Llama, DeviceMesh], nn.Module]:
    def build(model: Llama, mesh: DeviceMesh) -> nn.Module:
        _wrap(model, mesh, setting, config)
        options = inductor_passes.options(config)
        inductor_passes.uninstall()  # what is installed serves every compilation; here each has options of its own
        return _compile(model, options)

    return build


def _ours_stock(
    setting: Setting, options: Callable[[Llama, DeviceMesh], dict[str, Any]]
) -> Callable[[Llama, DeviceMesh], nn.Module]:
    """Our front end with TorchInductor's passes; of ours only the one that gathers again in backward, when asked."""

    def build(model: Llama, mesh: DeviceMesh) -> nn.Module:
        chosen = options(model, mesh)
        config = dataclasses.replace(_NO_PASSES, profile=setting.profile)
        _wrap(model, mesh, setting, config)
        hooks = inductor_passes.options(config)
        inductor_passes.uninstall()
        kept = {"joint_custom_post_pass": hooks["joint_custom_post_pass"]} if setting.reshard else {}
        return _compile(model, kept | chosen)

    return build


def _per_block(setting: Setting) -> Callable[[Llama, DeviceMesh], dict[str, Any]]:
    def options(model: Llama, mesh: DeviceMesh) -> dict[str, Any]:
        stock.give_device_numbers(load_profile(setting.profile))
        layers = [f"layers.{number}" for number in range(len(model.layers))]
        return stock.per_block_bucketing(["embed_tokens", *layers, ("norm", "lm_head")])

    return options


def _overlap(setting: Setting) -> Callable[[Llama, DeviceMesh], dict[str, Any]]:
    def options(model: Llama, mesh: DeviceMesh) -> dict[str, Any]:
        profile = load_profile(setting.profile)
        stock.give_device_numbers(profile)
        wire = setting.policy.param_dtype or next(model.parameters()).dtype
        block = sum(p.numel() for p in model.layers[0].parameters()) * wire.itemsize
        return stock.overlap_scheduling(profile, mesh.size(), block)

    return options


def _wrap(model: Llama, mesh: DeviceMesh, setting: Setting, config: PassConfig) -> nn.Module:
    return simple_fsdp(
        model, mesh, reshard_after_forward=setting.reshard, mp_policy=setting.policy, passes=config
    )


def _compile(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    compiled = torch.compile(model, fullgraph=True, options=options)
    assert isinstance(compiled, nn.Module)
    return compiled
