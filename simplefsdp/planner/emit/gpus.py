"""What code generation asks of a GPU, for the GPUs a user may name.

Owns their properties, from NVIDIA's data sheets and the table of technical specifications per compute capability in the
CUDA C++ programming guide. Must not know torch.
"""

from __future__ import annotations

import dataclasses

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Properties of one GPU, under the names of `torch.cuda.get_device_properties`.

    Args:
        name: as the driver reports it.
        major, minor: compute capability.
        multi_processor_count: streaming multiprocessors.
        total_memory: bytes.
        L2_cache_size: bytes.
        shared_memory_per_multiprocessor: bytes.
        shared_memory_per_block_optin: bytes that a kernel gets if it asks for them.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    shared_memory_per_block: int = 48 * KIB
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    gcnArchName: str = ""

    @property
    def capability(self) -> int:
        """90 for sm_90."""
        return 10 * self.major + self.minor


GPUS: dict[str, Gpu] = {
    "a100_sxm": Gpu("NVIDIA A100-SXM4-80GB", 8, 0, 108, 80 * GIB, 40 * MIB, 164 * KIB, 163 * KIB),
    "h100_sxm": Gpu("NVIDIA H100 80GB HBM3", 9, 0, 132, 80 * GIB, 50 * MIB, 228 * KIB, 227 * KIB),
    "h200_sxm": Gpu("NVIDIA H200", 9, 0, 132, 141 * GIB, 50 * MIB, 228 * KIB, 227 * KIB),
    "b200_sxm": Gpu("NVIDIA B200", 10, 0, 148, 180 * GIB, 126 * MIB, 228 * KIB, 227 * KIB),
}
"""By the hardware profile that models them."""


def find_gpu(profile: str) -> str | None:
    """The key in `GPUS` of the device that a hardware profile models: "h100_sxm" of ".../h100_96gb.json", say."""
    return next((name for name in GPUS if name.split("_")[0] in profile.lower()), None)
