"""The process that writes code for a GPU: `python -m simplefsdp.planner.emit.worker`, a request on standard input.

Owns: the guard before torch, the wrapped model of fake CUDA tensors, the choice of attention. Must not know command
lines.

It answers on standard output with one JSON object: forward and backward (sources), ptx (texts by graph and kernel),
torch, triton (versions, or null), device, attention; or error (a text) and usage (whether it is the user's to change).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from simplefsdp.planner.emit.gpus import GPUS
from simplefsdp.planner.emit.guard import GuardError, count_gpus, install_guard
from simplefsdp.planner.request import Request


@dataclasses.dataclass(frozen=True)
class EmitRequest:
    """What to write code for.

    Args:
        step: the model and its world; every layer is compiled, in no eager mode.
        gpu: key in `GPUS`.
        profile: of the hardware, for the planner.
        lower: whether kernels are to be lowered to PTX.
    """

    step: Request
    gpu: str
    profile: str
    lower: bool = False

    def to_json(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EmitRequest:
        """From the text that `to_json` makes."""
        fields = json.loads(text)
        return cls(**{**fields, "step": Request(**fields["step"])})


def main() -> None:
    """Serve one request."""
    answer = sys.stdout
    sys.stdout = sys.stderr  # what a user's module prints must not come between
    request = EmitRequest.from_json(sys.stdin.read())
    try:
        result = _serve(request)
    except GuardError as error:
        result = {"error": str(error), "usage": True}
    json.dump(result, answer)


def _serve(request: EmitRequest) -> dict[str, Any]:
    is_real = bool(count_gpus())
    if not is_real:
        install_guard()

    import torch

    from simplefsdp.explainer.trace_errors import TraceError
    from simplefsdp.llama.options import UsageError
    from simplefsdp.planner.emit.ptx import check_triton, find_triton, lower

    if is_real and not torch.cuda.is_available():
        raise GuardError(
            f"there is a GPU, but torch {torch.__version__} cannot use it: install a CUDA build, or hide the GPU with "
            "CUDA_VISIBLE_DEVICES=''"
        )
    try:
        if request.lower:
            check_triton()
        codes, attention = _write(request, is_real)
    except (UsageError, TraceError) as error:
        return {"error": str(error), "usage": isinstance(error, UsageError)}
    gpu = GPUS[request.gpu]
    ptx = {kind: lower(code, gpu) for kind, code in codes.items()} if request.lower else {}
    device = (
        torch.cuda.get_device_name(0) if is_real else f"{gpu.name} (sm_{gpu.capability}), which is not there"
    )
    return {
        **codes,
        "ptx": ptx,
        "torch": torch.__version__,
        "device": device,
        "attention": attention,
        "triton": find_triton(),
    }


def _write(request: EmitRequest, is_real: bool) -> tuple[dict[str, str], str]:
    import contextlib

    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from simplefsdp import _compat as front_compat
    from simplefsdp.api import simple_fsdp
    from simplefsdp.explainer.trace_errors import explain_failure
    from simplefsdp.explainer.world import fake_copy, fake_inputs
    from simplefsdp.explainer.wrapping import block_patterns, wrap_options
    from simplefsdp.planner.emit import _compat
    from simplefsdp.planner.emit.attention import flash_attention
    from simplefsdp.planner.emit.code import emitted_codes

    step = request.step
    target = step.find_target()
    wrap = wrap_options(
        gpus=step.devices,
        sharding_factor=step.factor,
        precision=step.precision,
        planner=step.planner,
        blocks=block_patterns(target.model),
        memory_budget_gb=step.memory_budget_gb,
        reshard_after_forward=step.reshard,
        profile=request.profile,
    )
    attention = "as torch chooses on this device"
    # Whether padding a matrix product pays is measured, which takes the device.
    options = {} if is_real else {"shape_padding": False}
    with contextlib.ExitStack() as stack:
        stack.enter_context(explain_failure(target.name))
        stack.enter_context(front_compat.fake_world(step.devices))
        if not is_real:
            stack.enter_context(_compat.posing_as(GPUS[request.gpu]))
            attention = (
                "flash attention in half precision, which torch takes unless it prefers cuDNN's; where it is "
                "recomputed, without the wrapper that keeps a generator's state"
            )
            stack.enter_context(_compat.without_generator_states())
            stack.enter_context(flash_attention())
        mode, cuda = front_compat.fake_mode(), torch.device("cuda", 0)
        mesh = init_device_mesh("cuda", (step.devices,), mesh_dim_names=("dp",))
        model = fake_copy(target.model, mode, cuda)
        with mode:  # other ranks are not asked whether they have the same model
            model = simple_fsdp(model, mesh, **wrap)
        inputs = fake_inputs(target.inputs, mode, cuda)
        (codes,) = emitted_codes(model, inputs, options=options, mode=mode)
    return codes, attention


if __name__ == "__main__":
    main()
