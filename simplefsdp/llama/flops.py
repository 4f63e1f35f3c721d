"""How much arithmetic a token costs, and how much a GPU can do: the two sides of model FLOPs utilisation (MFU).

Owns: the counting formula and the table of peaks. Must not know: timing.

    MFU = tokens per second per device * flops_per_token / peak_flops
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from simplefsdp.llama.config import LlamaConfig


def flops_per_token(config: LlamaConfig, seq_len: int) -> int:
    """Floating-point operations that training on one token needs: forward and backward, without recomputation.

    The formula of PaLM (arXiv 2204.02311, appendix B): ``6 N + 12 L H E S``. Each of the N weights of a
    matrix product costs a multiplication and an addition, once in forward and twice in backward. Attention
    adds the products of scores and values, 2 * 2 * S * H * E forward per layer, counted for the whole S x S
    square although the causal half suffices, so that numbers compare with published ones. The embedding is
    looked up, not multiplied, and is left out; the head counts, tied or not; norms are left out.

    Args:
        config: the model.
        seq_len: S, tokens a sequence has in training.
    """
    norms = config.dim * (2 * config.n_layers + 1)
    embedding = 0 if config.tied_head else config.vocab_size * config.dim
    weights = config.n_parameters - norms - embedding
    return 6 * weights + 12 * config.n_layers * config.n_heads * config.head_dim * seq_len


@dataclass(frozen=True)
class PeakFlops:
    """Peak of one GPU.

    Attributes:
        name: part of the name that ``torch.cuda.get_device_name`` gives.
        flops: dense bfloat16 tensor-core operations per second.
        source: where the number is published. NVIDIA prints peaks with 2:4 sparsity, which are halved here.
    """

    name: str
    flops: float
    source: str


PEAKS: tuple[PeakFlops, ...] = (
    # More special names first: the first match counts.
    PeakFlops("H100 PCIe", 756e12, "NVIDIA H100 datasheet, 2022: 1,513 TFLOP/s with sparsity"),
    PeakFlops("H100 NVL", 835e12, "NVIDIA H100 NVL datasheet, 2024: 1,671 TFLOP/s with sparsity"),
    PeakFlops("H100", 989e12, "NVIDIA H100 SXM datasheet, 2022: 1,979 TFLOP/s with sparsity"),
    PeakFlops("H200 NVL", 835e12, "NVIDIA H200 datasheet, 2024: 1,671 TFLOP/s with sparsity"),
    PeakFlops("GH200", 989e12, "NVIDIA GH200 datasheet, 2023: 1,979 TFLOP/s with sparsity"),
    PeakFlops("H200", 989e12, "NVIDIA H200 SXM datasheet, 2023: 1,979 TFLOP/s with sparsity"),
    PeakFlops("GB200", 2500e12, "NVIDIA GB200 NVL72 datasheet, 2024: 5 PFLOP/s per GPU with sparsity"),
    PeakFlops("B200", 2250e12, "NVIDIA HGX B200 datasheet, 2024: 4.5 PFLOP/s per GPU with sparsity"),
    PeakFlops("A100", 312e12, "NVIDIA A100 datasheet, 2021: 312 TFLOP/s dense"),
)


def peak_flops(device: torch.device) -> float | None:
    """Peak dense bfloat16 operations per second of a device, or ``None`` where it is not known (as for CPUs)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return find_peak_flops(torch.cuda.get_device_name(device))


def find_peak_flops(device_name: str) -> float | None:
    """The same by the GPU's name, e.g. ``"NVIDIA H100 80GB HBM3"``."""
    return next((peak.flops for peak in PEAKS if peak.name in device_name), None)
