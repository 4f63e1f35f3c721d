"""`simple_fsdp` and the few functions a user calls after it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pathlib
import types
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import inductor_passes
from inductor_passes.config import PassConfig
from inductor_passes.setups import source_hash

from . import _compat
from .alike import check_alike
from .mesh import DataParallelMesh, make_mesh
from .optimizer import find_slot, mark_sharded, watch_optimizers
from .parametrize import add_forward_method, install, is_wrapped, module_state, wrapped_class
from .placement import ShardPlacementFn, make_spec
from .policy import check_mp_policy
from .slots import ModuleState, Slot, WrapState
from .state import shard_incoming_state
from .unshard import unshard_in_graph

__all__ = ["register_forward_method", "simple_fsdp"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def simple_fsdp(
    module: ModuleT,
    mesh: DeviceMesh | None = None,
    *,
    sharding_factor: int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    shard_placement_fn: ShardPlacementFn | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    passes: PassConfig | None = None,
) -> ModuleT:
    """Shard the parameters of `module` over data-parallel ranks, in place; then compile it with `torch.compile`.

    Parameters become sharded DTensors under their names, with the mean of the gradients over data-parallel ranks in
    `.grad`. Inside a forward, reading one gives the whole tensor in the compute dtype. Submodules that an earlier call
    has wrapped keep their own policy and mesh. SimpleFSDP, arXiv 2411.00284, section 3.

    Args:
        module: any module, on any device, the meta device included. Shards move to the mesh's device.
        mesh: 1-D (sharded over it) or 2-D (replicate, shard); None makes one of the default process group.
        sharding_factor: ranks that share one copy of the parameters: 1 replicates (DDP), all shards fully (FSDP),
            anything between is hybrid (HSDP). None shards over all of the mesh's shard dim.
        mp_policy: dtypes of compute and of gradient reduction, with FSDP2's meanings. Buffers are left alone.
        reshard_after_forward: free gathered parameters after forward and gather them again in backward.
        shard_placement_fn: from a parameter to `Shard(dim)`, or None for dim 0; uneven dims are padded.
        ignored_params: parameters to leave as they are; their gradients are not reduced.
        passes: what the TorchInductor passes do with the compiled graph.

    Returns:
        `module` itself.

    Raises:
        TypeError, ValueError, RuntimeError: an argument, parameter or module that cannot be used, by name. The module
            is unchanged then.
    """
    policy = MixedPrecisionPolicy() if mp_policy is None else check_mp_policy(mp_policy)
    passes = PassConfig() if passes is None else passes
    _check_arguments(module, reshard_after_forward, passes)
    _check_inner_wraps(module)
    dp = make_mesh(mesh, sharding_factor)
    ignored = _ids_of(ignored_params)
    wrap = WrapState(dp, policy, module)
    wrap.ignored = {
        name: param for name, param in module.named_parameters(remove_duplicate=False) if id(param) in ignored
    }

    # First decide and allocate everything, then change the module: a failure leaves it as it was.
    slots: dict[int, tuple[nn.Parameter, nn.Parameter, Slot]] = {}
    plans: list[tuple[nn.Module, ModuleState, dict[str, nn.Parameter]]] = []
    for prefix, owner in module.named_modules():
        names = _parameters_to_shard(owner, prefix, ignored)
        if is_wrapped(owner) or (not names and owner is not module):
            continue
        _check_module(owner, prefix, names)
        for name, fqn in names.items():
            param = owner._parameters[name]
            assert param is not None
            if id(param) in slots:
                continue
            spec, stored_mesh, placements = make_spec(
                fqn, param, dp, policy, reshard_after_forward, shard_placement_fn
            )
            slot = Slot(spec, stored_mesh, placements, dp.shard_rank, owner, fqn, wrap)
            sharded = nn.Parameter(slot.shard_full(param, _device(dp)), requires_grad=param.requires_grad)
            slots[id(param)] = (param, sharded, slot)
        mine = {name: slots[id(owner._parameters[name])] for name in names}
        state = ModuleState(
            {name: slot for name, (_, _, slot) in mine.items()}, wrap, is_root=owner is module
        )
        wrapped_class(type(owner), tuple(state.slots))
        plans.append((owner, state, {name: sharded for name, (_, sharded, _) in mine.items()}))
    _check_no_shared_memory(module, slots)
    _check_no_stale_references(module, slots)

    if dp.mesh.device_type == "cpu":
        _compat.replace_cpu_gather()
    check_alike([(slot.fqn, original) for original, _, slot in slots.values()], dp.mesh)
    # What torch compiled of a call in its graphs may serve other processes until the sources here change.
    _compat.mark_cacheable(unshard_in_graph, source_hash(pathlib.Path(__file__).parent, "*.py"))
    wrap.passes_key = inductor_passes.install(passes, [dp.mesh.get_group(dim) for dim in range(dp.mesh.ndim)])
    wrap.context = f"passes {wrap.passes_key}, position {dp.position_outside}"
    wrap.slots = tuple(slot for _, _, slot in slots.values())
    for original, sharded, slot in slots.values():
        mark_sharded(original, sharded, slot)
    for owner, state, parameters in plans:
        install(owner, state, parameters)
        owner.register_load_state_dict_pre_hook(shard_incoming_state)
    _move_buffers(module, _device(dp))
    watch_optimizers()
    return module


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make a method other than `forward` a place where parameters read as whole tensors, for example `model.encode`.

    Submodules called from it need nothing; this is for methods that read parameters of `module` themselves. On the root
    of the `simple_fsdp` call, inputs and outputs are cast as those of `forward` are, except where forward calls the
    method or `torch.compile` traces it. Copies of the module (`deepcopy`, pickling) know the method too.

    Args:
        module: a wrapped module.
        name: a method of its class, called on an instance.

    Raises:
        AttributeError: the class of `module` has nothing of that name.
        TypeError: it is no method of instances, or the instance has an attribute that hides it.
        ValueError: `module` is not wrapped.
    """
    if not is_wrapped(module):
        raise ValueError(f"register_forward_method: {type(module).__name__} is not wrapped by simple_fsdp")
    found = inspect.getattr_static(type(module), name)
    if name in vars(module) or not callable(found) or isinstance(found, staticmethod | classmethod | type):
        raise TypeError(
            f"register_forward_method: '{name}' of {type(module).__name__} is not a method that its class defines for "
            "instances"
        )
    add_forward_method(module, name)


def _check_arguments(module: object, reshard_after_forward: object, passes: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"simple_fsdp takes a torch.nn.Module, got {type(module).__name__}")
    if _compat.is_compiled_module(module):
        raise ValueError("simple_fsdp must come before torch.compile: wrap the model first, then compile it")
    for inner in module.modules():
        if isinstance(inner, DistributedDataParallel | FSDPModule):
            raise ValueError(
                f"the model holds a {type(inner).__name__}, which synchronises gradients itself; pass the model "
                "without DistributedDataParallel or fully_shard around it"
            )
    if is_wrapped(module):
        raise ValueError(
            f"this {type(module).__name__} is wrapped by simple_fsdp already; a module can be wrapped once (its "
            "submodules may be wrapped before it, with policies of their own)"
        )
    if not isinstance(reshard_after_forward, bool):
        raise TypeError(
            f"reshard_after_forward must be True or False, got {reshard_after_forward!r}; resharding to part of the "
            "ranks (FSDP2's int) is not supported, use sharding_factor for hybrid sharding"
        )
    if not isinstance(passes, PassConfig):
        raise TypeError(f"passes must be an inductor_passes.PassConfig, got {type(passes).__name__}")


def _check_inner_wraps(module: nn.Module) -> None:
    """Refuse a part of a wrapped model: its parameters follow the policy of the whole."""
    inside = [m for m in module.modules() if is_wrapped(m)]
    roots = {id(module_state(m).wrap) for m in inside if module_state(m).is_root}
    for inner in inside:
        if id(module_state(inner).wrap) not in roots:
            raise ValueError(
                f"this {type(module).__name__} is part of a model that simple_fsdp has wrapped already (its "
                f"{type(inner).__name__} belongs to that call); wrap inner modules before outer ones"
            )


def _ids_of(params: Iterable[nn.Parameter] | None) -> frozenset[int]:
    ids = []
    for param in params or ():
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"ignored_params must hold parameters, got {type(param).__name__}")
        ids.append(id(param))
    return frozenset(ids)


def _parameters_to_shard(owner: nn.Module, prefix: str, ignored: frozenset[int]) -> dict[str, str]:
    """Attribute name to FQN of the parameters that `owner` holds itself."""
    return {
        name: f"{prefix}.{name}" if prefix else name
        for name, param in owner._parameters.items()
        if param is not None and id(param) not in ignored
    }


def _check_module(owner: nn.Module, prefix: str, names: dict[str, str]) -> None:
    where = f"module '{prefix}'" if prefix else "the module"
    if isinstance(owner, torch.jit.ScriptModule):
        raise TypeError(
            f"{where} is a torch.jit.ScriptModule, whose parameters cannot be sharded; pass the nn.Module"
        )
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.max_norm is not None and "weight" in names:
        raise ValueError(
            f"parameter '{names['weight']}': an {type(owner).__name__} with max_norm={owner.max_norm} changes its "
            "weight in forward, which would not reach the shards; use max_norm=None or list the parameter in "
            "ignored_params"
        )
    for name, fqn in names.items():
        param = owner._parameters[name]
        assert param is not None
        slot = find_slot(param)
        if slot is not None:
            raise ValueError(
                f"parameter '{fqn}' is tied to '{slot.fqn}', which an earlier simple_fsdp call has sharded: wrap both "
                "modules in one call"
            )
        if param.grad is not None:
            raise ValueError(f"parameter '{fqn}' has a gradient: call zero_grad() before simple_fsdp")
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter '{fqn}' has gradient hooks: register them after simple_fsdp, on the new one"
            )
        for kind in type(owner).__mro__:
            if isinstance(kind.__dict__.get(name), property):
                raise TypeError(
                    f"parameter '{fqn}': {kind.__name__} defines a property of that name, which sharding would hide; "
                    "rename one of them or list the parameter in ignored_params"
                )


def _check_no_shared_memory(
    module: nn.Module, slots: dict[int, tuple[nn.Parameter, nn.Parameter, Slot]]
) -> None:
    """Refuse parameters that share elements without being one object: their shards would go apart.

    Disjoint parts of one buffer are fine, each is copied into its own shard.
    """
    by_storage: dict[int, dict[int, tuple[str, torch.Tensor]]] = {}
    for name, param in module.named_parameters():
        if param.layout == torch.strided and not nn.parameter.is_lazy(param) and param.numel() > 0:
            by_storage.setdefault(_compat.storage_id(param), {})[id(param)] = name, param
    for members in by_storage.values():
        if len(members) > 1 and any(key in slots for key in members):
            _check_disjoint(list(members.values()))


def _check_disjoint(members: list[tuple[str, torch.Tensor]]) -> None:
    placed = [(name, _compat.local_tensor(p) if isinstance(p, DTensor) else p) for name, p in members]
    placed.sort(key=lambda named: _extent_bytes(named[1]))
    reaching: list[tuple[str, torch.Tensor]] = []  # those whose memory reaches beyond the next one's start
    for name, tensor in placed:
        start, _ = _extent_bytes(tensor)
        reaching = [(n, t) for n, t in reaching if _extent_bytes(t)[1] > start]
        for other_name, other in reaching:
            if _share_elements(tensor, other):
                raise ValueError(
                    f"parameters '{other_name}' and '{name}' are different objects that share memory: a step of one "
                    "changes the other, which would not reach its shards. Make them one parameter (assign the same "
                    "object to both modules), or give one of them memory of its own (nn.Parameter(x.data.clone()))"
                )
        reaching.append((name, tensor))


def _extent_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte in the storage and the byte behind the last one."""
    first = int(tensor.storage_offset())
    last = first + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors on one storage, whose extents overlap, have a byte in common."""
    extents = _extent_bytes(a), _extent_bytes(b)
    if all(end - start == t.numel() * t.itemsize for t, (start, end) in zip((a, b), extents, strict=True)):
        return True
    # Interleaved, as two columns of a matrix are: mark the bytes of one, look at those of the other.
    base = min(start for start, _ in extents)
    bytes_ = torch.zeros(max(end for _, end in extents) - base, dtype=torch.bool)

    def seen_by(t: torch.Tensor) -> torch.Tensor:
        sizes = [1 if stride == 0 else size for size, stride in zip(t.shape, t.stride(), strict=True)]
        strides = [stride * t.itemsize for stride in t.stride()]
        return bytes_.as_strided((*sizes, t.itemsize), (*strides, 1), _extent_bytes(t)[0] - base)

    seen_by(a).fill_(True)
    return bool(seen_by(b).any())


def _check_no_stale_references(
    module: nn.Module, slots: dict[int, tuple[nn.Parameter, nn.Parameter, Slot]]
) -> None:
    """Refuse modules that keep a parameter in a second place, where it would stay unsharded and untrained."""
    stored = {_compat.storage_id(param): slot.fqn for param, _, slot in slots.values()}
    for prefix, owner in module.named_modules():
        for attribute, value in (*vars(owner).items(), *owner._buffers.items()):
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            if attribute == "_flat_weights" and isinstance(owner, nn.RNNBase):
                continue  # `install` replaces it
            for item in _tensors_in(value):
                fqn = stored.get(_compat.storage_id(item))
                if fqn is not None:
                    where = f"{prefix}.{attribute}" if prefix else attribute
                    raise ValueError(
                        f"attribute '{where}' holds memory of parameter '{fqn}' outside of the module's parameters; "
                        "sharding would leave the unsharded original there. Use nn.ParameterList or nn.ParameterDict, "
                        "read the parameter by its name, or list it in ignored_params"
                    )


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Tensors in a value, its containers, and what the functions in it have bound."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        for item in _compat.tree_leaves(waiting.pop()):
            if isinstance(item, torch.Tensor):
                yield item
            elif id(item) not in seen:
                seen.add(id(item))
                waiting += _bound_in(item)


def _bound_in(item: object) -> list[object]:
    if isinstance(item, set | frozenset):
        return [list(item)]
    if isinstance(item, functools.partial):
        return [item.func, item.args, item.keywords]
    if not isinstance(item, types.FunctionType):
        return []
    cells = []
    for cell in item.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable without a value yet
            cells.append(cell.cell_contents)
    return [*cells, item.__defaults__, item.__kwdefaults__]


def _device(dp: DataParallelMesh) -> torch.device:
    if dp.mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(dp.mesh.device_type, torch.get_device_module(dp.mesh.device_type).current_device())


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta and not isinstance(buffer, DTensor):
                owner._buffers[name] = buffer.to(device)
