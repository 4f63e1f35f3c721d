"""Freeing gathered parameters between forward and backward in eager mode.

Autograd saves the gathered weight of every linear layer until backward, which would keep the whole unsharded model in
memory. Saved-tensor hooks replace it, when it is saved, by a recipe (shard, spec, view); when backward asks for it, the
recipe gathers it again. Under torch.compile the same is done on the joint graph, by `inductor_passes`.

Knows nothing about modules: `parametrize` tells it which tensors are gathered parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import _compat
from .placement import ShardSpec
from .unshard import gather

__all__ = ["forward_scope", "in_forward", "track"]


class _Recipe:
    """How to make one gathered parameter again."""

    def __init__(self, param: DTensor, spec: ShardSpec) -> None:
        self.param, self.shard, self.spec = param, _compat.local_tensor(param), spec
        self.version = _compat.version(param)

    def make(self) -> torch.Tensor:
        if _compat.version(self.param) != self.version:
            raise RuntimeError(
                f"parameter '{self.spec.name}' of shape {self.spec.shape} was changed in place between forward and "
                "backward, so its gradient would be wrong; step the optimizer after backward, or pass "
                "reshard_after_forward=False to keep the forward's values"
            )
        with torch.no_grad():
            return gather(self.shard, self.spec)


@dataclasses.dataclass(frozen=True)
class _View:
    """A tensor that is a strided view of a gathered parameter."""

    recipe: _Recipe
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool

    def make(self) -> torch.Tensor:
        view = self.recipe.make().as_strided(self.size, self.stride, self.offset)
        return view.conj() if self.conjugated else view


@dataclasses.dataclass(frozen=True)
class _DTensorView:
    """The same, wrapped as a tensor-parallel DTensor."""

    local: _View
    like: Any  # (mesh, placements, shape, stride)

    def make(self) -> torch.Tensor:
        mesh, placements, shape, stride = self.like
        return DTensor.from_local(
            self.local.make(), mesh, placements, run_check=False, shape=shape, stride=stride
        )


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """What `track` noted about one gathered parameter: its storage, its version then, how to make it again."""

    storage: StorageWeakRef
    version: int
    recipe: _Recipe


class _Forward:
    """The gathered parameters that are alive in one forward, by storage.

    The weak reference keeps the storage object's address from being used again, so a hit is always the same storage.
    """

    def __init__(self) -> None:
        self._recipes: dict[int, _Gathered] = {}
        self._sweep_at = 64

    def track(self, full: torch.Tensor, recipe: _Recipe) -> None:
        if len(self._recipes) >= self._sweep_at:
            self._recipes = {k: v for k, v in self._recipes.items() if not v.storage.expired()}
            self._sweep_at = 2 * len(self._recipes) + 64
        storage = full.untyped_storage()
        self._recipes[storage._cdata] = _Gathered(StorageWeakRef(storage), _compat.write_count(full), recipe)

    def pack(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, DTensor):
            local = self._find(_compat.local_tensor(tensor))
            if local is None:
                return tensor
            return _DTensorView(local, (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()))
        return self._find(tensor) or tensor

    def _find(self, tensor: torch.Tensor) -> _View | None:
        if tensor.layout != torch.strided or not _has_storage(tensor):
            return None
        entry = self._recipes.get(tensor.untyped_storage()._cdata)
        if entry is None or tensor.dtype != entry.recipe.spec.compute_dtype:
            return None
        # Changed since it was gathered, or a lazily negated view: gathering again would give other values.
        if _compat.write_count(tensor) != entry.version or tensor.is_neg():
            return None
        return _View(
            entry.recipe,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
        )


def _has_storage(tensor: torch.Tensor) -> bool:
    return not _compat.is_traceable_wrapper_subclass(tensor)


def _unpack(packed: Any) -> torch.Tensor:
    return packed.make() if isinstance(packed, _View | _DTensorView) else packed


@functools.cache
def _hooks() -> tuple[Callable[[_Forward, torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Pack and unpack, out of Dynamo's sight.

    A layer of torch.nn that is compiled by itself runs eagerly (torch skips its own files, 2.11 to 2.14): the hooks
    would be the first frames that Dynamo compiles, and cannot.
    """
    return torch.compiler.disable(_Forward.pack), torch.compiler.disable(_unpack)


_current: ContextVar[_Forward | None] = ContextVar("simplefsdp_forward", default=None)


def in_forward() -> bool:
    """Whether the forward of a wrapped module runs in this thread, or a part of one is being recomputed."""
    return _current.get() is not None or _compat.running_backward() is not None


def track(full: torch.Tensor, param: DTensor, spec: ShardSpec) -> None:
    """Have `full`, just gathered from `param`, freed after forward and gathered again for backward."""
    forward = _current.get()
    if forward is None or not _has_storage(full):
        return
    if _compat.storage_id(full) != _compat.storage_id(param):
        forward.track(full, _Recipe(param, spec))


@contextlib.contextmanager
def forward_scope() -> Iterator[None]:
    """Mark this thread as inside a forward; the outermost scope installs the saved-tensor hooks."""
    # Inside a backward, activation checkpointing recomputes a region under hooks of its own: hooks nested inside them
    # would keep the recomputed tensors from it.
    if _current.get() is not None or _compat.running_backward() is not None:
        yield
        return
    forward = _Forward()
    token = _current.set(forward)
    pack, unpack = _hooks()
    try:
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(pack, forward), unpack):
            yield
    finally:
        _current.reset(token)
