"""Device meshes for functions that run in a worker: one per shape and process, however many tests ask."""

from __future__ import annotations

from functools import cache

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@cache
def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the CPU mesh of this shape over all ranks, made at the first call in a process.

    Making a mesh makes process groups, which hold threads and sockets until the process ends.

    Args:
        shape: sizes by mesh dimension; the product is the world size.
        names: mesh dimension names; `None` means `("shard",)` for one and `("replicate", "shard")` for two.
    """
    if names is None:
        names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)
