"""The code that TorchInductor writes for a model, without building or running any of it.

Owns: stopping TorchInductor after code generation, and posing as a GPU that is not there. Must not know: what the
code should look like.

    codes = emitted_code(model, x, options=inductor_passes.options(), devices=("cpu", "cuda"))
    codes["cuda"]["backward"]  # Python source: kernels, and the wrapper that calls them

The model is traced once, on the CPU. TorchInductor then compiles each graph as it is, and again with every tensor
on the GPU, up to the finished source. What runs in the end is the graph itself. No C++ compiler, Triton or driver takes
part.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo import device_interface
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

_CUDA = torch.device("cuda", 0)
# What code generation asks of a device: an H100 SXM (NVIDIA's data sheet and CUDA's occupancy tables for sm_90).
_H100: Any = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30,
    gcnArchName="",
)


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
        devices: "cpu" for C++ kernels, "cuda" for Triton kernels.

    Returns:
        By device, then by graph ("forward" or "backward"), the source.
    """
    from torch._inductor.compile_fx import compile_fx

    codes: dict[str, dict[str, str]] = {device: {} for device in devices}

    def write(gm: fx.GraphModule, values: Sequence[Any], **arguments: Any) -> Callable[..., Any]:
        kind = "backward" if arguments.get("is_backward") else "forward"
        runnable = copy.deepcopy(gm)
        for device in devices:
            codes[device][kind] = _write(copy.deepcopy(gm), values, device, kind)
        boxed: Callable[..., Any] = make_boxed_func(runnable.forward)
        return boxed

    def backend(gm: fx.GraphModule, values: list[Any]) -> Any:
        inner: Any = write
        return compile_fx(gm, values, inner_compile=inner, config_patches=options)

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*inputs).sum().backward()
    return codes


class _StopError(BaseException):
    """Ends a compilation whose source is written; no `except Exception` of TorchInductor stops it."""


def _write(gm: fx.GraphModule, values: Sequence[Any], device: str, kind: str) -> str:
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering

    sources: list[str] = []

    def keep(self: Any) -> None:
        sources.append(self.codegen()[0].value)
        raise _StopError

    with contextlib.ExitStack() as stack:
        # `vec_isa_ok`: do not build a program to find out which vector instructions work.
        stack.enter_context(config.patch({"fx_graph_cache": False, "cpp.vec_isa_ok": True}))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", keep))
        if device == "cuda":
            stack.enter_context(_posing_as_gpu())
            mode = FakeTensorMode()
            stack.enter_context(tracing(TracingContext(mode)))
            values = _move(gm, mode)
            # It would run the operators anew, some of which need a CUDA build of torch even for fake tensors.
            stack.enter_context(mock.patch.object(compile_fx, "fake_tensor_prop", return_value=mode))
        with contextlib.suppress(_StopError):
            compile_fx.compile_fx_inner(gm, values, is_backward=kind == "backward")
    (source,) = sources
    return source


def _move(gm: fx.GraphModule, mode: FakeTensorMode) -> list[Any]:
    """Put every tensor of a graph on the GPU; its inputs there."""
    with mode:
        for node in gm.graph.nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": _CUDA}
            node.meta["val"] = tree_map_only(torch.Tensor, _moved, node.meta.get("val"))
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def _moved(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_CUDA)


class _Gpu(device_interface.CudaInterface):
    """What TorchInductor asks of a device besides its properties."""

    class Worker(device_interface.CudaInterface.Worker):
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: _H100)

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_device_properties: Any = staticmethod(lambda device=None: _H100)
    get_compute_capability = staticmethod(lambda device=None: 90)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)
    get_raw_stream = staticmethod(lambda index: 0)


@contextlib.contextmanager
def _posing_as_gpu() -> Iterator[None]:
    from torch._inductor import scheduler
    from torch.utils import _triton as triton_utils

    device_interface.init_device_reg()
    before = dict(device_interface.device_interfaces)
    answers: dict[str, Callable[..., Any]] = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: _H100,
        "get_device_capability": lambda device=None: (_H100.major, _H100.minor),
        "get_device_name": lambda device=None: _H100.name,
        "is_current_stream_capturing": lambda: False,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        # Kernels are text: only building them needs Triton, whose version the text names.
        stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
        stack.enter_context(mock.patch.object(triton_utils, "triton_hash_with_backend", return_value="none"))
        for device in ("cuda", "cuda:0"):
            device_interface.register_interface_for_device(device, _Gpu)
        try:
            yield
        finally:
            device_interface.device_interfaces.clear()
            device_interface.device_interfaces.update(before)
