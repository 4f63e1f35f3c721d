"""What wrapped modules remember: a slot for each sharded parameter, what one call shares, what one module knows.

Plain records that survive `deepcopy` and pickling. How attributes are read, and how classes change, is `parametrize`'s.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement

from .mesh import DataParallelMesh
from .placement import ShardSpec, stored_as, to_sharded
from .policy import GradientSync
from .trail import Trail
from .unshard import remember

__all__ = ["STATE", "ModuleState", "Read", "Slot", "WrapState", "find_state"]

STATE = "_simplefsdp"
"""Name of the instance attribute that holds a module's ModuleState."""


class Slot:
    """One sharded parameter, wherever it is registered: tied modules share the slot.

    Attributes:
        spec: how to unshard it.
        mesh, placements: of the stored DTensor.
        shard_rank: this rank's position in the shard group.
        traced: text that stands for the spec where torch.compile traces.
        accumulator: a leaf that collects gradients while they are not fully reduced, or None. It has the gradient's
            shape and no memory of its own (stride 0); its `.grad` is the memory.
        stage: how far gradients in the accumulator are reduced.
        owner: the first module that the parameter is registered on, under `spec.name`.
        fqn: the parameter's name from the root of the `simple_fsdp` call, for messages.
        wrap: what all parameters of that call share.
    """

    def __init__(
        self,
        spec: ShardSpec,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shard_rank: int,
        owner: nn.Module,
        fqn: str,
        wrap: WrapState,
    ) -> None:
        self.spec, self.mesh, self.placements, self.shard_rank = spec, mesh, placements, shard_rank
        self.owner, self.fqn, self.wrap = owner, fqn, wrap
        self.traced = remember(spec, shard_rank)
        self.accumulator: torch.Tensor | None = None
        self.stage = GradientSync.FULL

    @property
    def param(self) -> nn.Parameter:
        """The sharded parameter as it is registered now."""
        param = self.find_param()
        assert param is not None
        return param

    def find_param(self) -> nn.Parameter | None:
        """The same, or None where it was removed after wrapping."""
        return self.owner._parameters.get(self.spec.name)

    @property
    def waits(self) -> bool:
        """Whether a gradient in the accumulator waits for its reduction."""
        return self.accumulator is not None and self.accumulator.grad is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        new = Slot(self.spec, self.mesh, self.placements, self.shard_rank, self.owner, self.fqn, self.wrap)
        memo[id(self)] = new
        new.owner = copy.deepcopy(self.owner, memo)
        new.wrap = copy.deepcopy(self.wrap, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "traced": None, "accumulator": None, "stage": GradientSync.FULL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, traced=remember(state["spec"], state["shard_rank"]))

    def shard_full(self, full: torch.Tensor, device: torch.device | None = None) -> DTensor:
        """The stored form of an unsharded tensor."""
        return to_sharded(full, self.spec, self.mesh, self.placements, self.shard_rank, device)

    def follow_dtype(self, dtype: torch.dtype) -> None:
        """Take over the dtype that the stored parameter was converted to."""
        if dtype != self.spec.storage_dtype:
            self.spec = stored_as(self.spec, dtype, self.wrap.mp_policy)
            self.traced = remember(self.spec, self.shard_rank)
            self.accumulator = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Global shape: that of the original parameter."""
        tp = self.spec.tensor_parallel
        return self.spec.shape if tp is None else tp.shape


@dataclasses.dataclass
class WrapState:
    """Shared by all modules of one `simple_fsdp` call.

    Attributes:
        dp: the data-parallel mesh.
        mp_policy: precision of inputs and outputs of the root.
        root: the argument of the call.
        sync: how far the next backward reduces gradients.
        accumulating: whether gradients go to accumulators, since a backward that did not fully reduce.
        reducing_backward: the backward that will reduce the accumulators when it ends; it may have failed.
        raw_depth: number of open `sharded_parameters` contexts; attribute reads give shards while it is positive.
        slots: every sharded parameter, in registration order.
        passes_key: names the PassConfig in the tags that the passes read.
        context: what compiled code depends on besides specs and tensors: the passes, the rank's place.
        ignored: parameters that the call was told to leave alone, and their names below the root.
        complete: whether every parameter below the root was found accounted for, since the last one was added.
        trail: the reads and reductions up to the first optimizer step, which compares them between ranks; then None.
    """

    dp: DataParallelMesh
    mp_policy: MixedPrecisionPolicy
    root: nn.Module
    sync: GradientSync = GradientSync.FULL
    accumulating: bool = False
    reducing_backward: int | None = None
    raw_depth: int = 0
    slots: tuple[Slot, ...] = ()
    passes_key: str = ""
    context: str = ""
    ignored: dict[str, nn.Parameter] = dataclasses.field(default_factory=dict)
    complete: bool = False
    trail: Trail | None = dataclasses.field(default_factory=Trail)

    def __deepcopy__(self, memo: dict[int, Any]) -> WrapState:
        new = WrapState(self.dp, self.mp_policy, self.root, passes_key=self.passes_key, context=self.context)
        memo[id(self)] = new
        new.root = copy.deepcopy(self.root, memo)
        new.slots = copy.deepcopy(self.slots, memo)
        new.ignored = copy.deepcopy(self.ignored, memo)
        return new


@dataclasses.dataclass(frozen=True)
class Read:
    """One unsharded tensor that a module's forward has read.

    Attributes:
        full: the tensor.
        version: its count of in-place writes then.
        fqn: the parameter's name.
    """

    full: torch.Tensor
    version: int
    fqn: str


@dataclasses.dataclass
class ModuleState:
    """What one wrapped module knows.

    Attributes:
        slots: its parameters by attribute name.
        wrap: what it shares with the modules of the same `simple_fsdp` call.
        is_root: whether it was the argument of that call.
        reads: in eager mode, what the running call of this module has read, so that code which reads a parameter many
            times (an LSTM does) gathers it once; None outside of a call.
        traced_reads: what the call of this module that is being compiled has read so far, as fake tensors.
    """

    slots: dict[str, Slot]
    wrap: WrapState
    is_root: bool
    reads: dict[Any, Read] | None = None
    traced_reads: list[Read] = dataclasses.field(default_factory=list)


def find_state(module: nn.Module) -> ModuleState | None:
    """The state of a module that a `simple_fsdp` call has wrapped, or None."""
    state: ModuleState | None = vars(module).get(STATE)
    return state
