"""The code that TorchInductor writes for a model on the CPU, for the CPU and for a GPU that is not there.

Owns the names under which tests ask for it; `simplefsdp.planner.emit.code` makes it.

    codes = emitted_code(model, x, options=inductor_passes.options(), devices=("cpu", "cuda"))
    codes["cuda"]["backward"]  # Python source: kernels, and the wrapper that calls them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from simplefsdp.planner.emit.code import emitted_codes
from simplefsdp.planner.emit.gpus import GPUS

_TARGETS = {"cpu": None, "cuda": GPUS["h100_sxm"]}


def emitted_code(
    model: nn.Module,
    *inputs: torch.Tensor,
    options: dict[str, Any],
    devices: Sequence[str] = ("cpu",),
) -> dict[str, dict[str, str]]:
    """Trace one forward and backward of a model and have TorchInductor write the code of both.

    Args:
        model: a module on the CPU, best on a fake process group: its forward and backward run once.
        inputs: its arguments.
        options: options of TorchInductor, as for `torch.compile`.
        devices: "cpu" for C++ kernels, "cuda" for Triton kernels of an H100.

    Returns:
        By device, then by graph ("forward" or "backward"), the source.
    """
    targets = [_TARGETS[device] for device in devices]
    return dict(zip(devices, emitted_codes(model, inputs, options=options, targets=targets), strict=True))
