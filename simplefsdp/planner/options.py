"""The options of `simplefsdp plan`, and the checks that need neither torch nor the model.

Owns names, defaults and help texts. Must not know how anything is predicted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from simplefsdp.explainer.hardware import GIB, Hardware, find_hardware
from simplefsdp.explainer.options import CheckpointMode, StepOptions, check_directory, check_picture
from simplefsdp.llama.options import UsageError
from simplefsdp.planner.emit.gpus import GPUS, find_gpu

PlannerName = Literal["auto", "greedy", "block", "none"]


@dataclasses.dataclass(frozen=True)
class PlanOptions(StepOptions):
    """Predict speed and memory of one training step on hardware that is not there. Nothing runs; all is modelled."""

    model: str = "8b"
    gpus: int = 64
    sharding_factor: int | None = None
    """Ranks that share one copy of the parameters: 1 replicates (DDP). Default: all (FSDP); --search tries several."""
    local_batch: int | None = None
    """Sequences per device of a Llama. Default: 1; --search tries 1, 2, 4 and so on."""
    ac: CheckpointMode | None = None
    """Activation checkpointing of a Llama. Default: selective; --search tries all."""
    planners: tuple[PlannerName, ...] = ("none", "block", "greedy", "auto")
    """Planners to compare. block gathers a block ahead, as FSDP2 does in eager mode."""
    memory_gib: float | None = None
    """Memory of one device in 2**30 bytes. Default: what the data sheet of --hardware says."""
    whole: bool = False
    """Trace every layer instead of a few, which takes long."""

    search: bool = False
    """Find the sharding factor, planner, checkpointing, batch and resharding that fit and give most tokens per second.
    What is given is kept, the rest is searched; with --no-reshard-after-forward only that is tried."""
    best: int = 5
    """Rows that --search shows."""
    scale: bool = False
    """Show 8 to 4096 devices, sharded over all, over one node, and not at all."""
    global_batch: int | None = None
    """With --scale: sequences per step of all devices together (strong scaling). Devices with more than
    --local-batch of them take several passes per step. Default: each device keeps --local-batch (weak scaling)."""
    plot: Path | None = None
    """Draw what --scale shows to this file."""
    emit_triton: Path | None = None
    """Write the code that TorchInductor makes of forward and backward for --hardware, a GPU, to this directory."""
    emit_ptx: bool = False
    """With --emit-triton: also lower its kernels to PTX, which needs Triton."""
    validate: bool = False
    """Print predictions beside published measurements instead; other options do not count."""

    def on_hardware(self) -> Hardware:
        """The hardware, with the memory that was asked for.

        Raises:
            ValueError: there is none of that name.
        """
        hardware = find_hardware(self.hardware)
        if self.memory_gib is None:
            return hardware
        return dataclasses.replace(
            hardware, memory_bytes=int(self.memory_gib * GIB), source="as given by --memory-gib"
        )

    def check(self) -> None:
        """Check what needs neither torch nor the model; makes the directories of files to be written.

        Raises:
            UsageError: naming the option, the value and the accepted values.
        """
        super().check()
        if not self.planners:
            raise UsageError("--planners: name at least one of auto, greedy, block, none")
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise UsageError(f"--memory-gib {self.memory_gib:g}: must be more than 0")
        if self.best < 1:
            raise UsageError(f"--best {self.best}: must be at least 1")
        if self.search and self.on_hardware().memory_bytes is None:
            raise UsageError(f"--search: the memory of {self.hardware} is not known; give --memory-gib")
        if self.search and self.scale:
            raise UsageError("--search and --scale answer different questions: give one")
        for flag, value in (("--global-batch", self.global_batch), ("--plot", self.plot)):
            if value is not None and not self.scale:
                raise UsageError(f"{flag} belongs to --scale: give both")
        if self.global_batch is not None and self.is_own_model:
            raise UsageError(f"--global-batch is for a Llama; {self.model} makes its own inputs")
        if self.global_batch is not None and self.global_batch < 1:
            raise UsageError(f"--global-batch {self.global_batch}: must be at least 1")
        if self.plot is not None:
            check_picture("--plot", self.plot)
        if self.emit_ptx and self.emit_triton is None:
            raise UsageError("--emit-ptx adds to what --emit-triton writes: give both")
        if self.emit_triton is not None:
            if self.search or self.scale:
                raise UsageError("--emit-triton writes the code of one step: leave out --search and --scale")
            if find_gpu(self.on_hardware().profile) is None:
                raise UsageError(f"--emit-triton: --hardware {self.hardware} is none of {', '.join(GPUS)}")
            check_directory("--emit-triton", self.emit_triton)
