"""Splitting a training state into tensors and plain values with a marker for each tensor, and joining it.

Owns: walking nested containers, and finding or making the tensors that saved ones are read into. Must not
know: files, ranks, what the sections of a state mean beyond "model" holding tensors by name.

A marker is a dict of plain values: {"__tensor__": True, "like": name or None, "sharded": bool},
where "like" names the tensor of state["model"] that this one has the shape and sharding of.
A path is the tuple of dict keys and list positions, as text, that leads to a tensor.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from simplefsdp.llama.agreement import AgreedError

StatePath = tuple[str, ...]

_TENSOR = "__tensor__"


class StateMismatchError(AgreedError):
    """Saved state and the model or optimizer at hand do not fit; the message names the first difference."""


def check_same_names(what: str, saved: Iterable[str], present: Iterable[str]) -> None:
    """Check that two sets of names are equal.

    Raises:
        StateMismatchError: names the first difference.
    """
    saved, present = set(saved), set(present)
    for names, reason in ((present - saved, "is not in the saved state"), (saved - present, "is only there")):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise StateMismatchError(f"{what}: {min(names)!r}{others} {reason}")


def collect_tensors(state: dict[str, Any]) -> dict[StatePath, Tensor]:
    """Return every tensor in nested dicts, lists and tuples, by path."""
    return {path: leaf for path, leaf in _leaves(state) if isinstance(leaf, Tensor)}


def mark_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state with a marker in place of each tensor."""
    model = state.get("model", {})

    def mark(path: StatePath, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return {_TENSOR: True, "like": _find_twin(model, path, leaf), "sharded": isinstance(leaf, DTensor)}

    return {name: _replaced(section, mark, (name,)) for name, section in state.items()}


def fill_markers(section: Any, tensors: dict[StatePath, Tensor], path: StatePath) -> Any:
    """Copy the part of a marked state at `path` with the tensors in place of the markers."""
    return _replaced(section, lambda at, leaf: tensors[at] if _is_marker(leaf) else leaf, path)


def find_targets(state: dict[str, Any], markers: dict[str, Any], saved: Metadata) -> dict[StatePath, Tensor]:
    """Find in a state, or make, the tensor that each saved tensor of its sections is to be read into.

    Args:
        state: the sections to load, with tensors to read into where they exist.
        markers: the whole saved state, marked.
        saved: shapes and dtypes of the saved tensors, under their paths joined with dots.

    Returns:
        Path -> tensor: the one in `state` if it fits; else, outside of "model", a new one, sharded as the
        parameter it belongs to.

    Raises:
        StateMismatchError: a section, a name, a shape or a dtype differs; names it.
    """
    for name in state:
        if name not in markers:
            raise StateMismatchError(f"the checkpoint has no section {name!r}; it has {sorted(markers)}")
    model = state.get("model", {})
    if "model" in state:
        check_same_names("model", markers["model"], model)
    existing = collect_tensors(state)
    targets = {}
    for path, marker in _leaves({name: markers[name] for name in state}):
        if not _is_marker(marker):
            continue
        key = ".".join(path)
        entry = saved.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)  # only tensors were given to DCP
        shape, dtype = entry.size, entry.properties.dtype
        found, twin = existing.get(path), model.get(marker["like"])
        if found is not None and found.shape == shape and found.dtype == dtype:
            targets[path] = found
        elif path[0] == "model":
            there = "no tensor" if found is None else f"{tuple(found.shape)}, {found.dtype}"
            raise StateMismatchError(
                f"{key}: {tuple(shape)}, {dtype} in the checkpoint, {there} in the model"
            )
        elif twin is not None and twin.shape == shape:
            targets[path] = torch.empty_like(twin, dtype=dtype)
        elif marker["sharded"]:
            raise StateMismatchError(
                f"{key}: {tuple(shape)} and sharded in the checkpoint, but not as its parameter is: pass a "
                "state that has this tensor, from an optimizer that has made a step"
            )
        else:
            targets[path] = torch.empty(shape, dtype=dtype)
    return targets


def nest(tensors: dict[StatePath, Tensor]) -> dict[str, Any]:
    """Arrange tensors in nested dicts by path, the form in which DCP and its tools expect them."""
    root: dict[str, Any] = {}
    for path, tensor in tensors.items():
        inner = root
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = tensor
    return root


def local_values(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing memory with it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def pack(what: str, value: Any) -> bytes:
    """Serialise plain values and tensors, and make sure now that they can be read again.

    Raises:
        AgreedError: there is another kind of object, which could not be loaded without trusting the file.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        line = str(error).strip().splitlines()[0]
        raise StateMismatchError(
            f"{what} may hold tensors and values of builtin types only: {line}"
        ) from error
    return buffer.getvalue()


def unpack(path: Path) -> Any:
    """Read a file of `pack`'s bytes."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _find_twin(model: dict[str, Any], path: StatePath, tensor: Tensor) -> str | None:
    """Name the model's tensor that is named on the path and has the same shape and kind."""
    # torch.optim keeps "step" as a plain scalar tensor: no twin of a 0-dim parameter either.
    if path[-1] == "step":
        return None
    for name in path[1:]:
        twin = model.get(name)
        if not isinstance(twin, Tensor) or isinstance(twin, DTensor) != isinstance(tensor, DTensor):
            continue
        if twin.shape == tensor.shape:
            return name
    return None


def _is_marker(value: Any) -> bool:
    return isinstance(value, dict) and _TENSOR in value


def _leaves(value: Any, path: StatePath = ()) -> list[tuple[StatePath, Any]]:
    found: list[tuple[StatePath, Any]] = []
    _replaced(value, lambda at, leaf: found.append((at, leaf)), path)
    return found


def _replaced(value: Any, change: Callable[[StatePath, Any], Any], path: StatePath) -> Any:
    """Copy nested containers with every leaf (markers included) replaced by `change(path, leaf)`."""
    if isinstance(value, dict) and not _is_marker(value):
        return {key: _replaced(item, change, (*path, str(key))) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, change, (*path, str(i))) for i, item in enumerate(value))
    return change(path, value)
