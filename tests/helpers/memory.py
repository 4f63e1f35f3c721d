"""Live tensor bytes: how much storage the tensors of a program hold, now and at the peak.

Owns: following storages by weak references. Must not know: allocators; a storage counts as freed when its last
tensor dies or when it is resized to nothing. This makes the eager memory of two implementations comparable on
CPU, where torch keeps no statistics.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Mode that follows the storage of every tensor that an operator of the block reads or makes.

        with LiveBytes(model.parameters()) as live:
            model(x).sum().backward()
        print(live.peak_bytes)

    Wrapper tensors (DTensor, AsyncCollectiveTensor) count as the plain tensors inside them. Sizes are read
    anew at each operator, because FSDP2 frees and refills storages with `resize_`, which is no operator.

    Args:
        tensors: what is alive before the block and shall count from the start.

    Attributes:
        peak_bytes: the most bytes alive right after any operator of the block.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in tensors:
            self._follow(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        self.peak_bytes = self.current_bytes

    @property
    def current_bytes(self) -> int:
        """Bytes alive now."""
        alive = [reference() for reference in self._storages.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile runs its function uncompiled under this mode

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if any(is_traceable_wrapper_subclass(leaf) for leaf in leaves):
            return NotImplemented  # the wrapper runs first and calls operators on the tensors inside
        result = func(*args, **kwargs)
        for leaf in (*leaves, *tree_leaves(result)):
            if isinstance(leaf, torch.Tensor) and not is_traceable_wrapper_subclass(leaf):
                self._follow(leaf)
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        return result

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata

        def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._storages[key]

        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, forget)
