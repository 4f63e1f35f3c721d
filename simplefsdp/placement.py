"""From a parameter and a mesh to where its pieces live: stored, compute and gradient placements.

Owns the arithmetic of shards, uneven, empty and nested in tensor parallelism included, and the refusal of parameters
that cannot be sharded. Issues no collective and changes no module.

A shard of dim d of size n over F ranks is what `torch.chunk` gives: every rank holds ceil(n / F) rows but the last
ones, which hold fewer or none. Tensor parallelism shards first, FSDP shards what is left:

    full (n, ...) --tp--> this rank's tp shard --dp--> stored local tensor        mesh (dp, tp)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from . import _compat
from .mesh import DataParallelMesh, Group

__all__ = [
    "ShardPlacementFn",
    "ShardSpec",
    "TensorParallel",
    "check_parameter",
    "make_spec",
    "shard_of",
    "stored_as",
    "to_sharded",
]

ShardPlacementFn = Callable[[nn.Parameter], "Shard | None"]


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """What a parameter that was a DTensor before wrapping goes back to for compute.

    Attributes:
        mesh: the tensor- or expert-parallel mesh the parameter came on.
        placements: its placements there.
        shape: its global shape.
        stride: its global stride, contiguous.
        groups: one per mesh dim.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    groups: tuple[Group, ...]


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """All that unsharding one parameter and reducing its gradient need; holds no tensor of the parameter.

    Two parameters with equal specs trace to equal graphs, so equal blocks share compiled code.

    Attributes:
        name: attribute name on the owning module.
        shape: shape of the unsharded tensor on this rank (the tensor-parallel shard where there is one).
        shard_dim: tensor dim sharded over the shard group; None: stored whole on each of its ranks.
        gather_group: the shard group where a gather is needed, else None.
        mean_groups: groups the gradient is all-reduced over inside the shard group (for parameters stored whole).
        replica_groups: groups the gradient is all-reduced over across replicas.
        storage_dtype: dtype of the stored shard and of `.grad`.
        compute_dtype: dtype of the gather and of the unsharded tensor.
        reduce_dtype: dtype of the gradient collectives; None: that of the incoming gradient.
        reshard_after_forward: whether the unsharded tensor is freed after forward and gathered again in backward.
        tensor_parallel: None for a parameter that was a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None
    gather_group: Group | None
    mean_groups: tuple[Group, ...]
    replica_groups: tuple[Group, ...]
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype | None
    reshard_after_forward: bool
    tensor_parallel: TensorParallel | None

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Dtype in which gradients wait for their reduction: no less precise than storage or reduction."""
        return torch.promote_types(self.storage_dtype, self.reduce_dtype or self.storage_dtype)

    @property
    def padded_rows(self) -> int:
        """Rows along `shard_dim` of the largest shard, which every rank sends."""
        assert self.shard_dim is not None
        ranks = 1 if self.gather_group is None else self.gather_group.size
        return -(-self.shape[self.shard_dim] // ranks)

    def rows_of(self, shard_rank: int) -> int | None:
        """Rows along `shard_dim` that a rank of the shard group stores; None when each stores the whole."""
        if self.shard_dim is None:
            return None
        return _span(self.shape[self.shard_dim], shard_rank, self.padded_rows)[1]


def check_parameter(fqn: str, param: torch.Tensor) -> None:
    """Refuse, by name, a parameter that cannot be sharded.

    Raises:
        ValueError: an uninitialised (lazy) parameter.
        TypeError: sparse or quantized layouts, and tensor subclasses other than DTensor.
    """
    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"parameter '{fqn}' is not initialised yet (a lazy module): run one forward before simple_fsdp"
        )
    if param.layout != torch.strided or param.is_quantized:
        raise TypeError(
            f"parameter '{fqn}' has layout {param.layout}"
            f"{' and is quantized' if param.is_quantized else ''}: only dense parameters can be sharded; list it in "
            "ignored_params"
        )
    kind = type(param.data)
    if kind is not torch.Tensor and not issubclass(kind, DTensor) and not _is_plain_fake(param):
        raise TypeError(
            f"parameter '{fqn}' is a {kind.__name__}, a tensor subclass that simple_fsdp cannot shard: list it in "
            "ignored_params"
        )


def make_spec(
    fqn: str,
    param: nn.Parameter,
    dp: DataParallelMesh,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
    shard_placement_fn: ShardPlacementFn | None,
) -> tuple[ShardSpec, DeviceMesh, tuple[Placement, ...]]:
    """Decide how one parameter is stored.

    Returns:
        The spec, the mesh and the placements of the stored DTensor.

    Raises:
        TypeError, ValueError: see `check_parameter`; a shard dim that does not exist, a DTensor on the data-parallel
            mesh itself, or one whose mesh cannot be joined with it.
    """
    check_parameter(fqn, param)
    tensor_parallel, local_shape = None, tuple(param.shape)
    if isinstance(param, DTensor):
        tensor_parallel = _tensor_parallel(fqn, param)
        local_shape = tuple(_compat.local_tensor(param).shape)
    wanted = _shard_dim(fqn, param, shard_placement_fn)
    shard_group = dp.shard_group
    # A tensor without elements has nothing to send; one without dims cannot be cut. Emptiness is judged on the global
    # tensor, and the number of dims is the same on every tensor-parallel rank, so all ranks decide alike.
    shard_dim = wanted if shard_group is not None and param.dim() > 0 and param.numel() > 0 else None
    gather_group = None if shard_dim is None or shard_group is None or shard_group.size == 1 else shard_group
    whole = shard_dim is None and param.numel() > 0
    compute_dtype, reduce_dtype = _working_dtypes(param.dtype, mp_policy)
    spec = ShardSpec(
        name=fqn.rpartition(".")[2],
        shape=local_shape,
        shard_dim=shard_dim,
        gather_group=gather_group,
        mean_groups=_larger_than_one(shard_group) if whole else (),
        replica_groups=_larger_than_one(dp.replicate_group) if param.numel() > 0 else (),
        storage_dtype=param.dtype,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        tensor_parallel=tensor_parallel,
    )
    mesh, placements = _stored_placements(fqn, dp, shard_dim, tensor_parallel)
    return spec, mesh, placements


def stored_as(spec: ShardSpec, dtype: torch.dtype, mp_policy: MixedPrecisionPolicy) -> ShardSpec:
    """The spec of the same parameter after its shard was converted to another dtype."""
    compute_dtype, reduce_dtype = _working_dtypes(dtype, mp_policy)
    return dataclasses.replace(
        spec, storage_dtype=dtype, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype
    )


def shard_of(full: torch.Tensor, spec: ShardSpec, shard_rank: int) -> torch.Tensor:
    """This rank's part of an unsharded tensor of shape `spec.shape`; a view of it, possibly without elements."""
    if spec.gather_group is None:
        return full
    assert spec.shard_dim is not None
    return _rows_of(full, spec.shard_dim, shard_rank, spec.padded_rows)


def local_part(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part of a whole plain tensor under `placements`; a view of it, possibly without elements."""
    # Strided shards cut what the plain shards of later mesh dims have cut before.
    for strided in (False, True):
        for mesh_dim, placement in enumerate(placements):
            dim = _compat.find_sharded_dim(placement)
            if dim is not None and isinstance(placement, _compat.StridedShard) == strided:
                rows = -(-whole.shape[dim] // mesh.size(mesh_dim))
                whole = _rows_of(whole, dim, mesh.get_local_rank(mesh_dim), rows)
    return whole


def _rows_of(whole: torch.Tensor, dim: int, rank: int, rows: int) -> torch.Tensor:
    return whole.narrow(dim, *_span(whole.shape[dim], rank, rows))


def _span(size: int, rank: int, rows: int) -> tuple[int, int]:
    """Where the part of a rank begins, and its length, when `size` is cut into parts of `rows`."""
    # Not `min`: where one process plays all ranks (LocalTensorMode), the rank is a symbolic int without an order.
    start = torch.sym_min(rank * rows, size)
    return start, torch.sym_min(rows, size - start)


def to_sharded(
    full: torch.Tensor,
    spec: ShardSpec,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shard_rank: int,
    device: torch.device | None = None,
) -> DTensor:
    """Make the stored DTensor of a whole plain tensor, or of the tensor-parallel DTensor; no collective.

    The shard is a contiguous copy, so that the unsharded tensor can be freed.
    """
    data = full.detach()
    shape = tuple(data.shape)
    if isinstance(data, DTensor):
        shard = shard_of(_compat.local_tensor(data), spec, shard_rank)
    else:
        shard = local_part(data, mesh, placements)
    if device is not None and not shard.is_meta:
        shard = shard.to(device)
    return stored(shard.clone(memory_format=torch.contiguous_format), mesh, placements, shape)


def stored(
    shard: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> DTensor:
    """The DTensor of global shape `shape` that has `shard` as this rank's part."""
    return DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=torch.Size(shape), stride=contiguous_stride(shape)
    )


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _working_dtypes(
    storage: torch.dtype, mp_policy: MixedPrecisionPolicy
) -> tuple[torch.dtype, torch.dtype | None]:
    """Dtypes of compute and of gradient reduction; the policy is about floating-point parameters only."""
    if not storage.is_floating_point:
        return storage, None
    return mp_policy.param_dtype or storage, mp_policy.reduce_dtype


def _shard_dim(fqn: str, param: nn.Parameter, shard_placement_fn: ShardPlacementFn | None) -> int:
    wanted = None if shard_placement_fn is None else shard_placement_fn(param)
    if wanted is None:
        return 0
    if not isinstance(wanted, Shard):
        raise TypeError(
            f"shard_placement_fn returned {wanted!r} for parameter '{fqn}' of shape {tuple(param.shape)}; "
            "return torch.distributed.tensor.Shard(dim), or None for dim 0"
        )
    dim = wanted.dim + param.dim() if wanted.dim < 0 else wanted.dim
    if not 0 <= dim < max(param.dim(), 1):
        raise ValueError(
            f"shard_placement_fn chose dim {wanted.dim} for parameter '{fqn}', which has shape {tuple(param.shape)}"
        )
    return dim


def _tensor_parallel(fqn: str, param: DTensor) -> TensorParallel:
    for placement in param.placements:
        if placement.is_partial():
            raise ValueError(
                f"parameter '{fqn}' is a DTensor with placements {param.placements}: a partial sum cannot be sharded; "
                "redistribute it to Replicate or Shard first"
            )
    mesh, shape = param.device_mesh, tuple(param.shape)
    groups = tuple(Group(mesh.get_group(dim).group_name, mesh.size(dim)) for dim in range(mesh.ndim))
    return TensorParallel(mesh, tuple(param.placements), shape, contiguous_stride(shape), groups)


def _stored_placements(
    fqn: str, dp: DataParallelMesh, shard_dim: int | None, tensor_parallel: TensorParallel | None
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    dp_placements: list[Placement] = [Replicate()] * dp.mesh.ndim
    if tensor_parallel is None:
        if shard_dim is not None and dp.shard_dim is not None:
            dp_placements[dp.shard_dim] = Shard(shard_dim)
        return dp.mesh, tuple(dp_placements)
    tp_mesh = tensor_parallel.mesh
    if tp_mesh == dp.mesh or _compat.root_mesh(tp_mesh) != _compat.root_mesh(dp.mesh):
        raise ValueError(
            f"parameter '{fqn}' is a DTensor on the mesh {tp_mesh}, which cannot be joined with the data-parallel mesh "
            f"{dp.mesh}: slice both out of one mesh, for example mesh = init_device_mesh(..., (2, 4), "
            "mesh_dim_names=('dp', 'tp')), tensor parallelism on mesh['tp'], then simple_fsdp(model, mesh['dp'])"
        )
    try:
        mesh = _compat.concatenate_meshes(dp.mesh, tp_mesh)
    except RuntimeError as error:
        raise ValueError(
            f"parameter '{fqn}' is a DTensor on the mesh {tp_mesh}, which overlaps the data-parallel mesh {dp.mesh}: "
            f"{error}"
        ) from error
    if shard_dim is not None and dp.shard_dim is not None:
        split = 1
        for size, placement in zip(tp_mesh.shape, tensor_parallel.placements, strict=True):
            dim = _compat.find_sharded_dim(placement)
            if dim is not None and dim % len(tensor_parallel.shape) == shard_dim:
                split *= size
        dp_placements[dp.shard_dim] = (
            _compat.strided_shard(shard_dim, split) if split > 1 else Shard(shard_dim)
        )
    return mesh, (*dp_placements, *tensor_parallel.placements)


def _larger_than_one(group: Group | None) -> tuple[Group, ...]:
    return (group,) if group is not None and group.size > 1 else ()


def _is_plain_fake(param: torch.Tensor) -> bool:
    # Fake tensors and the stand-ins of many-ranks-in-one-process testing act as plain tensors.
    return type(param.data).__module__.startswith(("torch._subclasses.", "torch.distributed._local_tensor"))
