"""A torch.compile backend that keeps the graphs it compiles, and runs them eagerly.

recorder = GraphRecorder()
compiled = torch.compile(model, backend=recorder, fullgraph=True)
compiled(x).sum().backward()
assert counts_by_kind(graph_collectives(recorder.backward[0].graph)) == {"reduce_scatter": 2}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition


class GraphRecorder:
    """Backend like `aot_eager` (AOTAutograd, min-cut partitioner, no code generation) that records graphs.

    Attributes:
        forward: forward graphs of training calls, in compile order.
        backward: backward graphs; each is compiled at the first backward of its forward.
        inference: graphs of calls that need no gradient.
        compile_count: how often Dynamo handed over a function: graph breaks and recompiles raise it.
    """

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self.inference: list[torch.fx.GraphModule] = []
        self.compile_count = 0
        self._aot = aot_autograd(
            fw_compiler=_recording_compiler(self.forward),
            bw_compiler=_recording_compiler(self.backward),
            inference_compiler=_recording_compiler(self.inference),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )

    def __call__(self, graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile one Dynamo graph; torch.compile calls this."""
        self.compile_count += 1
        compiled: Callable[..., Any] = self._aot(graph_module, example_inputs)
        return compiled


def _recording_compiler(graphs: list[torch.fx.GraphModule]) -> Callable[..., Callable[..., Any]]:
    def compile_graph(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph_module)
        boxed: Callable[..., Any] = make_boxed_func(graph_module.forward)
        return boxed

    return compile_graph
