"""A backend that runs the graph half of the passes and then executes the graphs as they are.

It owns the imitation of TorchInductor's order of events: joint pass, partitioner, post-grad passes of
forward, and of backward. Nothing is fused or compiled, so it is quick, runs anywhere, and shows values bit
for bit. The scheduler pass does not run here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inductor_passes import _compat
from inductor_passes.hooks import JointHook, PostGradHook
from inductor_passes.install import make_setup

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from inductor_passes.config import PassConfig
    from inductor_passes.report import PassRecord


class AotEagerBackend:
    """A `torch.compile` backend that runs the graph passes and nothing else of TorchInductor.

    Args:
        config: options of the passes; None means `PassConfig()`.

    Attributes:
        graphs: every graph that was executed, as (kind, graph module); kind is "forward", "backward" or
            "inference".
    """

    def __init__(self, config: PassConfig | None = None) -> None:
        setup = make_setup(config)
        self._joint = JointHook((setup,), pinned=True)
        self._post_grad = PostGradHook((setup,), pinned=True)
        self.graphs: list[tuple[str, fx.GraphModule]] = []
        self._backend = _compat.aot_autograd_backend(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            inference_compiler=self._compiler("inference"),
            partition_fn=self._partition,
        )

    @property
    def records(self) -> list[PassRecord]:
        """What each pass did to each graph, in order."""
        return [*self._joint.records, *self._post_grad.records]

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self._backend(gm, inputs)
        return compiled

    def _partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        self._joint(joint.graph)
        return _compat.min_cut_partition(joint, inputs, **kwargs)

    def _compiler(self, kind: str) -> Callable[..., Any]:
        def compile_graph(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            if kind == "inference":
                self._joint(gm.graph)
            self._post_grad(gm.graph)
            gm.recompile()
            self.graphs.append((kind, gm))
            return gm.forward

        return compile_graph


def aot_eager_backend(config: PassConfig | None = None) -> AotEagerBackend:
    """A backend for `torch.compile(model, backend=...)` that runs the graph passes and then the graphs as
    they are.

    Args:
        config: options of the passes; None means `PassConfig()`.
    """
    return AotEagerBackend(config)
