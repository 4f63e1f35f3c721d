"""From a sharding factor or a DeviceMesh to the data-parallel mesh: which dim replicates, which dim shards.

Owns the checks on process groups, meshes and sharding factors; knows nothing about parameters.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import _compat

__all__ = ["DataParallelMesh", "Group", "make_mesh"]


@dataclasses.dataclass(frozen=True)
class Group:
    """A process group as the collectives need it: its name and its number of ranks."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class DataParallelMesh:
    """A mesh of one or two dims with a role for each.

    Attributes:
        mesh: the DeviceMesh, 1-D or 2-D.
        replicate_dim: the mesh dim along which parameters are replicated, or None.
        shard_dim: the mesh dim along which parameters are sharded, or None (DDP).
    """

    mesh: DeviceMesh
    replicate_dim: int | None
    shard_dim: int | None

    @property
    def shard_group(self) -> Group | None:
        """The group that gathers parameters and reduce-scatters gradients; None when nothing is sharded."""
        return self._group(self.shard_dim)

    @property
    def replicate_group(self) -> Group | None:
        """The group of ranks that hold the same shard; None when every rank holds another one."""
        return self._group(self.replicate_dim)

    @property
    def shard_rank(self) -> int:
        """This rank's position in its shard group."""
        return 0 if self.shard_dim is None else self.mesh.get_local_rank(self.shard_dim)

    @property
    def position_outside(self) -> tuple[int, ...]:
        """This rank's coordinates along the dims of the root mesh that are not dims of this one, such as tensor
        parallelism's: what a module computes may depend on them."""
        root = _compat.root_mesh(self.mesh)
        coordinate, mine = root.get_coordinate(), self.mesh.mesh_dim_names or ()
        if root is self.mesh or coordinate is None:
            return ()
        names = root.mesh_dim_names or (None,) * len(coordinate)
        return tuple(
            at for name, at in zip(names, coordinate, strict=True) if name is None or name not in mine
        )

    def _group(self, dim: int | None) -> Group | None:
        if dim is None:
            return None
        return Group(self.mesh.get_group(dim).group_name, self.mesh.size(dim))


def make_mesh(
    mesh: DeviceMesh | None, sharding_factor: int | None, device_type: str | None = None
) -> DataParallelMesh:
    """Build or check the data-parallel mesh.

    The sharding factor F over W ranks is that of the PyTorch FSDP paper (arXiv 2304.11277, section 3.2): F = 1
    replicates (DDP), F = W shards fully, anything between is hybrid, a (W / F, F) mesh of (replicate, shard).

    Args:
        mesh: 1-D (sharded over it), 2-D (replicate, shard), or None: made of the default process group.
        sharding_factor: ranks that share one copy of the parameters; None: all of the mesh's shard dim.
        device_type: device type of a mesh to be made; None takes CUDA where the process group's backend is NCCL,
            else the CPU.

    Raises:
        RuntimeError: no mesh and no process group.
        TypeError: an argument of the wrong type.
        ValueError: a mesh of more than two dims, a factor that does not divide the ranks, or one that contradicts
            a 2-D mesh.
    """
    if sharding_factor is not None and (
        isinstance(sharding_factor, bool) or not isinstance(sharding_factor, int)
    ):
        raise TypeError(f"sharding_factor must be an int or None, got {sharding_factor!r}")
    if mesh is None:
        return _mesh_of_world(sharding_factor, device_type)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.DeviceMesh or None, got {type(mesh).__name__}")
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh must have one dim (shard) or two (replicate, shard), got {mesh.ndim} dims of sizes "
            f"{tuple(mesh.shape)}; slice the data-parallel dims out, for example mesh['dp_replicate', 'dp_shard']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh}")
    if mesh.ndim == 2:
        if sharding_factor not in (None, mesh.size(1)):
            raise ValueError(
                f"sharding_factor {sharding_factor} contradicts the 2-D mesh {tuple(mesh.shape)}, whose second dim "
                f"shards over {mesh.size(1)} ranks; leave sharding_factor out"
            )
        return DataParallelMesh(mesh, replicate_dim=0, shard_dim=1)
    size = mesh.size()
    factor = _check_factor(sharding_factor, size)
    if factor == size:
        return DataParallelMesh(mesh, replicate_dim=None, shard_dim=0)
    if factor == 1:
        return DataParallelMesh(mesh, replicate_dim=0, shard_dim=None)
    return DataParallelMesh(_hybrid(mesh, factor), replicate_dim=0, shard_dim=1)


def _hybrid(mesh: DeviceMesh, factor: int) -> DeviceMesh:
    """Cut a 1-D mesh into (replicate, shard) with `factor` ranks in the shard dim."""
    sizes = (mesh.size() // factor, factor)
    if mesh.mesh_dim_names:
        name = mesh.mesh_dim_names[0]
        return _compat.split_mesh_dim(mesh, sizes, (f"{name}_replicate", f"{name}_shard"))
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"sharding_factor {factor} cuts the mesh {mesh} of {mesh.size()} of {dist.get_world_size()} ranks in two "
            "dims, which takes a name: pass mesh_dim_names when you make the mesh, or make it 2-D (replicate, shard)"
        )
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(sizes), mesh_dim_names=("dp_replicate", "dp_shard"))


def _mesh_of_world(sharding_factor: int | None, device_type: str | None) -> DataParallelMesh:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "simple_fsdp needs a process group: start the script with `torchrun --nproc-per-node N script.py` and call "
            "torch.distributed.init_process_group() first, or pass mesh="
        )
    world = dist.get_world_size()
    factor = _check_factor(sharding_factor, world)
    if device_type is None:
        device_type = "cuda" if "nccl" in dist.get_backend() and torch.cuda.is_available() else "cpu"
    if factor == world:
        return DataParallelMesh(
            init_device_mesh(device_type, (world,), mesh_dim_names=("dp_shard",)), None, 0
        )
    if factor == 1:
        return DataParallelMesh(
            init_device_mesh(device_type, (world,), mesh_dim_names=("dp_replicate",)), 0, None
        )
    mesh = init_device_mesh(
        device_type, (world // factor, factor), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    return DataParallelMesh(mesh, replicate_dim=0, shard_dim=1)


def _check_factor(sharding_factor: int | None, ranks: int) -> int:
    factor = ranks if sharding_factor is None else sharding_factor
    if factor < 1 or ranks % factor:
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise ValueError(
            f"sharding_factor {factor} must divide the {ranks} data-parallel ranks; possible here: "
            f"{', '.join(map(str, divisors))} (1 replicates as DDP does, {ranks} shards fully)"
        )
    return factor
