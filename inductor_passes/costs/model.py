"""The cost model the passes see: one protocol, one implementation over a hardware profile.

Owns the interface between graphs and costs. Must not know graphs, plans or torch. Every time is a whole
number of nanoseconds, so that equal inputs give equal plans on every rank.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from inductor_passes.costs.collective import CollectiveModel
from inductor_passes.costs.compute import ComputeModel, Work
from inductor_passes.costs.profiles import HardwareProfile
from inductor_passes.costs.topology import GroupTopology


class CostModel(Protocol):
    """What a pass may ask about time."""

    def identity(self) -> str:
        """Text that changes whenever any answer could; part of the compile cache key."""
        ...

    def compute_ns(self, work: Work) -> int:
        """Time of one kernel."""
        ...

    def knows_kernels(self) -> bool:
        """Whether it has times of kernels by name; without, nobody needs to name them."""
        ...

    def alpha_ns(self, kind: str, topology: GroupTopology) -> int:
        """Fixed part of a collective's time, saved once for each collective merged into another."""
        ...

    def transfer_ns(self, kind: str, topology: GroupTopology, size_bytes: int) -> int:
        """Part of a collective's time that grows with its full payload."""
        ...

    def issue_ns(self) -> int:
        """Time that starting a collective takes from the compute stream."""
        ...

    def copy_ns(self, size_bytes: int) -> int:
        """Time to read and write ``size_bytes`` once on the device, without the kernel's fixed cost."""
        ...

    def kernel_ns(self) -> int:
        """Fixed cost of one more kernel on the compute stream."""
        ...


@dataclasses.dataclass(frozen=True)
class ProfileCostModel:
    """A :class:`CostModel` from a hardware profile."""

    profile: HardwareProfile

    def identity(self) -> str:
        return self.profile.identity()

    def compute_ns(self, work: Work) -> int:
        return ComputeModel(self.profile).time_ns(work)

    def knows_kernels(self) -> bool:
        return bool(self.profile.kernels)

    def alpha_ns(self, kind: str, topology: GroupTopology) -> int:
        return CollectiveModel(self.profile).alpha_ns(kind, topology)

    def transfer_ns(self, kind: str, topology: GroupTopology, size_bytes: int) -> int:
        return CollectiveModel(self.profile).transfer_ns(kind, topology, size_bytes)

    def issue_ns(self) -> int:
        return self.profile.value("collective_issue")

    def copy_ns(self, size_bytes: int) -> int:
        return ComputeModel(self.profile).move_ns(2 * size_bytes)

    def kernel_ns(self) -> int:
        return self.profile.value("kernel_overhead")
