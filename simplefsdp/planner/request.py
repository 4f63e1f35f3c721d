"""What is asked of a process that traces or compiles a step: which model, how it is sharded, on how many devices.

Owns the fields, and the model they name. Must not import torch before that model is wanted, nor know what is done with
it: requests go to processes that set torch up first.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplefsdp.explainer.options import CheckpointMode
    from simplefsdp.explainer.target import Target


@dataclasses.dataclass(frozen=True)
class Request:
    """A step, so that another process can build it.

    Args:
        model, seq, ac, layers: as in the command line.
        batch: sequences per device.
        devices, factor: where.
        precision, memory_budget_gb, reshard, whole: as in the command line.
        planner: who plans.
        eager: whether to read what eager mode would run, too.
    """

    model: str
    seq: int | None
    layers: int | None
    batch: int
    ac: CheckpointMode
    devices: int
    factor: int
    precision: str
    memory_budget_gb: float
    reshard: bool
    whole: bool
    planner: str
    eager: bool = False

    def find_target(self) -> Target:
        """Build the model, without memory, and its inputs.

        Raises:
            UsageError: what was asked for makes no sense; says what to change.
            TraceError: the user's function fails; says where and why.
        """
        from simplefsdp.explainer.target import find_target

        return find_target(
            self.model,
            seq_len=self.seq,
            local_batch=None if ":" in self.model else self.batch,
            checkpointing=self.ac,
            layers=self.layers,
        )
