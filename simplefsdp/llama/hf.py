"""Weights from and to Hugging Face directories (safetensors), one parameter at a time.

Owns: file layout, names, which bytes a rank reads and who writes. Must not know: how the model was sharded;
parameters are plain tensors or DTensors, and ``shards.py`` says which part is here.

    load_hf   file -- read own slice --> shard                              no communication
    save_hf   shards -- gather one parameter --> rank 0 -- a file full --> DIR/.incoming -- all done --> DIR

The modules of ``model.py`` carry Hugging Face's names below ``model.`` and need no permutation.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp.llama.config import LlamaConfig
from simplefsdp.llama.hf_config import CONFIG_FILE, config_from_hf, config_to_hf
from simplefsdp.llama.shards import copy_full_, local_slices, local_tensor
from simplefsdp.llama.sources import import_optional

__all__ = ["config_from_hf", "load_hf", "save_hf"]

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Default size of one weight file in bytes, as on the released Llama 3.1 repositories (4.9 GB files)."""

_WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_INCOMING = ".incoming"
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_NAMES_SHOWN = 5


def load_hf(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Fill a Llama with the weights of a Hugging Face directory; every rank reads only what it keeps.

    All names and shapes are checked before the first weight is written. Values are converted to the
    parameters' dtype. There is no communication: each rank needs to see the directory.

    Args:
        model: a :class:`Llama`, wrapped by ``simple_fsdp`` and compiled or not; materialised (not on the
            meta device).
        directory: holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files it lists.

    Raises:
        FileNotFoundError: if there are no weights, or a listed file is absent.
        ValueError: if tensors are missing, unknown or of another shape, or the model is on the meta device;
            the message names them.
    """
    config, parameters = _describe(model)
    for name, param in parameters.items():
        if param.is_meta:
            raise ValueError(f"{name} is on the meta device; call model.to_empty(device=...) before load_hf")
    with _open_weights(Path(directory)) as weights:
        _check_names(parameters, weights, config.tied_head)
        _check_shapes(parameters, weights)
        # In file order, so that reading runs forward through each file.
        for name in sorted(parameters, key=lambda name: weights[_hf_name(name)].position):
            _read_into(parameters[name], weights[_hf_name(name)])
        if config.tied_head and _HEAD in weights:
            _check_tied_copy(parameters[_EMBEDDING], weights[_HEAD])


def save_hf(
    model: nn.Module,
    directory: str | os.PathLike[str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a Llama as a directory that ``AutoModelForCausalLM.from_pretrained`` loads; every rank calls it.

    Parameters are gathered one at a time and rank 0 writes, holding at most ``max_shard_bytes`` and one
    parameter. Weights already in ``directory`` are replaced, once the new ones are complete; other files
    stay.

    Args:
        model: a :class:`Llama`, wrapped by ``simple_fsdp`` and compiled or not.
        directory: made if it does not exist.
        max_shard_bytes: most bytes of tensors in one file; a larger tensor gets a file of its own.
        dtype: of the written tensors; ``None`` keeps the parameters' (the storage dtype of a sharded model).

    Raises:
        ValueError: if ``max_shard_bytes`` is not positive.
        OSError: on every rank, if rank 0 could not write.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    config, parameters = _describe(model)
    save_file = import_optional("safetensors.torch", "exporting to Hugging Face's format").save_file
    written_dtypes = {name: dtype or param.dtype for name, param in parameters.items()}
    sizes = {name: param.numel() * written_dtypes[name].itemsize for name, param in parameters.items()}
    files = plan_files(sizes, max_shard_bytes)
    export = _Export(Path(directory), writes=not dist.is_initialized() or dist.get_rank() == 0)

    export.attempt(export.begin)
    for file, names in files.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            full = _gather(parameters[name])
            if export.is_writing:
                tensors[_hf_name(name)] = full.to(device="cpu", dtype=written_dtypes[name]).contiguous()
            del full
        export.attempt(save_file, tensors, export.incoming / file, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {_hf_name(name): file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        export.attempt(_write_json, export.incoming / INDEX_FILE, index)
    config_json = config_to_hf(config, str(written_dtypes[_EMBEDDING]).removeprefix("torch."))
    export.attempt(_write_json, export.incoming / CONFIG_FILE, config_json)
    export.attempt(export.publish)
    export.agree()


def plan_files(sizes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """Distribute parameters over weight files, in order.

    Args:
        sizes: bytes by parameter name.
        max_shard_bytes: most bytes in one file, unless a single parameter is larger.

    Returns:
        Parameter names by file name, which follow Hugging Face's scheme.
    """
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)
    }


@dataclass(frozen=True)
class _StoredTensor:
    """One tensor in a file, not read yet.

    Attributes:
        name: Hugging Face's.
        position: file and tensor in the order of reading.
        handle: the open safetensors file.
    """

    name: str
    position: tuple[str, str]
    handle: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(self.name).get_shape())

    def read(self, slices: tuple[slice, ...] | None) -> Tensor:
        """The part that ``slices`` names, or everything for ``None``; no other byte is read."""
        if slices is None:
            slices = tuple(slice(0, size) for size in self.shape)
        part: Tensor = self.handle.get_slice(self.name)[slices]
        return part


@contextlib.contextmanager
def _open_weights(directory: Path) -> Iterator[dict[str, _StoredTensor]]:
    """Every tensor of a directory by name; the files stay open (memory-mapped) inside the context."""
    safe_open = import_optional("safetensors", "loading Hugging Face weights").safe_open
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            listed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index} is not an index of safetensors files, with a 'weight_map'") from None
    elif (directory / WEIGHTS_FILE).is_file():
        listed = [WEIGHTS_FILE]
    else:
        raise FileNotFoundError(f"{directory} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    weights: dict[str, _StoredTensor] = {}
    with contextlib.ExitStack() as stack:
        for file in listed:
            path = directory / file
            if not path.is_file():
                raise FileNotFoundError(f"{index} lists {file}, which does not exist")
            try:
                handle = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except Exception as error:  # the library's own error class, or OSError
                raise ValueError(f"{path} cannot be read: {error}") from None
            for name in handle.keys():  # noqa: SIM118, not a mapping
                weights[name] = _StoredTensor(name, (file, name), handle)
        yield weights


def _check_names(parameters: Mapping[str, Tensor], weights: Mapping[str, Any], tied_head: bool) -> None:
    expected = {_hf_name(name) for name in parameters}
    missing = sorted(expected - weights.keys())
    if missing:
        hint = ""
        if missing == [_HEAD]:
            hint = "; the checkpoint ties its head to the embedding: use LlamaConfig(tied_head=True)"
        raise ValueError(f"the checkpoint lacks {_some(missing)}{hint}")
    # Old exports stored the rotary frequencies; a tied head may be stored as well.
    extra = sorted(
        name
        for name in weights.keys() - expected
        if not name.endswith("rotary_emb.inv_freq") and not (tied_head and name == _HEAD)
    )
    if extra:
        raise ValueError(f"the checkpoint holds tensors that the model does not have: {_some(extra)}")


def _check_shapes(parameters: Mapping[str, Tensor], weights: Mapping[str, _StoredTensor]) -> None:
    wrong = [
        f"{_hf_name(name)} (file {stored}, model {tuple(param.shape)})"
        for name, param in parameters.items()
        if (stored := weights[_hf_name(name)].shape) != tuple(param.shape)
    ]
    if wrong:
        raise ValueError(f"shapes differ between checkpoint and model: {_some(wrong)}")


@torch.no_grad()
def _read_into(param: Tensor, stored: _StoredTensor) -> None:
    slices = local_slices(param)
    if slices is None:
        copy_full_(param, stored.read(None).to(param.device))
    elif local_tensor(param).numel() > 0:
        local_tensor(param).copy_(stored.read(slices))


def _check_tied_copy(embedding: Tensor, head: _StoredTensor) -> None:
    """A tied model has one matrix; a file that stores two different ones was not tied."""
    slices = local_slices(embedding)
    if slices is None or local_tensor(embedding).numel() == 0:
        return
    local = local_tensor(embedding)
    if not torch.equal(head.read(slices).to(local), local):
        raise ValueError(
            f"{_HEAD} and model.{_EMBEDDING} differ in the checkpoint, but the model ties them: "
            "use LlamaConfig(tied_head=False)"
        )


class _Export:
    """Rank 0's side of writing a directory; on other ranks, nothing happens.

    A failure does not stop rank 0 from taking part in the remaining gathers, which the other ranks wait
    for. It is kept, later attempts are skipped, and :meth:`agree` raises it everywhere.
    """

    def __init__(self, directory: Path, *, writes: bool) -> None:
        self.directory = directory
        self.incoming = directory / _INCOMING
        self._writes = writes
        self._error: Exception | None = None

    @property
    def is_writing(self) -> bool:
        return self._writes and self._error is None

    def attempt(self, action: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        if self.is_writing:
            try:
                action(*args, **kwargs)
            except Exception as error:  # whatever it is, the other ranks have to hear of it
                self._error = error

    def begin(self) -> None:
        shutil.rmtree(self.incoming, ignore_errors=True)
        self.incoming.mkdir(parents=True)

    def publish(self) -> None:
        for old in self.directory.iterdir():
            if _WEIGHT_FILES.fullmatch(old.name):
                old.unlink()
        for new in self.incoming.iterdir():
            new.replace(self.directory / new.name)
        self.incoming.rmdir()

    def agree(self) -> None:
        report = [None if self._error is None else f"cannot export to {self.directory}: {self._error}"]
        if dist.is_initialized():
            dist.broadcast_object_list(report, src=0)
        if report[0] is not None:
            raise OSError(report[0]) from self._error


def _describe(model: nn.Module) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Configuration and parameters by our name, the tied head left out."""
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    config = getattr(inner, "config", None)
    if not isinstance(config, LlamaConfig):
        raise TypeError(f"expected a Llama, got a {type(inner).__qualname__}")
    parameters: dict[str, Tensor] = dict(inner.named_parameters(remove_duplicate=False))
    if config.tied_head:
        del parameters[_HEAD]
    return config, parameters


def _hf_name(name: str) -> str:
    return name if name == _HEAD else f"model.{name}"


def _gather(param: Tensor) -> Tensor:
    with torch.no_grad():
        return param.full_tensor() if isinstance(param, DTensor) else param.detach()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
