"""Class swap and properties: what a wrapped module is.

Each wrapped module's class is replaced by a subclass of it that has a property for every sharded parameter. The module
keeps its sharded DTensor in `_parameters` under the original name, where `named_parameters()`, `state_dict()` and
optimizers find it; reading the attribute inside a forward goes through the property, which unshards:

    module.weight  ->  _parameters["weight"] (DTensor)  ->  to_local  ->  unshard  ->  plain tensor, compute dtype

The subclass depends on the original class and on the parameter names alone; everything else is looked up on the
instance, so equal modules share a class and compiled code, and modules of one class can differ in policy and mesh.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement

from . import _compat, regather
from .mesh import DataParallelMesh
from .placement import ShardSpec, stored_as, to_sharded
from .policy import GradientSync
from .trail import Trail
from .unshard import traced_unshard, unshard

__all__ = ["ShardedModule", "Slot", "WrapState", "is_wrapped", "slots_of", "wrapped_class"]

_STATE = "_simplefsdp"
"""Name of the instance attribute that holds a module's ModuleState."""


class Slot:
    """One sharded parameter, wherever it is registered: tied modules share the slot.

    Attributes:
        spec: how to unshard it.
        mesh, placements: of the stored DTensor.
        shard_rank: this rank's position in the shard group.
        traced: the unshard as torch.compile sees it.
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
        self.traced = traced_unshard(spec)
        self.accumulator: torch.Tensor | None = None
        self.stage = GradientSync.FULL

    @property
    def param(self) -> nn.Parameter:
        """The sharded parameter as it is registered now."""
        param = self.owner._parameters[self.spec.name]
        assert param is not None
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        new = Slot(self.spec, self.mesh, self.placements, self.shard_rank, self.owner, self.fqn, self.wrap)
        memo[id(self)] = new
        new.owner = copy.deepcopy(self.owner, memo)
        new.wrap = copy.deepcopy(self.wrap, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "traced": None, "accumulator": None, "stage": GradientSync.FULL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, traced=traced_unshard(state["spec"]))

    def shard_full(self, full: torch.Tensor, device: torch.device | None = None) -> DTensor:
        """The stored form of an unsharded tensor."""
        return to_sharded(full, self.spec, self.mesh, self.placements, self.shard_rank, device)

    def follow_dtype(self, dtype: torch.dtype) -> None:
        """Take over the dtype that the stored parameter was converted to."""
        if dtype != self.spec.storage_dtype:
            self.spec = stored_as(self.spec, dtype, self.wrap.mp_policy)
            self.traced = traced_unshard(self.spec)
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
        sync: how far the next backward reduces gradients.
        accumulating: whether gradients go to accumulators, since a backward that did not fully reduce.
        reduction_queued: whether the running backward will reduce the accumulators when it ends.
        raw_depth: number of open `sharded_parameters` contexts; attribute reads give shards while it is positive.
        slots: every sharded parameter, in registration order.
        passes_key: names the PassConfig in the tags that the passes read.
        trail: the reads and reductions up to the first optimizer step, which compares them between ranks; then None.
    """

    dp: DataParallelMesh
    mp_policy: MixedPrecisionPolicy
    sync: GradientSync = GradientSync.FULL
    accumulating: bool = False
    reduction_queued: bool = False
    raw_depth: int = 0
    slots: tuple[Slot, ...] = ()
    passes_key: str = ""
    trail: Trail | None = dataclasses.field(default_factory=Trail)

    def __deepcopy__(self, memo: dict[int, Any]) -> WrapState:
        new = WrapState(self.dp, self.mp_policy, passes_key=self.passes_key)
        memo[id(self)] = new
        new.slots = copy.deepcopy(self.slots, memo)
        return new


@dataclasses.dataclass
class ModuleState:
    """What one wrapped module knows.

    Attributes:
        slots: its parameters by attribute name.
        wrap: what it shares with the modules of the same `simple_fsdp` call.
        is_root: whether it was the argument of that call.
        reads: in eager mode, the unsharded tensors that the running call of this module has read, so that code which
            reads a parameter many times (an LSTM does) gathers it once; None outside of a call.
    """

    slots: dict[str, Slot]
    wrap: WrapState
    is_root: bool
    reads: dict[Any, torch.Tensor] | None = None


class ShardedModule:
    """Mixed into the class of every wrapped module, before the module's own class.

    Attributes:
        _simplefsdp_base: the module's own class.
        _simplefsdp_names: the attributes that unshard when they are read.
    """

    _simplefsdp_base: type[nn.Module]
    _simplefsdp_names: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state: ModuleState = self.__dict__[_STATE]
        policy = state.wrap.mp_policy
        if state.is_root and policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = _cast_floating((args, kwargs), policy.param_dtype)
        if torch.compiler.is_compiling():
            out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        else:
            outer, state.reads = state.reads, {}
            try:
                with regather.forward_scope():
                    out = super().__call__(*args, **kwargs)  # type: ignore[misc]
            finally:
                state.reads = outer
        if state.is_root and policy.output_dtype is not None:
            out = _cast_floating(out, policy.output_dtype)
        return out

    def __setattr__(self, name: str, value: Any) -> None:
        slot = self.__dict__[_STATE].slots.get(name) if _STATE in self.__dict__ else None
        if slot is None or value is None:
            super().__setattr__(name, value)
        else:
            _assign(self, name, slot, value)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What `to`, `bfloat16`, `cpu`, `to_empty` and the like run on every module: slots follow the new dtype.

        Raises:
            RuntimeError: gradients wait for their reduction in the old dtype; nothing is changed then.
        """
        state: ModuleState = self.__dict__[_STATE]
        _check_convertible(state.wrap)
        parameters: dict[str, nn.Parameter | None] = self._parameters  # type: ignore[attr-defined]
        # torch exchanges the contents of DTensor parameters with those of a new one, their attributes included.
        attributes = {name: dict(vars(param)) for name, param in parameters.items() if param is not None}
        try:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            for name, slot in state.slots.items():
                param = parameters.get(name)
                if param is not None:
                    vars(param).update(attributes[name])
                    slot.follow_dtype(param.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # deepcopy and pickle: the dynamic class cannot be found by name, so it is made again from its parts.
        kind = type(self)
        return _rebuild, (kind._simplefsdp_base, kind._simplefsdp_names), self.__dict__


def is_wrapped(module: nn.Module) -> bool:
    """Whether a `simple_fsdp` call has wrapped this very module."""
    return isinstance(module, ShardedModule)


def module_state(module: nn.Module) -> ModuleState:
    """The state of a wrapped module."""
    state: ModuleState = module.__dict__[_STATE]
    return state


def slots_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Slot]]:
    """Every (owner, attribute name, slot) below `module`, tied parameters once per place."""
    for owner in module.modules():
        if is_wrapped(owner):
            for name, slot in module_state(owner).slots.items():
                yield owner, name, slot


def wrap_states(module: nn.Module) -> list[WrapState]:
    """The distinct wrap states below `module`, in module order."""
    found: dict[int, WrapState] = {}
    for owner in module.modules():
        if is_wrapped(owner):
            wrap = module_state(owner).wrap
            found.setdefault(id(wrap), wrap)
    return list(found.values())


def wrapped_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of `base` whose attributes `names` unshard when they are read; one for each pair."""
    hashable: Any = base  # mypy takes nn.Module's own hash for the class's
    kind: type[nn.Module] = _make_class(hashable, names)
    return kind


@functools.cache
def _make_class(base: Any, names: tuple[str, ...]) -> Any:
    namespace: dict[str, Any] = {name: _parameter_property(name) for name in names}
    if issubclass(base, nn.RNNBase):
        namespace["_flat_weights"] = _flat_weights_property()
    namespace.update(
        {
            "_simplefsdp_base": base,
            "_simplefsdp_names": names,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
        }
    )
    return type(base.__name__, (ShardedModule, base), namespace)


def install(module: nn.Module, state: ModuleState, parameters: dict[str, nn.Parameter]) -> None:
    """Turn `module` into a wrapped one. Cannot fail half-way: everything that may fail has happened before."""
    module._parameters.update(parameters)
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)
    module.__dict__[_STATE] = state
    module.__class__ = wrapped_class(type(module), tuple(state.slots))


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    kind = wrapped_class(base, names)
    return kind.__new__(kind)


def _parameter_property(name: str) -> property:
    def read(self: nn.Module) -> Any:
        return _read(self, name)

    return property(read, doc=f"The parameter '{name}', unsharded inside a forward.")


def _flat_weights_property() -> property:
    # RNN modules keep a list of their parameters beside the parameters; it would hold the unsharded originals.
    def read(self: nn.Module) -> list[Any]:
        names: list[str] = self._flat_weights_names  # type: ignore[assignment]
        return [getattr(self, name, None) for name in names]

    def write(self: nn.Module, value: list[Any]) -> None:
        """Ignored: the list is always read from the parameters."""

    return property(read, write)


def _read(module: nn.Module, name: str) -> Any:
    try:
        param = module._parameters[name]
    except KeyError:
        raise AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'") from None
    # Not a DTensor: None, or a tensor that somebody put there for a while (functional_call, full_parameters).
    if not isinstance(param, DTensor):
        return param
    state: ModuleState = module.__dict__[_STATE]
    wrap = state.wrap
    compiling = torch.compiler.is_compiling()
    if wrap.raw_depth > 0 or not (compiling or regather.in_forward()):
        return param
    slot = state.slots[name]
    spec = slot.spec
    if compiling:
        _compat.while_tracing(_note_traced_read, slot)
    key = None
    if not compiling and state.reads is not None:
        key = (
            name,
            _compat.version(param),
            param.requires_grad and torch.is_grad_enabled(),
            wrap.accumulating,
        )
        if key in state.reads:
            return state.reads[key]
    with torch.fx.traceback.annotate(_tag(name, wrap, spec)):
        shard = param.to_local(grad_placements=slot.placements)
        accumulator, sync = None, GradientSync.FULL
        if wrap.accumulating and param.requires_grad:
            accumulator, sync = slot.accumulator, slot.stage
            shard = shard.detach()
        full = unshard(shard, accumulator, spec, sync, slot.traced)
    if not compiling:
        if spec.reshard_after_forward:
            whole = _compat.local_tensor(full) if isinstance(full, DTensor) else full
            regather.track(whole, param, spec)
        if wrap.trail is not None:
            wrap.trail.record(slot, full)
        if key is not None and state.reads is not None:
            state.reads[key] = full
    return full


def _note_traced_read(slot: Slot) -> None:
    if slot.wrap.trail is not None:
        slot.wrap.trail.record_traced(slot)


def _tag(name: str, wrap: WrapState, spec: ShardSpec) -> dict[str, Any]:
    """What the passes read off every node of this unshard; without the FQN, so that equal blocks trace equally."""
    return {"simplefsdp": {"param": name, "reshard": spec.reshard_after_forward, "passes": wrap.passes_key}}


def _assign(module: Any, name: str, slot: Slot, value: Any) -> None:
    """`module.weight = tensor` after wrapping: reach the shards or say how to."""
    param = module._parameters.get(name)
    if isinstance(value, DTensor) and value.device_mesh == slot.mesh and value.placements == slot.placements:
        if value.dtype != slot.spec.storage_dtype:
            _check_convertible(slot.wrap)
        nn.Module.__setattr__(module, name, value)
        new = module._parameters[name]
        if param is not None and new is not param:
            vars(new).update(vars(param))
        slot.follow_dtype(new.dtype)
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"cannot assign {type(value).__name__} to the sharded parameter '{slot.fqn}'; assign a tensor of shape "
            f"{slot.full_shape} or None"
        )
    if isinstance(value, DTensor) or tuple(value.shape) != slot.full_shape or param is None:
        raise ValueError(
            f"cannot assign a {'DTensor' if isinstance(value, DTensor) else 'tensor'} of shape {tuple(value.shape)} to "
            f"the sharded parameter '{slot.fqn}' of shape {slot.full_shape}, placements {slot.placements}: replace "
            "parameters before simple_fsdp, or assign a plain tensor of the same shape (the same on every rank), whose "
            "shards are copied"
        )
    with torch.no_grad():
        _compat.local_tensor(param).copy_(_compat.local_tensor(slot.shard_full(value)))
    if isinstance(value, nn.Parameter):
        param.requires_grad_(value.requires_grad)


def _check_convertible(wrap: WrapState) -> None:
    if not wrap.accumulating:
        return
    waiting = [s.fqn for s in wrap.slots if s.accumulator is not None and s.accumulator.grad is not None]
    if waiting or wrap.sync is not GradientSync.FULL:
        what = f"the gradient of '{waiting[0]}' waits" if waiting else "gradients are about to wait"
        raise RuntimeError(
            f"the model cannot be converted (to(), bfloat16(), cpu(), ...) while {what} for its reduction: convert it "
            "after the last micro-batch's backward, outside of no_sync"
        )
    wrap.accumulating = False


def _cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    return _compat.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


@contextlib.contextmanager
def raw_reads(module: nn.Module) -> Iterator[None]:
    """Attribute reads below `module` give the sharded DTensors, also inside a forward; nests."""
    wraps = wrap_states(module)
    for wrap in wraps:
        wrap.raw_depth += 1
    try:
        yield
    finally:
        for wrap in wraps:
            wrap.raw_depth -= 1
