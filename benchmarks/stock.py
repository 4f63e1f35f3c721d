"""TorchInductor's own passes for overlap, as contestants on any device.

Owns their options. They run on our front end, whose graphs they see as they would see anybody's. torch 2.13's names;
`unavailable` says why another version cannot run them.

Two things keep these passes from CPUs. Both start with a roofline estimate of every node, whose device numbers they
ask Triton for, and end with "No module named 'triton'": on CPUs those two numbers come from the calibrated profile
here, and so do the times of collectives, which the passes otherwise take from a model of NCCL. And with
`bucket_all_gathers_fx="all"` one kernel copies all parameters of the model: TorchInductor compares every pair of copies
when it fuses, and generates and compiles one C++ function of as many arguments, which takes minutes for four layers.
The passes here put at most a block into a bucket.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inductor_passes._compat import CPU_ATTENTION, CustomGraphPass
from inductor_passes.costs.collective import CollectiveModel
from inductor_passes.costs.profiles import HardwareProfile
from inductor_passes.costs.topology import topology_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFIX = "aten_distributed_optimizations"
_KEEP_ORDER = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "allow_buffer_reuse": False,
}
"""Without these TorchInductor undoes the order that its overlap passes have made; torchtitan sets them, too."""
_NS_PER_MS = 1e6
_ROOFLINE_SPEED = 0.75 * 2
"""How much faster the estimates take products to be than the rate they are told: they count a product and a sum as one
operation, at three quarters of the rate (`torch.utils._runtime_estimation.flops_to_ns`, torch 2.13)."""
_COLLECTIVES: dict[object, str] = {
    torch.ops._c10d_functional.all_gather_into_tensor: "all_gather",
    torch.ops._c10d_functional.all_gather_into_tensor_out: "all_gather",  # of buckets
    torch.ops._c10d_functional.reduce_scatter_tensor: "reduce_scatter",
    torch.ops._c10d_functional.reduce_scatter_tensor_out: "reduce_scatter",
    torch.ops._c10d_functional.all_reduce: "all_reduce",
}


def unavailable() -> str:
    """Why this torch cannot run the stock passes, "" if it can."""
    try:
        import torch._inductor.config as config
        from torch._inductor.fx_passes import overlap_manual_scheduling  # noqa: F401
    except ImportError as error:
        return f"torch {torch.__version__}: {error}"
    if not hasattr(config.aten_distributed_optimizations, "enable_overlap_scheduling"):
        return f"torch {torch.__version__} has no overlap scheduling"
    return ""


def overlap_scheduling(profile: HardwareProfile, ranks: int, block_bytes: int) -> dict[str, Any]:
    """Options for stock overlap scheduling with bucketing.

    Args:
        profile: prices collectives and, on CPUs, everything.
        ranks: of the group that shards.
        block_bytes: parameters of a block, the most that one bucket of the step before scheduling holds.
    """
    import torch._inductor.config as config

    wanted = {
        "enable_overlap_scheduling": True,
        "collective_bucketing": True,
        "insert_overlap_deps": True,
        # Some of these dependencies can be cyclic; torch advises to leave them out then.
        "overlap_scheduling_autofix_cycles": True,
        "compute_estimator": "analytical",
        "custom_runtime_estimation": _CollectiveTimes(profile, ranks),
        "pre_bucketing_fsdp_collectives_bucket_cap_mb": block_bytes / 2**20,
    }
    known = config.aten_distributed_optimizations
    chosen = {f"{_PREFIX}.{name}": value for name, value in wanted.items() if hasattr(known, name)}
    return _KEEP_ORDER | chosen


def per_block_bucketing(blocks: Sequence[str | tuple[str, ...]]) -> dict[str, Any]:
    """Options for stock manual bucketing: one bucket for each block, gathered one block ahead.

    Args:
        blocks: modules by fully qualified name, or several that share a bucket. The pass leaves the collectives of
            modules that are not named where they are, one by one.
    """
    return _KEEP_ORDER | {"post_grad_custom_post_pass": _ManualBuckets(tuple(blocks))}


def give_device_numbers(profile: HardwareProfile) -> None:
    """Without a GPU: let the roofline estimates of this process use a profile, where they would import Triton.

    They then expect matrix products and attention to last as long as the profile says, so that the passes see the same
    machine as ours do. torch has no formula for attention on CPUs: it would take no time and hide nothing.
    """
    if torch.cuda.is_available():
        return
    import torch.utils._runtime_estimation as estimation
    from torch.utils.flop_counter import flop_registry

    bytes_per_ns = profile.value("memory_bandwidth") * profile.value("memory_efficiency") / 1000 / 10**9

    def tera_flops(dtype: torch.dtype) -> float:
        name = str(dtype).removeprefix("torch.")
        name = name if name in profile.dtypes() else "float32"
        rate = profile.value(f"peak_flops.{name}") * profile.value(f"matmul_efficiency.{name}") / 1000
        return rate / 10**12 / _ROOFLINE_SPEED

    estimation.get_gpu_dram_gbps = lambda: bytes_per_ns  # type: ignore[assignment]
    estimation.get_device_tflops = tera_flops  # type: ignore[assignment]
    for packet, like in CPU_ATTENTION.items():
        flop_registry[packet] = flop_registry[like]


@dataclasses.dataclass(frozen=True)
class _CollectiveTimes:
    """Times of collectives in ms for the stock passes. An object, so that compile caches can tell one from another."""

    profile: HardwareProfile
    ranks: int

    def __call__(self, node: fx.Node, size_bytes: int | None = None) -> float | None:
        kind = _COLLECTIVES.get(getattr(node.target, "overloadpacket", None))
        if kind is None:
            return None
        if size_bytes is None:
            carrier = node.meta["val"] if kind == "all_gather" else node.all_input_nodes[0].meta["val"]
            size_bytes = carrier.numel() * carrier.element_size()
        topology = topology_of(range(self.ranks), self.profile.value("ranks_per_node"))
        return CollectiveModel(self.profile).time_ns(kind, topology, size_bytes) / _NS_PER_MS


class _ManualBuckets(CustomGraphPass):
    def __init__(self, blocks: tuple[str | tuple[str, ...], ...]) -> None:
        self._blocks = blocks

    def __call__(self, graph: fx.Graph) -> None:
        from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

        assert graph.owning_module is not None
        plans = [block if isinstance(block, str) else list(block) for block in self._blocks]
        manual_overlap_bucketing(graph.owning_module, plans, insert_overlap_deps=True)

    def uuid(self) -> bytes:
        return hashlib.sha256(f"per-block buckets {self._blocks} {torch.__version__}".encode()).digest()
