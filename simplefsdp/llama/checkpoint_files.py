"""The files of a checkpoint directory: names, manifest, atomic publication, checks, clean-up.

Owns: what lies on disk and in which order it changes. Must not know: tensors, ranks.

A directory holds one sub-directory per checkpoint, and changes by renames only:

    step-000000120/            complete: its manifest was the last file written before the rename
    step-000000130.tmp/        being written; removed by `clean` if its writer died
    step-000000120.replaced/   set aside while a new step 120 moves in; put back by `clean` if that failed
    step-000000090.deleting/   no longer needed; `clean` finishes the job
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from simplefsdp.llama.agreement import AgreedError

MANIFEST_NAME = "manifest.json"
# Version of the layout described here. Raise it when older code could no longer read what is written.
MANIFEST_FORMAT = 1
HASH_CHUNK_BYTES = 1 << 20

_STEP_NAME = re.compile(r"step-(\d{9,})")
_WRITING = ".tmp"
_REPLACED = ".replaced"
_DELETING = ".deleting"


class CheckpointError(AgreedError):
    """A checkpoint cannot be written or read; the message is one line that names the path and the reason."""


@dataclass(frozen=True)
class FileRecord:
    """What a file must look like.

    Attributes:
        size_bytes: length.
        sha256: hexadecimal digest of the contents.
    """

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of.

    Attributes:
        step: training step.
        world_size: number of ranks that wrote it.
        versions: package name -> version that wrote it.
        files: file name -> record, for every file but the manifest itself.
    """

    step: int
    world_size: int
    versions: dict[str, str]
    files: dict[str, FileRecord]

    def to_json(self) -> str:
        """Return the text of the manifest file."""
        return json.dumps({"format": MANIFEST_FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Parse `to_json`'s text.

        Raises:
            ValueError: it is no manifest, or one of another format.
        """
        try:
            content = json.loads(text)
            found_format = content["format"]
            if found_format != MANIFEST_FORMAT:
                raise ValueError(f"format {found_format}; this version reads format {MANIFEST_FORMAT}")
            return Manifest(
                step=int(content["step"]),
                world_size=int(content["world_size"]),
                versions=dict(content["versions"]),
                files={name: FileRecord(**record) for name, record in content["files"].items()},
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError("not a manifest") from error


class CheckpointFiles:
    """A directory of checkpoints. Only one process may call the methods that change it.

    Args:
        root: the directory.
        hashed_in_quick_check: names of the small files whose contents even a quick check reads.
    """

    def __init__(self, root: str | os.PathLike[str], hashed_in_quick_check: Iterable[str] = ()) -> None:
        self.root = Path(root)
        self._hashed_in_quick_check = frozenset(hashed_in_quick_check)

    def path(self, step: int) -> Path:
        """Return where the complete checkpoint of `step` is or would be."""
        return self.root / f"step-{step:09d}"

    def writing_path(self, step: int) -> Path:
        """Return where the files of `step` are while they are written."""
        return self.root / f"step-{step:09d}{_WRITING}"

    def steps(self) -> list[int]:
        """Return the steps with a published checkpoint, damaged ones included, in ascending order."""
        if not self.root.is_dir():
            return []
        matches = (_STEP_NAME.fullmatch(entry.name) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def create(self) -> Path:
        """Make the directory, check that files can be written to it, and leave one there as a probe.

        Returns:
            The probe, for other machines to look for. Whoever calls this deletes it.

        Raises:
            CheckpointError: it is a file or a checkpoint itself, or cannot be written to.
        """
        if (self.root / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"{self.root} is one checkpoint, not a directory of checkpoints: pass {self.root.parent}"
            )
        probe = self.root / f".probe-{uuid.uuid4().hex}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe.touch(exist_ok=False)
        except OSError as error:
            raise CheckpointError(f"cannot write checkpoints to {self.root}: {error.strerror}") from error
        return probe

    def clean(self) -> None:
        """Remove what a killed writer left behind, and undo a replacement that did not finish."""
        for entry in sorted(self.root.iterdir()):
            if not _STEP_NAME.fullmatch(entry.stem):
                continue
            if entry.suffix == _REPLACED and not entry.with_suffix("").exists():
                entry.rename(entry.with_suffix(""))
            elif entry.suffix in (_WRITING, _REPLACED, _DELETING):
                shutil.rmtree(entry)

    def begin(self, step: int) -> Path:
        """Make the empty directory that the files of `step` are written to, and return it."""
        path = self.writing_path(step)
        if path.exists():
            shutil.rmtree(path)
        path.mkdir()
        return path

    def publish(self, manifest: Manifest) -> None:
        """Make the written files of a step its checkpoint, in place of an older one of the same step.

        Whatever moment the process dies at, either the new or the older checkpoint is there after `clean`.

        Args:
            manifest: names every file in `writing_path(step)`; the files themselves are synced already.
        """
        source, target = self.writing_path(manifest.step), self.path(manifest.step)
        write_synced(source / MANIFEST_NAME, manifest.to_json().encode())
        _sync_directory(source)
        replaced = target.with_suffix(_REPLACED)
        if target.exists():
            target.rename(replaced)
        source.rename(target)
        _sync_directory(self.root)
        if replaced.exists():
            shutil.rmtree(replaced)

    def discard(self, step: int) -> None:
        """Remove what was written of a step that is not going to be published. Errors are ignored."""
        shutil.rmtree(self.writing_path(step), ignore_errors=True)

    def prune(self, newest_step: int, keep_last: int) -> None:
        """Delete checkpoints older than the `keep_last` newest undamaged ones up to `newest_step`.

        Later steps (of a run that was resumed from an earlier step) are left alone. Reads no file contents
        but the manifests.
        """
        kept = 0
        for step in reversed([step for step in self.steps() if step <= newest_step]):
            path = self.path(step)
            if kept == keep_last:
                doomed = path.with_suffix(_DELETING)
                path.rename(doomed)
                shutil.rmtree(doomed)
            elif self.find_damage(step) is None:
                kept += 1

    def read_manifest(self, step: int) -> Manifest:
        """Return the manifest of a published checkpoint.

        Raises:
            CheckpointError: it is missing or not readable.
        """
        path = self.path(step) / MANIFEST_NAME
        try:
            manifest = Manifest.from_json(path.read_text(errors="replace"))
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if manifest.step != step:
            raise CheckpointError(f"{path}: belongs to step {manifest.step}")
        return manifest

    def find_damage(self, step: int, *, contents_of: Iterable[str] | None = None) -> str | None:
        """Compare a published checkpoint with its manifest.

        Args:
            step: the checkpoint.
            contents_of: names of the files whose contents are read and compared; None for the small ones.

        Returns:
            One line that names the first bad file and what is wrong with it; None if nothing is.
        """
        try:
            manifest = self.read_manifest(step)
        except CheckpointError as error:
            return str(error)
        hashed = self._hashed_in_quick_check if contents_of is None else frozenset(contents_of)
        for name, record in sorted(manifest.files.items()):
            path = self.path(step) / name
            try:
                found_bytes = path.stat().st_size
                if found_bytes != record.size_bytes:
                    return f"{path}: {found_bytes} bytes long, must be {record.size_bytes}"
                if name in hashed and record_of(path).sha256 != record.sha256:
                    return f"{path}: contents differ from what was written (sha256)"
            except OSError as error:
                return f"{path}: {error.strerror}"
        return None


def record_of(path: Path) -> FileRecord:
    """Read a file and return its size and digest."""
    digest = hashlib.sha256()
    size_bytes = 0
    with path.open("rb") as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
    return FileRecord(size_bytes, digest.hexdigest())


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until the storage has it."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_directory(path: Path) -> None:
    """Wait until the storage has the names in a directory, where the file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse to sync a directory
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
