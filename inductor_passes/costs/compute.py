"""Time of compute: a roofline per fused region, or kernel times where the profile has them.

Owns ``Work`` and the compute model. Must not know graphs, plans or torch: whoever reads a graph turns a
region into ``Work`` first.
"""

from __future__ import annotations

import dataclasses

from inductor_passes.costs.collective import NS_PER_S
from inductor_passes.costs.profiles import HardwareProfile


@dataclasses.dataclass(frozen=True)
class Work:
    """What one kernel (one fused region) does.

    Args:
        flops: Floating-point operations; a multiply-add counts two.
        moved_bytes: Bytes read plus bytes written in device memory.
        dtype: Dtype of the matmul inputs, as torch names it (``"bfloat16"``, ``"torch.float8_e4m3fn"``).
        kernels: Keys of times in the profile, which take the place of the model where it has them all.
    """

    flops: int = 0
    moved_bytes: int = 0
    dtype: str = "float32"
    kernels: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ComputeModel:
    """Prices compute with the constants of one profile."""

    profile: HardwareProfile

    def time_ns(self, work: Work) -> int:
        """The larger of compute and memory time, plus the fixed cost of a kernel; whole ns.

        Peak rates are scaled by the profile's efficiencies. No work takes no time. Kernel times in the profile
        replace the model.
        """
        known = self.profile.kernels
        if known and work.kernels and all(key in known for key in work.kernels):
            return sum(known[key] for key in work.kernels)
        if work.flops <= 0 and work.moved_bytes <= 0:
            return 0
        dtype = rate_dtype(work.dtype, self.profile.dtypes())
        rate = self.profile.value(f"peak_flops.{dtype}") * self.profile.value(f"matmul_efficiency.{dtype}")
        math_ns = -(-work.flops * 1000 * NS_PER_S // rate)
        return max(math_ns, self.move_ns(work.moved_bytes)) + self.profile.value("kernel_overhead")

    def move_ns(self, moved_bytes: int) -> int:
        """Time to read and write ``moved_bytes`` in total, without the fixed cost of a kernel."""
        rate = self.profile.value("memory_bandwidth") * self.profile.value("memory_efficiency")
        return -(-moved_bytes * 1000 * NS_PER_S // rate)


def rate_dtype(dtype: str, known: tuple[str, ...]) -> str:
    """Which of the profile's matmul rates a dtype runs at.

    float8 variants share one rate and fall back to the 16-bit one; float16 and bfloat16 stand for each other;
    every other dtype without a rate of its own (integers, complex) is priced as float32.
    """
    name = dtype.removeprefix("torch.")
    if name.startswith("float8"):
        candidates = ["float8", "bfloat16", "float16"]
    elif name in ("bfloat16", "float16"):
        candidates = [name, "bfloat16", "float16"]
    else:
        candidates = [name]
    return next((item for item in candidates if item in known), "float32")
