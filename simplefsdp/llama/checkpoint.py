"""Training checkpoints: asynchronous, atomic, resharding, checked before they are trusted.

Owns: the course of a save and of a load over all ranks, and which checkpoint is loaded. Must not know: what
the state means (train_state.py collects it), how files are named and replaced (checkpoint_files.py).

One checkpoint is a PyTorch Distributed Checkpoint (DCP) directory with three additions:

    .metadata, __<rank>_<n>.distcp   DCP's: every tensor, under its path such as "model.layers.0.weight"
    state.pt                         the state with a marker in place of each tensor; equal on all ranks
    rng-<rank>.pt                    state["rng"], one file per rank
    manifest.json                    sizes and digests of the files above; written last

[Note: threads and groups] A save copies the tensors to host memory on the caller's thread; everything else
runs on one background thread. Its collectives use a gloo group of this object's own: on the training group
they would interleave with those of the main thread, differently on each rank. `load` uses the same group, and
first waits for the background thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from simplefsdp.llama.agreement import AgreedError, Ranks, one_line
from simplefsdp.llama.checkpoint_files import (
    CheckpointError,
    CheckpointFiles,
    Manifest,
    record_of,
    write_synced,
)
from simplefsdp.llama.state_markers import (
    StateMismatchError,
    StatePath,
    collect_tensors,
    fill_markers,
    find_targets,
    local_values,
    mark_tensors,
    nest,
    pack,
    unpack,
)
from simplefsdp.llama.train_state import restore, restore_rng, rng_state, train_state

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "StateMismatchError",
    "restore",
    "restore_rng",
    "rng_state",
    "train_state",
]

_logger = logging.getLogger(__name__)

_STATE_FILE = "state.pt"
_DCP_METADATA_FILE = ".metadata"
_PER_RANK_SECTION = "rng"


class Checkpointer:
    """Saves and loads the state of a training run in one directory.

    Constructing, `save`, `wait`, `load` and `close` are collective: every rank of the group calls them in the
    same order. A context manager: leaving it waits for the save in flight.

    Args:
        directory: where checkpoints are kept; made if missing. All ranks must see the same directory, and only
            one run may use it at a time.
        keep_last: how many of the newest complete checkpoints survive the next save, at least 1.
        process_group: group with a CPU backend that nothing else communicates on while this object is in use;
            None makes a gloo group over all ranks.

    Attributes:
        last_saved_step: step of the last save that completed; None before the first.
        skipped: one line for each damaged checkpoint that the last `load` passed over.

    Raises:
        CheckpointError: no process group is initialised, or the directory cannot be written or is not shared.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        if not dist.is_initialized():
            raise CheckpointError(
                "checkpoints need torch.distributed.init_process_group, even with one process"
            )
        self._own_group = dist.new_group(backend="gloo") if process_group is None else None
        self._ranks = Ranks(process_group or self._own_group)
        self._files = CheckpointFiles(directory, hashed_in_quick_check=(_STATE_FILE, _DCP_METADATA_FILE))
        self._keep_last = keep_last
        self._job: _SaveJob | None = None
        self._pinned: dict[str, Tensor] = {}
        self.last_saved_step: int | None = None
        self.skipped: tuple[str, ...] = ()
        self._check_directory()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            _logger.error("%s", failure)  # the exception on its way matters more

    def save(self, step: int, state: dict[str, Any], *, blocking: bool = False) -> None:
        """Start writing a checkpoint; it replaces one of the same step.

        Returns when the tensors have been copied to host memory: training may change them from then on. Waits
        for the save before it, if that is still in flight.

        Args:
            step: training step, at least 0.
            state: section name -> nested dicts and lists. "model" and "optimizer" as from `train_state`.
                Values that are not tensors must be equal on all ranks and of builtin types. Only "rng" may
                differ between ranks. Plain (not DTensor) tensors are taken from one rank: they must be
                replicas.
            blocking: write without a copy of tensors in host memory, and return when it is complete.

        Raises:
            CheckpointError: the save before this one failed (this one is not started then), or, if
                `blocking`, this save failed. Names the step.
        """
        self.wait()
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        shared = _shared_sections(state)
        job = _SaveJob(step, collect_tensors(shared), mark_tensors(shared))
        try:
            job.state_file = pack("the state", job.markers)
            job.rng_file = pack(f"state[{_PER_RANK_SECTION!r}]", state.get(_PER_RANK_SECTION))
        except AgreedError as error:  # perhaps on this rank only: raised by `wait`, on all ranks
            job.error = error
        data = {".".join(path): local_values(tensor) for path, tensor in job.tensors.items()}
        job.data = self._on_host(data, copy=not blocking)
        # Not a daemon: a save that has begun is finished even if the main thread raises.
        job.thread = threading.Thread(target=self._run, args=(job,), name=f"checkpoint-{step}")
        self._job = job
        job.thread.start()
        if blocking:
            self.wait()

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            CheckpointError: it failed; names the step. A failure is raised once.
        """
        job, self._job = self._job, None
        if job is None or job.thread is None:
            return
        job.thread.join()
        if job.error is not None:
            raise CheckpointError(f"saving step {job.step} failed: {one_line(job.error)}") from job.error

    def close(self) -> None:
        """Wait for the save in flight and give up the group this object made.

        Raises:
            CheckpointError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._pinned.clear()
            if self._own_group is not None and dist.is_initialized():
                dist.destroy_process_group(self._own_group)
            self._own_group = None

    def latest_step(self) -> int | None:
        """Return the newest step whose files are all there with the right sizes, None if there is none.

        Reads the directory and does not communicate.
        """
        undamaged = (step for step in reversed(self._files.steps()) if self._files.find_damage(step) is None)
        return next(undamaged, None)

    def load(
        self, state: dict[str, Any], step: int | None = None, *, verify: Literal["full", "quick"] = "full"
    ) -> int | None:
        """Fill `state` from a checkpoint, written by any number of ranks and with any sharding.

        Tensors that `state` holds are written in place and keep their sharding. Optimizer tensors it lacks
        are made, sharded as their parameter in state["model"]. All other values are replaced. state["rng"]
        becomes None if the number of ranks differs from the one that saved: see `restore_rng`.

        Args:
            state: the sections to load; may leave out sections that the checkpoint has.
            step: which checkpoint; None for the newest undamaged one. Passing over a damaged one is logged as
                a warning on rank 0 and noted in `skipped`.
            verify: "full" reads every file once, shared out over the ranks, and compares digests: PyTorch itself
                notices no changed bit in a tensor. "quick" compares sizes, and digests of small files only.

        Returns:
            The step that was loaded; None, with `state` unchanged, if the directory has no checkpoint.

        Raises:
            CheckpointError: the step asked for is missing or damaged, or every checkpoint is damaged.
            StateMismatchError: names, shapes or dtypes of the state differ from those in the checkpoint.
        """
        if verify not in ("full", "quick"):
            raise ValueError(f"verify must be 'full' or 'quick', got {verify!r}")
        self.wait()
        self.skipped = ()
        steps = self._ranks.first(self._files.steps)
        if step is not None and step not in steps:
            raise CheckpointError(f"{self._files.root} has no step {step}; it has {steps or 'no checkpoint'}")
        for candidate in [step] if step is not None else reversed(steps):
            damage = self._load_or_find_damage(state, candidate, full=verify == "full")
            if damage is None:
                return candidate
            if step is not None:
                raise CheckpointError(f"checkpoint of step {step} is damaged: {damage}")
            self.skipped += (f"checkpoint of step {candidate} is damaged and passed over: {damage}",)
            if self._ranks.rank == 0:
                _logger.warning("%s", self.skipped[-1])
        if steps:
            raise CheckpointError(f"no undamaged checkpoint in {self._files.root}: {'; '.join(self.skipped)}")
        return None

    def _check_directory(self) -> None:
        probe = self._ranks.first(self._files.create)
        seen = self._ranks.gather((self._files.root / probe.name).exists())
        missing_on = [rank for rank, here in enumerate(seen) if not here]
        if self._ranks.rank == 0:
            probe.unlink()
        if missing_on:
            raise CheckpointError(
                f"{self._files.root} is not the same directory on all ranks: "
                f"what rank 0 writes there is missing on ranks {missing_on}; use a shared file system"
            )
        self._ranks.first(self._files.clean)

    def _on_host(self, tensors: dict[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
        """Return tensors in host memory; those that are there already only on request as copies.

        From a device they are copied into pinned buffers, which are kept for the next save.
        """
        on_host, any_on_device = {}, False
        for name, tensor in tensors.items():
            if tensor.device.type == "cpu":
                on_host[name] = tensor.clone() if copy else tensor
                continue
            any_on_device = True
            pinned = self._pinned.get(name)
            if pinned is None or pinned.shape != tensor.shape or pinned.dtype != tensor.dtype:
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._pinned[name] = on_host[name] = pinned
            pinned.copy_(tensor, non_blocking=True)
        if any_on_device:
            torch.accelerator.synchronize()
        return on_host

    def _run(self, job: _SaveJob) -> None:
        try:
            self._write(job)
        except BaseException as error:  # reported by wait(), on the caller's thread
            job.error = error
            if self._ranks.rank == 0:
                self._files.discard(job.step)
        finally:
            job.tensors, job.data = {}, {}

    def _write(self, job: _SaveJob) -> None:
        """Write one checkpoint. The files are safe on storage before the rename makes them a checkpoint."""
        ranks, files = self._ranks, self._files
        ranks.each(job.check)
        self._check_equal_on_all_ranks(job.markers)
        directory = ranks.first(lambda: files.begin(job.step))

        def write_own_files() -> None:
            write_synced(directory / _rng_file(ranks.rank), job.rng_file)
            if ranks.rank == 0:
                write_synced(directory / _STATE_FILE, job.state_file)

        ranks.each(write_own_files)
        dcp_save(
            nest(job.tensors),
            # No copy-ahead: the data is in host memory, and this thread must not touch a device.
            storage_writer=FileSystemWriter(directory, sync_files=True, per_thread_copy_ahead=0),
            planner=_CopiedDataPlanner(job.data),
            process_group=ranks.group,
        )
        names = ranks.first(lambda: sorted(path.name for path in directory.iterdir()))
        own_records = ranks.each(lambda: {name: record_of(directory / name) for name in ranks.share(names)})
        records = {name: record for part in ranks.gather(own_records) for name, record in part.items()}
        manifest = Manifest(job.step, ranks.size, _versions(), records)
        ranks.first(lambda: files.publish(manifest))
        self.last_saved_step = job.step
        ranks.first(lambda: self._prune(job.step))  # after `wait`, every rank sees what is left

    def _prune(self, newest_step: int) -> None:
        try:
            self._files.prune(newest_step, self._keep_last)
        except OSError as error:  # the new checkpoint is safe; the next save tries again
            _logger.warning("cannot delete old checkpoints: %s", one_line(error))

    def _check_equal_on_all_ranks(self, markers: dict[str, Any]) -> None:
        # repr, because equal objects may have different pickles (shared references).
        digests = {name: hashlib.sha256(repr(section).encode()).digest() for name, section in markers.items()}
        for rank, other in enumerate(self._ranks.gather(digests)):
            differing = sorted(
                name for name in digests.keys() | other.keys() if digests.get(name) != other.get(name)
            )
            if differing:
                raise CheckpointError(
                    f"state[{differing[0]!r}] differs between ranks {self._ranks.rank} and {rank}: "
                    f"only state[{_PER_RANK_SECTION!r}] may"
                )

    def _load_or_find_damage(self, state: dict[str, Any], step: int, *, full: bool) -> str | None:
        """Load one checkpoint; return None, or what is wrong with its files."""
        damage = self._ranks.first(lambda: self._files.find_damage(step)) or (
            self._find_damaged_contents(step) if full else None
        )
        if damage is not None:
            return damage
        try:
            self._load(state, step)
        except (StateMismatchError, CheckpointError):
            raise
        except Exception as error:
            damage = self._find_damaged_contents(step)
            if damage is None:
                path = self._files.path(step)
                raise CheckpointError(
                    f"{path} is undamaged but cannot be loaded: {one_line(error)}"
                ) from error
        return damage

    def _find_damaged_contents(self, step: int) -> str | None:
        """Compare the digests of all files, each on one rank."""
        names = sorted(self._ranks.first(lambda: self._files.read_manifest(step)).files)
        mine = self._ranks.share(names)
        found = self._ranks.gather(self._files.find_damage(step, contents_of=mine))
        return next((damage for damage in found if damage is not None), None)

    def _load(self, state: dict[str, Any], step: int) -> None:
        ranks, path = self._ranks, self._files.path(step)
        manifest = ranks.first(lambda: self._files.read_manifest(step))
        reader = FileSystemReader(path)
        markers: dict[str, Any] = ranks.each(lambda: unpack(path / _STATE_FILE))
        saved = ranks.each(reader.read_metadata)
        wanted = _shared_sections(state)
        targets = ranks.each(lambda: find_targets(wanted, markers, saved))
        dcp_load(nest(targets), storage_reader=reader, process_group=ranks.group)
        rng = ranks.each(
            lambda: unpack(path / _rng_file(ranks.rank)) if manifest.world_size == ranks.size else None
        )
        for name in wanted:
            state[name] = fill_markers(markers[name], targets, (name,))
        if _PER_RANK_SECTION in state:
            state[_PER_RANK_SECTION] = rng


@dataclass
class _SaveJob:
    """One save. `tensors` gives shapes and shardings, `data` the local values, by path joined with dots."""

    step: int
    tensors: dict[StatePath, Tensor]
    markers: dict[str, Any]
    state_file: bytes = b""
    rng_file: bytes = b""
    data: dict[str, Tensor] = field(default_factory=dict)
    thread: threading.Thread | None = None
    error: BaseException | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class _CopiedDataPlanner(DefaultSavePlanner):
    """Plans from the live tensors' shapes and shardings, and writes values copied from them earlier."""

    def __init__(self, data: dict[str, Tensor]) -> None:
        super().__init__()
        self._data = data

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._data[index.fqn]


def _shared_sections(state: dict[str, Any]) -> dict[str, Any]:
    return {name: section for name, section in state.items() if name != _PER_RANK_SECTION}


def _rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.pt"


def _versions() -> dict[str, str]:
    try:
        own = version("simplefsdp")
    except PackageNotFoundError:  # run from a source tree
        own = "unknown"
    return {"torch": torch.__version__, "simplefsdp": own}
