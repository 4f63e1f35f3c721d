"""The code that TorchInductor writes for a model, without building or running any of it.

Owns: one trace of forward and backward, and a stop after code generation. Must not know what the code should look like.

    (codes,) = emitted_codes(model, (x,), options=inductor_passes.options(), targets=(GPUS["h100_sxm"],))
    codes["backward"]  # Python source: kernels, and the wrapper that calls them

The model is traced once, where it is. TorchInductor then compiles each graph up to the finished source. What runs in
the end is the graph itself, which costs nothing with fake tensors. No C++ compiler, Triton or driver takes part. What
was traced on the CPU is put on the GPU as it is, with the CPU's attention in it. A model of fake CUDA tensors, which
needs `guard.py`, gives the code of a GPU throughout.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from simplefsdp.planner.emit import _compat
from simplefsdp.planner.emit.gpus import Gpu


def emitted_codes(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any],
    targets: Sequence[Gpu | None] = (None,),
    mode: Any = None,
) -> list[dict[str, str]]:
    """Trace one forward and backward of a model and have TorchInductor write the code of both.

    Args:
        model: a module, best on a fake process group: its forward and backward run once.
        inputs: its arguments.
        options: options of TorchInductor, as for `torch.compile`.
        targets: for which GPUs; None is where the model is.
        mode: of the fake tensors of model and inputs; None for real ones.

    Returns:
        For each target, by graph ("forward" or "backward"), the source.
    """
    codes: list[dict[str, str]] = [{} for _ in targets]

    def write(gm: fx.GraphModule, values: Sequence[Any], **arguments: Any) -> Callable[..., Any]:
        is_backward = bool(arguments.get("is_backward"))
        runnable = copy.deepcopy(gm)
        for code, gpu in zip(codes, targets, strict=True):
            code["backward" if is_backward else "forward"] = _write(
                copy.deepcopy(gm), values, gpu, is_backward
            )
        return _compat.boxed(runnable, mode)

    def backend(gm: fx.GraphModule, values: list[Any]) -> Any:
        return _compat.compile_with(gm, values, write, options)

    torch.compiler.reset()
    output = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    starts = [item for item in _tensors(output) if item.requires_grad]
    torch.autograd.backward(starts, [torch.ones_like(item) for item in starts])
    return codes


def _write(gm: fx.GraphModule, values: Sequence[Any], gpu: Gpu | None, is_backward: bool) -> str:
    if gpu is None:
        return _compat.write_source(gm, values, is_backward)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_compat.posing_as(gpu))
        if not any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values):
            values = stack.enter_context(_compat.moved_to_gpu(gm))
        return _compat.write_source(gm, values, is_backward)


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    items = (
        output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    )
    return [tensor for item in items for tensor in _tensors(item)]
