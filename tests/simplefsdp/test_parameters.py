"""Any parameter of any module gives the values of the unsharded reference, or is refused before anything changes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from simplefsdp import (
    MixedPrecisionPolicy,
    _compat,
    full_parameters,
    parametrize,
    sharded_parameters,
    simple_fsdp,
)
from tests.helpers.collectives import counts_by_kind, graph_collectives, record_collectives
from tests.helpers.graphs import GraphRecorder
from tests.helpers.meshes import mesh
from tests.helpers.pool import WorkerPool
from tests.helpers.worlds import fake_process_group
from tests.simplefsdp.reference import (
    Case,
    check_against_reference,
    check_same,
    train_reference,
    train_sharded,
)
from tests.simplefsdp.zoo import CASES, SharedModule, Tied, Uneven, tokens

# Mesh shape and sharding factor.
FSDP2, FSDP4, HSDP, DDP = ((2,), None), ((4,), None), ((2, 2), None), ((2,), 1)
Layout = tuple[tuple[int, ...], "int | None"]


def wrap_as(layout: Layout) -> Callable[[nn.Module], nn.Module]:
    shape, factor = layout
    return lambda model: simple_fsdp(model, mesh(*shape), sharding_factor=factor)


def _train(rank: int, world: int, name: str, layouts: tuple[Layout, ...], backend: str | None = None) -> None:
    warnings.filterwarnings("ignore", "`torch.nn.utils.weight_norm` is deprecated", FutureWarning)
    torch.set_default_dtype(torch.float64)
    for layout in layouts:
        check_against_reference(CASES[name], rank, world, wrap_as(layout), backend=backend)


# Odd in what they store, not in how they read it: what the mesh decides may differ for them.
KINDS = (
    "uneven",
    "tied",
    "frozen_base",
    "odd",
    "many_dtypes",
    "complex",
    "non_contiguous",
    "sparse_gradient",
)


@pytest.mark.parametrize("name", CASES)
def test_training_equals_the_unsharded_reference(workers, name):
    workers(4).run(_train, name, (HSDP,))


@pytest.mark.parametrize("name", KINDS)
def test_sharded_and_replicated_training_equals_the_reference(workers, name):
    workers(2).run(_train, name, (FSDP2, DDP))


@pytest.mark.parametrize("name", ["uneven", "odd", "tied", "non_contiguous", "complex"])
def test_few_rows_on_many_ranks_and_all_rows_on_one(workers, name):
    workers(1).run(_train, name, (((1,), None),))
    workers(4).run(_train, name, (FSDP4,))


# Dynamo spends a good part of a second on each parameter: only what it could treat differently from eager mode.
# The tied case is compiled on a hybrid mesh, below.
COMPILED = (
    "frozen_base",
    "odd",
    "complex",
    "non_contiguous",
    "three_of_one_module",
    "parametrized",
    "many_outputs",
)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_training_equals_the_reference(workers, name):
    workers(2).run(_train, name, (FSDP2,), "aot_eager")


def test_compiled_hybrid_training_equals_the_reference(workers):
    workers(4).run(_train, "tied", (HSDP,), "aot_eager")


# -- what a mistake in the package would look like -------------------------------------------------------------


def _drop_reduce_scatter(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(_compat, "reduce_scatter", lambda x, op, group, size: x.chunk(size)[rank % size].clone())


def _sum_in_the_shard_group(patch: pytest.MonkeyPatch, rank: int) -> None:
    real = _compat.reduce_scatter
    patch.setattr(_compat, "reduce_scatter", lambda x, op, group, size: real(x, "sum", group, size))


def _drop_all_reduce(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(_compat, "all_reduce", lambda x, op, group: x)


def _sum_over_replicas(patch: pytest.MonkeyPatch, rank: int) -> None:
    real = _compat.all_reduce
    patch.setattr(_compat, "all_reduce", lambda x, op, group: real(x, "sum", group))


def _shift_rows(patch: pytest.MonkeyPatch, rank: int) -> None:
    real = _compat.all_gather
    patch.setattr(_compat, "all_gather", lambda x, group, size: real(x, group, size).roll(len(x), 0))


def _bind_late(patch: pytest.MonkeyPatch, rank: int) -> None:
    real = parametrize._read
    patch.setattr(parametrize, "_read", lambda module, name: real(module, "c"))


def _untie(model: nn.Module) -> None:
    model.head._parameters["weight"] = nn.Parameter(model.head._parameters["weight"].detach().clone())


@dataclass(frozen=True)
class Mutation:
    """A mistake: in the package, or in the module after wrapping; with the case and the mesh that show it."""

    case: str
    shape: tuple[int, ...]
    in_package: Callable[[pytest.MonkeyPatch, int], None] = lambda patch, rank: None
    in_module: Callable[[nn.Module], None] = lambda model: None


MUTATIONS = {
    "no reduce-scatter": Mutation("uneven", (4,), _drop_reduce_scatter),
    "sum instead of mean": Mutation("uneven", (4,), _sum_in_the_shard_group),
    "no all-reduce over replicas": Mutation("uneven", (2, 2), _drop_all_reduce),
    "sum over replicas": Mutation("uneven", (2, 2), _sum_over_replicas),
    "no mean of what cannot be cut": Mutation("odd", (4,), _drop_all_reduce),
    "another rank's rows": Mutation("uneven", (4,), _shift_rows),
    "every property reads the last parameter": Mutation("three_of_one_module", (4,), _bind_late),
    "an untied copy": Mutation("tied", (4,), in_module=_untie),
}


def _mutated(rank: int, world: int, name: str) -> None:
    torch.set_default_dtype(torch.float64)
    mutation = MUTATIONS[name]

    def wrap(model: nn.Module) -> nn.Module:
        simple_fsdp(model, mesh(*mutation.shape))
        mutation.in_module(model)
        return model

    with pytest.MonkeyPatch.context() as patch:
        mutation.in_package(patch, rank)
        with pytest.raises(AssertionError):
            check_against_reference(CASES[mutation.case], rank, world, wrap)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_catches(workers, name):
    workers(4).run(_mutated, name)


# -- one kind of parameter at a time ---------------------------------------------------------------------------


def _tied(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)
    case = Case(Tied, tokens(5, 6))
    model = case.module()
    simple_fsdp(model, mesh(world))
    assert model._parameters == {}
    assert model.embed._parameters["weight"] is model.head._parameters["weight"]
    assert list(model.state_dict()) == ["embed.weight", "head.weight"]
    assert len(list(model.parameters())) == 1
    check_same(
        train_sharded(case, rank, model, steps=5), train_reference(case, world, steps=5)[rank], case.rtol
    )
    assert model.embed._parameters["weight"] is model.head._parameters["weight"]
    assert torch.equal(
        model.state_dict()["embed.weight"].full_tensor(), model.state_dict()["head.weight"].full_tensor()
    )


def test_tied_weights_are_one_parameter_with_one_gradient(workers):
    workers(2).run(_tied)


def _tied_from_meta(rank: int, world: int) -> None:
    def initialise(model: nn.Module) -> None:
        torch.manual_seed(3)
        nn.init.normal_(model.embed.weight)

    with torch.device("meta"):
        model = Tied()
    simple_fsdp(model, mesh(world))
    model.to_empty(device="cpu")
    with sharded_parameters(model):
        assert model.embed.weight is model.head.weight
        initialise(model)
    plain = Tied()
    with torch.no_grad():
        initialise(plain)
    state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    assert torch.equal(state["head.weight"], plain.head.weight)

    again = simple_fsdp(Tied(), mesh(world))
    again.load_state_dict(model.state_dict())
    assert again.embed._parameters["weight"] is again.head._parameters["weight"]
    assert torch.equal(again.head.weight.full_tensor(), plain.head.weight)


def test_a_tie_survives_meta_build_init_save_and_load(workers):
    workers(2).run(_tied_from_meta)


def test_a_module_under_two_parents_is_gathered_once_in_the_graph():
    """Two parameters, two calls: the compiler merges equal gathers, eager mode frees and gathers again."""
    with fake_process_group(0, 2):
        model = simple_fsdp(SharedModule())
        recorder = GraphRecorder()
        torch.compile(model, backend=recorder, fullgraph=True)(torch.ones(2, 5)).sum().backward()
        with record_collectives() as eager:
            model(torch.ones(2, 5)).sum()
        assert counts_by_kind(graph_collectives(recorder.forward[0].graph)) == {"all_gather": 2}
        assert counts_by_kind(eager) == {"all_gather": 4}
    torch._dynamo.reset()


def _reads_per_forward(rank: int, world: int) -> list[tuple[dict[str, int], int]]:
    results = []
    for module, arguments in (
        (nn.LSTM(3, 5, num_layers=2, bidirectional=True), (torch.ones(4, 2, 3),)),
        (nn.MultiheadAttention(6, 2), (torch.ones(4, 2, 6),) * 3),
    ):
        simple_fsdp(module, mesh(world))
        with record_collectives() as collectives:
            module(*arguments)
        results.append((counts_by_kind(collectives), sum(1 for _ in module.parameters())))
    return results


def test_a_module_that_reads_its_weights_many_times_gathers_them_once(workers):
    for results in workers(2).run(_reads_per_forward):
        for counts, parameters in results:
            assert counts == {"all_gather": parameters}


def _lora(rank: int, world: int) -> dict[str, int]:
    """A bf16 base without gradients under fp32 adapters: the case `frozen_base`, in two dtypes."""
    model = CASES["frozen_base"].module()
    model.base.to(torch.bfloat16)
    simple_fsdp(model, mesh(world), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    before = {name: p.to_local().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 5) * (rank + 1)
    with torch.autocast("cpu", torch.bfloat16), record_collectives() as forward:
        loss = model(x).float().pow(2).sum()
    assert {c.kind for c in forward} == {"all_gather"}
    with record_collectives() as backward:
        loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in ("down", "up"))
        if name in before:
            assert parameter.grad is None
            assert torch.equal(parameter.to_local(), before[name])
        else:
            assert parameter.grad.dtype == torch.float32
    reductions = [c for c in backward if c.kind != "all_gather"]
    assert {c.size_bytes for c in reductions} == {
        4 * 4 * 5,
        4 * 8 * 3,
    }  # down (3, 5) and up (7, 3), padded to even
    return counts_by_kind(reductions)


def test_frozen_parameters_take_no_part_in_backward(workers):
    assert workers(2).run(_lora) == [{"reduce_scatter": 2}] * 2


def cut_along(dim: int, local_shape: tuple[int, ...]) -> Callable[[nn.Module], nn.Module]:
    """Wrap with matrices cut along `dim`; the first one's shard has to have `local_shape`."""

    def wrap(model: nn.Module) -> nn.Module:
        simple_fsdp(model, mesh(2), shard_placement_fn=lambda p: Shard(dim) if p.dim() == 2 else None)
        assert tuple(next(model.parameters()).to_local().shape) == local_shape
        return model

    return wrap


def _placed(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)
    for dim, local_shape in ((1, (7, 3 - rank)), (-1, (7, 3 - rank)), (0, (4 - rank, 5))):
        check_against_reference(CASES["uneven"], rank, world, cut_along(dim, local_shape))
    check_against_reference(CASES["two_names"], rank, world, cut_along(1, (5, 2 - rank)), backend="aot_eager")


def test_shard_placement_fn_may_choose_an_uneven_dim(workers):
    workers(2).run(_placed)


class Watching(nn.Module):
    """Notes what its forward sees of its parameters."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            floating = value.is_floating_point() or value.is_complex()
            self.register_parameter(name, nn.Parameter(value, requires_grad=floating))
        self.names = list(parameters)
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self) -> None:
        self.seen = {name: getattr(self, name) for name in self.names}


ALL_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
)


def _read(rank: int, world: int) -> None:
    values = {
        f"{str(dtype).removeprefix('torch.')}_{len(shape)}": torch.arange(torch.Size(shape).numel())
        .reshape(shape)
        .to(dtype)
        for dtype in ALL_DTYPES
        for shape in ((), (1,), (5, 3))
    }
    model = simple_fsdp(Watching(**values), mesh(world))
    model()
    for name, value in values.items():
        seen = model.seen[name]
        assert type(seen) is torch.Tensor
        assert (seen.shape, seen.dtype, seen.is_contiguous()) == (value.shape, value.dtype, True)
        assert torch.equal(seen.to(torch.complex128), value.to(torch.complex128)), name
        assert seen.requires_grad == (value.is_floating_point() or value.is_complex())
        assert isinstance(getattr(model, name), DTensor), "outside of a forward the shards show"
        assert getattr(model, name) is model._parameters[name]
    with full_parameters(model):
        for name, value in values.items():
            assert torch.equal(getattr(model, name).to(torch.complex128), value.to(torch.complex128)), name
            assert not isinstance(getattr(model, name), DTensor)


def test_forward_reads_whole_tensors_of_every_dtype(workers):
    for world in (1, 2, 4):
        workers(world).run(_read)


class Branching(nn.Module):
    """Two parameters of one shape; each rank reads the one it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, name: str) -> torch.Tensor:
        return getattr(self, name).sum()


def _rank_dependent_count(rank: int, world: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = simple_fsdp(Branching(), DeviceMesh.from_group(group, "cpu"))
    try:
        loss = model("a")
        if rank == 0:
            loss = loss + model("b")
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_gather_that_only_one_rank_runs_ends_with_the_groups_timeout():
    """Its own processes: their collectives do not match any more."""
    with WorkerPool(2) as pool:
        start = time.monotonic()
        assert "no error" not in pool.run(_rank_dependent_count)
        assert time.monotonic() - start < 50


def _two_meshes(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)

    def wrap(model: nn.Module) -> nn.Module:
        simple_fsdp(model[0], mesh(2, 2))
        simple_fsdp(model[2], mesh(4), sharding_factor=1)
        assert type(model[0]) is type(model[2]), "equal modules share a class"
        assert [p.placements for p in model.parameters()] == [
            *[(Replicate(), Shard(0))] * 2,
            *[(Replicate(),)] * 2,
        ]
        return model

    check_against_reference(CASES["uneven"], rank, world, wrap)


def test_two_modules_of_one_class_keep_their_own_meshes(workers):
    workers(4).run(_two_meshes)


def _nested(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)

    def wrap(model: nn.Module) -> nn.Module:
        simple_fsdp(model[2], mesh(2, 2), shard_placement_fn=lambda p: Shard(p.dim() - 1))
        inner = dict(model[2].named_parameters())
        simple_fsdp(model, mesh(4), reshard_after_forward=False)
        assert dict(model[2].named_parameters()) == inner
        assert model[2]._parameters["weight"].device_mesh.ndim == 2
        assert model[0]._parameters["weight"].device_mesh.ndim == 1
        return model

    check_against_reference(CASES["uneven"], rank, world, wrap)


def test_an_inner_wrap_keeps_its_mesh_and_policy(workers):
    workers(4).run(_nested)


def _ignored(rank: int, world: int) -> None:
    model = Uneven()
    kept = model[2].weight
    simple_fsdp(model, mesh(world), ignored_params=[kept])
    assert model[2].weight is kept
    assert not isinstance(kept, DTensor)
    assert isinstance(model[2].bias, DTensor)
    with record_collectives() as collectives:
        model(torch.ones(2, 5) * (rank + 1)).sum().backward()
    assert counts_by_kind([c for c in collectives if c.kind != "all_gather"]) == {"reduce_scatter": 3}
    assert kept.grad is not None
    assert isinstance(model[2]._parameters["weight"], nn.Parameter)


def test_ignored_parameters_stay_as_they_are(workers):
    workers(2).run(_ignored)


def _attributes(rank: int, world: int) -> None:
    model = nn.Linear(3, 4)
    model.weight.is_expert = True
    simple_fsdp(model, mesh(world))
    assert model.weight.is_expert


def test_attributes_of_a_parameter_move_to_its_shard(workers):
    workers(2).run(_attributes)
