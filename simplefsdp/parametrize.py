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
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import _compat, regather
from .census import check_complete
from .placement import ShardSpec
from .policy import GradientSync
from .slots import STATE, ModuleState, Read, Slot, WrapState
from .unshard import unshard

__all__ = ["ShardedModule", "is_wrapped", "module_state", "slots_of", "wrap_states", "wrapped_class"]


class ShardedModule:
    """Mixed into the class of every wrapped module, before the module's own class.

    Attributes:
        _simplefsdp_base: the module's own class.
        _simplefsdp_names: the attributes that unshard when they are read.
        _simplefsdp_methods: the methods besides `forward` that run as it does.
    """

    _simplefsdp_base: type[nn.Module]
    _simplefsdp_names: tuple[str, ...]
    _simplefsdp_methods: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state: ModuleState = self.__dict__[STATE]
        if state.is_root:
            args, kwargs = _cast_inputs(state.wrap, args, kwargs)
        if torch.compiler.is_compiling():
            if state.is_root:
                _compat.while_tracing(check_complete, state.wrap)
            out = super().__call__(*args, **kwargs)  # type: ignore[misc]
            _compat.while_tracing(_check_traced_reads, state)
        else:
            out = _run_eagerly(state, super().__call__, args, kwargs)  # type: ignore[misc]
        return _cast_output(state.wrap, out) if state.is_root else out

    def __setattr__(self, name: str, value: Any) -> None:
        slot = self.__dict__[STATE].slots.get(name) if STATE in self.__dict__ else None
        if isinstance(value, nn.Module | nn.Parameter):
            _expect_additions(self)
        if slot is None or value is None:
            super().__setattr__(name, value)
        else:
            _assign(self, name, slot, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As ever; the next forward or optimizer step names parameters that came with it and are not sharded."""
        _expect_additions(self)
        super().add_module(name, module)  # type: ignore[misc]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As ever for new names; the values of a plain parameter go into the shards under a sharded name."""
        _expect_additions(self)
        slot = self.__dict__[STATE].slots.get(name) if STATE in self.__dict__ else None
        if slot is not None and param is not None and not isinstance(param, DTensor):
            _assign(self, name, slot, param)
        else:
            super().register_parameter(name, param)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ever; gradients that wait for their reduction after `no_sync` are dropped too."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for _, _, slot in slots_of(self):  # type: ignore[arg-type]
            if slot.accumulator is not None:
                slot.accumulator.grad = None
        for wrap in wrap_states(self):  # type: ignore[arg-type]
            wrap.accumulating = wrap.sync is not GradientSync.FULL or bool(_waiting(wrap))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What `to`, `bfloat16`, `cpu`, `to_empty` and the like run on every module: slots follow the new dtype.

        Raises:
            RuntimeError: gradients wait for their reduction in the old dtype; nothing is changed then.
        """
        state: ModuleState = self.__dict__[STATE]
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
                    if isinstance(param, DTensor):  # inside full_parameters the shards stay what they are
                        slot.follow_dtype(param.dtype)

    def share_memory(self) -> Any:
        """Refused: torch cannot move the shards of a DTensor to shared memory, and crashes.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "share_memory() does not work on a model wrapped by simple_fsdp: its parameters are sharded over "
            "processes already; call it before simple_fsdp, or on full_state_dict(model)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # deepcopy and pickle: the dynamic class cannot be found by name, so it is made again from its parts.
        kind = type(self)
        parts = kind._simplefsdp_base, kind._simplefsdp_names, kind._simplefsdp_methods
        return _rebuild, parts, self.__dict__


def is_wrapped(module: nn.Module) -> bool:
    """Whether a `simple_fsdp` call has wrapped this very module."""
    return isinstance(module, ShardedModule)


def module_state(module: nn.Module) -> ModuleState:
    """The state of a wrapped module."""
    state: ModuleState = module.__dict__[STATE]
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


def wrapped_class(
    base: type[nn.Module], names: tuple[str, ...], methods: tuple[str, ...] = ()
) -> type[nn.Module]:
    """The subclass of `base` whose attributes `names` unshard when they are read; one for each set of arguments.

    Args:
        base: the module's own class.
        names: of its sharded parameters.
        methods: of `base`, besides `forward`, that run as it does.
    """
    hashable: Any = base  # mypy takes nn.Module's own hash for the class's
    kind: type[nn.Module] = _make_class(hashable, names, methods)
    return kind


@functools.cache
def _make_class(base: Any, names: tuple[str, ...], methods: tuple[str, ...]) -> Any:
    namespace: dict[str, Any] = {name: _parameter_property(name) for name in names}
    namespace.update({name: _forward_method(getattr(base, name)) for name in methods})
    if issubclass(base, nn.RNNBase):
        namespace["_flat_weights"] = _flat_weights_property()
    namespace.update(
        {
            "_simplefsdp_base": base,
            "_simplefsdp_names": names,
            "_simplefsdp_methods": methods,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__call__": _compat.with_own_code(ShardedModule.__call__),
        }
    )
    return type(base.__name__, (ShardedModule, base), namespace)


def install(module: nn.Module, state: ModuleState, parameters: dict[str, nn.Parameter]) -> None:
    """Turn `module` into a wrapped one. Cannot fail half-way: everything that may fail has happened before."""
    module._parameters.update(parameters)
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)
    module.__dict__[STATE] = state
    module.__class__ = wrapped_class(type(module), tuple(state.slots))


def add_forward_method(module: nn.Module, name: str) -> None:
    """Have a method of the wrapped module's own class run as `forward` does."""
    kind: Any = type(module)
    if name not in kind._simplefsdp_methods:
        methods = *kind._simplefsdp_methods, name
        module.__class__ = wrapped_class(kind._simplefsdp_base, kind._simplefsdp_names, methods)


def _rebuild(base: type[nn.Module], names: tuple[str, ...], methods: tuple[str, ...] = ()) -> nn.Module:
    kind = wrapped_class(base, names, methods)
    return kind.__new__(kind)


def _run_eagerly(
    state: ModuleState, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if state.is_root and not state.wrap.complete and torch.is_grad_enabled():
        check_complete(state.wrap)
    outer, state.reads = state.reads, {}
    try:
        with regather.forward_scope():
            out = call(*args, **kwargs)
        _check_not_written(state.reads.values())
        return out
    finally:
        state.reads = outer
        state.traced_reads = []


def _forward_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: ModuleState = self.__dict__[STATE]
        if torch.compiler.is_compiling() or state.reads is not None:  # called by a forward of this module
            return method(self, *args, **kwargs)
        casts = state.is_root and not regather.in_forward()
        if casts:
            args, kwargs = _cast_inputs(state.wrap, args, kwargs)
        out = _run_eagerly(state, functools.partial(method, self), args, kwargs)
        return _cast_output(state.wrap, out) if casts else out

    return run


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
    state: ModuleState = module.__dict__[STATE]
    wrap = state.wrap
    compiling = torch.compiler.is_compiling()
    if param is None or wrap.raw_depth > 0 or not (compiling or regather.in_forward()):
        return param
    # A tensor that somebody put there for a while (functional_call, full_parameters) computes as the parameter does.
    if not isinstance(param, DTensor):
        dtype = wrap.mp_policy.param_dtype
        return param.to(dtype) if dtype is not None and param.is_floating_point() else param
    slot = state.slots[name]
    spec = slot.spec
    key = None
    if not compiling and state.reads is not None:
        key = (
            name,
            _compat.version(param),
            param.requires_grad and torch.is_grad_enabled(),
            wrap.accumulating,
        )
        if key in state.reads:
            return state.reads[key].full
    with torch.fx.traceback.annotate(_tag(name, wrap, spec)):
        shard = param.to_local(grad_placements=slot.placements)
        accumulator, sync = None, GradientSync.FULL
        if wrap.accumulating and param.requires_grad:
            accumulator, sync = slot.accumulator, slot.stage
            shard = shard.detach()
        full = unshard(shard, accumulator, spec, sync, slot.traced, wrap.context)
    if compiling:
        _compat.while_tracing(_note_traced_read, state, slot, full)
    else:
        if spec.reshard_after_forward:
            whole = _compat.local_tensor(full) if isinstance(full, DTensor) else full
            regather.track(whole, param, spec)
        if wrap.trail is not None:
            wrap.trail.record(slot, full)
        if key is not None and state.reads is not None:
            state.reads[key] = Read(full, _compat.write_count(full), slot.fqn)
    return full


def _check_not_written(reads: Iterable[Read]) -> None:
    """Refuse writes to a gathered copy that autograd lets pass: the shards would never see them."""
    for read in reads:
        if _compat.write_count(read.full) != read.version:
            raise RuntimeError(
                f"forward has written to parameter '{read.fqn}', which is a gathered copy there: the write would be "
                "lost. Keep what forward changes in a buffer, or write to the parameter outside of forward"
            )


def _note_traced_read(state: ModuleState, slot: Slot, full: torch.Tensor) -> None:
    state.traced_reads.append(Read(full, _compat.write_count(full), slot.fqn))
    if slot.wrap.trail is not None:
        slot.wrap.trail.record_traced(slot)


def _check_traced_reads(state: ModuleState) -> None:
    reads, state.traced_reads = state.traced_reads, []
    _check_not_written(reads)


def _tag(name: str, wrap: WrapState, spec: ShardSpec) -> dict[str, Any]:
    """What the passes read off every node of this unshard; without the FQN, so that equal blocks trace equally."""
    return {"simplefsdp": {"param": name, "reshard": spec.reshard_after_forward, "passes": wrap.passes_key}}


def _assign(module: Any, name: str, slot: Slot, value: Any) -> None:
    """`module.weight = tensor` after wrapping: reach the shards or say how to."""
    if name not in module._parameters:
        raise ValueError(
            f"cannot assign '{slot.fqn}': the sharded parameter was removed. What replaces parameters by computed "
            "values (weight_norm, spectral_norm, pruning) has to come before simple_fsdp"
        )
    param = module._parameters[name]
    fits = isinstance(value, torch.Tensor) and tuple(value.shape) == slot.full_shape
    if (
        fits
        and isinstance(value, DTensor)
        and (value.device_mesh, value.placements) == (slot.mesh, slot.placements)
    ):
        if value.dtype != slot.spec.storage_dtype:
            _check_convertible(slot.wrap)
        nn.Module.__setattr__(module, name, value)
        new = module._parameters[name]
        if param is not None and new is not param:
            vars(new).update(vars(param))
            # What was tied stays so: load_state_dict(assign=True) comes here.
            for owner, place in _places(slot):
                if owner._parameters.get(place) is param:
                    owner._parameters[place] = new
        slot.follow_dtype(new.dtype)
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"cannot assign {type(value).__name__} to the sharded parameter '{slot.fqn}'; assign a tensor of shape "
            f"{slot.full_shape} or None"
        )
    if isinstance(value, DTensor) or not fits or param is None:
        raise ValueError(
            f"cannot assign a {'DTensor' if isinstance(value, DTensor) else 'tensor'} of shape {tuple(value.shape)} to "
            f"the sharded parameter '{slot.fqn}' of shape {slot.full_shape}, placements {slot.placements}: replace "
            "parameters before simple_fsdp, or assign a plain tensor of the same shape (the same on every rank), whose "
            "shards are copied"
        )
    others = [place for place in _places(slot) if place != (module, name)]
    if others:
        raise ValueError(
            f"cannot assign a tensor to the sharded parameter '{slot.fqn}', which {len(others) + 1} modules share: it "
            "would change all of them. Untie them before simple_fsdp, or write to the one parameter, for example by "
            f"{type(module).__name__}.{name}.copy_(...) under torch.no_grad() with a DTensor, or load_state_dict"
        )
    with torch.no_grad():
        if isinstance(param, DTensor):
            _compat.local_tensor(param).copy_(_compat.local_tensor(slot.shard_full(value)))
        else:  # inside full_parameters, which takes the values from there
            param.copy_(value)
    if isinstance(value, nn.Parameter):
        param.requires_grad_(value.requires_grad)


def _places(slot: Slot) -> list[tuple[nn.Module, str]]:
    """The modules, and names there, that a slot is registered under: several for tied parameters."""
    return [(owner, name) for owner, name, other in slots_of(slot.wrap.root) if other is slot]


def _expect_additions(module: ShardedModule) -> None:
    if STATE in module.__dict__:  # not yet while it is unpickled
        module.__dict__[STATE].wrap.complete = False


def _check_convertible(wrap: WrapState) -> None:
    if not wrap.accumulating:
        return
    waiting = _waiting(wrap)
    if waiting or wrap.sync is not GradientSync.FULL:
        what = f"the gradient of '{waiting[0]}' waits" if waiting else "gradients are about to wait"
        raise RuntimeError(
            f"the model cannot be converted (to(), bfloat16(), cpu(), ...) while {what} for its reduction: convert it "
            "after the last micro-batch's backward, outside of no_sync"
        )
    wrap.accumulating = False


def _waiting(wrap: WrapState) -> list[str]:
    """Names of the parameters whose gradient waits for its reduction."""
    return [slot.fqn for slot in wrap.slots if slot.waits]


def _cast_inputs(
    wrap: WrapState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    policy = wrap.mp_policy
    if not policy.cast_forward_inputs or policy.param_dtype is None:
        return args, kwargs
    cast: tuple[tuple[Any, ...], dict[str, Any]] = _cast_floating((args, kwargs), policy.param_dtype)
    return cast


def _cast_output(wrap: WrapState, out: Any) -> Any:
    dtype = wrap.mp_policy.output_dtype
    return out if dtype is None else _cast_floating(out, dtype)


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
