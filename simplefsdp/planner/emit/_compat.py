"""TorchInductor told that a GPU is there, and stopped when its source is written. All of it is private to torch.

Owns: what code generation asks of a device, and where it hands over the finished source (torch 2.11 to 2.14). Must not
know models or what becomes of the code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo import device_interface
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from simplefsdp.planner.emit.gpus import Gpu

CUDA = torch.device("cuda", 0)


class _StopError(BaseException):
    """Ends a compilation whose source is written; no `except Exception` of TorchInductor stops it."""


def compile_with(
    gm: fx.GraphModule, values: list[Any], inner: Callable[..., Any], options: dict[str, Any]
) -> Any:
    """Compile what Dynamo has traced as TorchInductor does, but hand forward and backward to `inner`."""
    from torch._inductor.compile_fx import compile_fx

    compiler: Any = inner
    return compile_fx(gm, values, inner_compile=compiler, config_patches=options)


def boxed(gm: fx.GraphModule, mode: Any) -> Callable[..., Any]:
    """A graph as AOTAutograd calls compiled code; it runs the graph's operators.

    Args:
        gm: the graph.
        mode: makes fake what the graph makes itself; None leaves it real.
    """

    def run(*args: Any) -> Any:
        with mode or contextlib.nullcontext():
            return gm.forward(*args)

    function: Callable[..., Any] = make_boxed_func(run)
    return function


def write_source(gm: fx.GraphModule, values: Sequence[Any], is_backward: bool) -> str:
    """Have TorchInductor write the code of a graph, and end there: nothing is built.

    Args:
        gm: the graph; it is used up.
        values: its inputs, fake or real.
        is_backward: whether it is a backward graph.
    """
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
        if any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values):
            # It would run the operators anew, some of which need a CUDA build of torch even for fake tensors.
            mode = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
            stack.enter_context(mock.patch.object(compile_fx, "fake_tensor_prop", return_value=mode))
        with contextlib.suppress(_StopError):
            compile_fx.compile_fx_inner(gm, values, is_backward=is_backward)
    (source,) = sources
    return source


@contextlib.contextmanager
def moved_to_gpu(gm: fx.GraphModule) -> Iterator[list[Any]]:
    """Put every tensor of a graph that was traced on the CPU on the GPU; gives its inputs there."""
    mode = FakeTensorMode()
    with mode:
        for node in gm.graph.nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": CUDA}
            node.meta["val"] = tree_map_only(torch.Tensor, _moved, node.meta.get("val"))
    with tracing(TracingContext(mode)):
        yield [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def _moved(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)


class _MadeOnCpu(TorchDispatchMode):
    """TorchInductor finds out whether a tensor holds one value by really making a small one, which needs a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def make_interface(gpu: Gpu) -> type[Any]:
    """What TorchInductor asks of a kind of device."""

    class Worker(device_interface.CudaInterface.Worker):
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: gpu)

    class Interface(device_interface.CudaInterface):
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)
        current_device = staticmethod(lambda: 0)
        get_device_properties: Any = staticmethod(lambda device=None: gpu)
        get_compute_capability = staticmethod(lambda device=None: gpu.capability)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)
        get_raw_stream = staticmethod(lambda index: 0)

    Interface.Worker = Worker  # type: ignore[misc]
    return Interface


def _forget(function: Any) -> None:
    """Drop what a function has cached, if it caches."""
    getattr(function, "cache_clear", lambda: None)()


@contextlib.contextmanager
def posing_as(gpu: Gpu) -> Iterator[None]:
    """Inside, TorchInductor writes code for a GPU, whether there is one or not."""
    from torch._inductor import scheduler
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton as triton_utils

    device_interface.init_device_reg()
    before = dict(device_interface.device_interfaces)
    answers: dict[str, Callable[..., Any]] = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=None: gpu,
        "get_device_capability": lambda device=None: (gpu.major, gpu.minor),
        "get_device_name": lambda device=None: gpu.name,
        "is_current_stream_capturing": lambda: False,
    }
    interface = make_interface(gpu)
    fold = UniformValueConstantFolder.run

    def fold_on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _MadeOnCpu():  # type: ignore[no-untyped-call]
            return fold(self, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(UniformValueConstantFolder, "run", fold_on_cpu))
        # Kernels are text: only building them needs Triton, whose version the text names.
        stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
        stack.enter_context(mock.patch.object(triton_utils, "triton_hash_with_backend", return_value="none"))
        for device in ("cuda", "cuda:0"):
            device_interface.register_interface_for_device(device, interface)
        _forget(DeviceProperties.create)  # those of another GPU
        try:
            yield
        finally:
            _forget(DeviceProperties.create)
            device_interface.device_interfaces.clear()
            device_interface.device_interfaces.update(before)


@contextlib.contextmanager
def without_generator_states() -> Iterator[None]:
    """Inside, recomputed random operators, which attention counts as, are called as they are: the wrapper that gives
    them the state of a generator needs the device's generator."""
    from torch._functorch import partitioners

    def keep(joint: Any, forward: Any, backward: Any, symbols: int) -> tuple[Any, Any]:
        return forward, backward

    with mock.patch.object(partitioners, "functionalize_rng_ops", keep):
        yield


@contextlib.contextmanager
def triton_for(gpu: Gpu) -> Iterator[None]:
    """Inside, Triton compiles for a GPU without a driver (Triton 3.3 to 3.7)."""
    import torch._inductor.config
    import triton  # type: ignore[import-not-found]
    from torch._inductor.runtime import triton_helpers
    from torch.utils import _triton as triton_utils
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.backends.driver import GPUDriver  # type: ignore[import-not-found]

    class Driver(GPUDriver):  # type: ignore[misc]
        def __init__(self) -> None:  # the base class looks for torch's CUDA
            self.get_device_capability = lambda device=0: (gpu.major, gpu.minor)
            self.get_current_stream = lambda device=0: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_device_interface = lambda: make_interface(gpu)

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", gpu.capability, gpu.warp_size)

        def get_active_torch_device(self) -> torch.device:
            return CUDA

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError(ty)

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

        def get_empty_cache_for_benchmark(self) -> Any:
            raise NotImplementedError

    for function in vars(triton_utils).values():
        _forget(function)  # answers that were given before the GPU was there
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
        stack.enter_context(torch._inductor.config.patch(use_static_triton_launcher=False))
        # There is no other to go back to: Triton looks for one only when it is asked.
        triton.runtime.driver.set_active(Driver())
        yield


def compile_kernel(kernel: Any) -> str:
    """PTX of a kernel as TorchInductor defines it, in its first configuration."""
    kernel.precompile(warm_cache_only=True)  # compiles, and loads nothing
    text: str = kernel.compile_results[0].kernel.asm["ptx"]
    return text
