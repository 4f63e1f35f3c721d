"""Mixed precision: which dtype each value has, and that the values are those of the unsharded reference.

Elsewhere: `test_fsdp2_parity` (bit for bit with FSDP2), `test_accumulate` (small gradients in a large sum).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from simplefsdp import MixedPrecisionPolicy, api, no_sync, sharded_parameters, simple_fsdp
from tests.helpers.collectives import graph_collectives, record_collectives
from tests.helpers.graphs import GraphRecorder
from tests.helpers.meshes import mesh
from tests.helpers.worlds import fake_process_group
from tests.simplefsdp.reference import Case, check_against_reference, loss_of
from tests.simplefsdp.zoo import CASES, features

BF16_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
POLICIES = {
    "bf16, reduce fp32": BF16_FP32,
    "bf16": MixedPrecisionPolicy(torch.bfloat16),
    "fp32, reduce bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "bf16, reduce fp32, out fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
    "bf16, inputs as they are": MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, cast_forward_inputs=False
    ),
}

# -- values ---------------------------------------------------------------------------------------------------


class Casting(nn.Module):
    """Takes its input in any dtype: a layer for the policy whose inputs nobody casts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = CASES["uneven"].build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.to(self.net[0].weight.dtype))


CASTING = Case(Casting, features(4, 5))


def _trains(rank: int, world: int, name: str, backends: tuple[str | None, ...]) -> None:
    policy = POLICIES[name]
    for backend in backends:
        check_against_reference(
            CASTING,
            rank,
            world,
            lambda model: simple_fsdp(model, mesh(world), mp_policy=policy),
            backend=backend,
            policy=policy,
            bitwise=True,
        )


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_the_bits_of_the_reference(workers, name):
    """Two ranks: with more, the order of a sum decides its last bit. One: the policy holds without a collective."""
    workers(2).run(_trains, name, (None,))
    workers(1).run(_trains, name, (None,))


def test_a_compiled_policy_gives_the_bits_of_the_reference(workers):
    workers(2).run(_trains, "bf16, reduce fp32", ("aot_eager",))


MUTATIONS: dict[str, dict[str, Any]] = {
    "no cast before the gather": {"compute_dtype": torch.float32},
    "reduction in the compute dtype": {"reduce_dtype": None},
    "reduction in a lower dtype": {"reduce_dtype": torch.float16},
}


def _mutated(rank: int, world: int, mutation: str) -> None:
    real = api.make_spec

    def make_spec(*args: Any) -> Any:
        spec, *placed = real(*args)
        return dataclasses.replace(spec, **MUTATIONS[mutation]), *placed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "make_spec", make_spec)
        with pytest.raises(AssertionError):
            _trains(rank, world, "bf16, reduce fp32", (None,))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_catches(workers, mutation):
    workers(2).run(_mutated, mutation)


class Ones(nn.Module):
    """A loss whose gradient is 1 for every element of its parameters, cut and uncut."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.scalar = nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(()))

    def forward(self) -> torch.Tensor:
        return self.rows.sum() + self.scalar


def _mean_of_ones(rank: int, world: int) -> None:
    shapes: tuple[tuple[tuple[int, ...], int | None], ...] = (((4,), None), ((4,), 1), ((2, 2), None))
    policies = (
        MixedPrecisionPolicy(),
        BF16_FP32,
        MixedPrecisionPolicy(torch.bfloat16),
        MixedPrecisionPolicy(torch.float16),
    )
    waits: tuple[Callable[[nn.Module], Any], ...] = (
        lambda model: contextlib.nullcontext(),
        no_sync,
        lambda model: no_sync(model, replicas_only=True),
    )
    for (shape, factor), policy in itertools.product(shapes, policies):
        model = simple_fsdp(Ones(), mesh(*shape), sharding_factor=factor, mp_policy=policy)
        for wait, micro_batches in ((waits[0], 1), *((wait, 3) for wait in waits)):
            model.zero_grad()
            for _ in range(micro_batches - 1):
                with wait(model):
                    model().backward()
            model().backward()
            for parameter in model.parameters():
                grad = parameter.grad.full_tensor()
                assert grad.dtype == torch.float32
                assert torch.equal(grad, torch.full_like(grad, micro_batches)), (shape, factor, policy, grad)


def test_ones_on_every_rank_average_to_one_in_every_mode(workers):
    workers(4).run(_mean_of_ones)


# -- dtypes ---------------------------------------------------------------------------------------------------


def _is_fp32_and_sharded(model: nn.Module) -> bool:
    return all(
        p.dtype == p.grad.dtype == torch.float32 and p.grad.placements == p.placements
        for p in model.parameters()
    )


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)])
@pytest.mark.parametrize(
    ("policy", "gathered", "reduced"),
    [
        (MixedPrecisionPolicy(), torch.float32, torch.float32),
        (BF16_FP32, torch.bfloat16, torch.float32),
        (MixedPrecisionPolicy(torch.bfloat16), torch.bfloat16, torch.bfloat16),
        (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), torch.float32, torch.bfloat16),
    ],
)
def test_collectives_run_in_the_policys_dtypes(shape, policy, gathered, reduced):
    with fake_process_group(0, 4):
        model = simple_fsdp(nn.Linear(4, 6), init_device_mesh("cpu", shape), mp_policy=policy)
        with record_collectives() as collectives:
            loss_of(model(torch.ones(2, 4))).backward()
        gathers = {c.dtype for c in collectives if c.kind == "all_gather"}
        assert gathers == ({gathered} if shape[-1] > 1 else set())
        assert {c.dtype for c in collectives if c.kind != "all_gather"} == {reduced}
        assert _is_fp32_and_sharded(model)


def test_compiled_collectives_run_in_the_policys_dtypes():
    torch._dynamo.reset()
    with fake_process_group(0, 4):
        model = simple_fsdp(nn.Linear(4, 6), init_device_mesh("cpu", (2, 2)), mp_policy=BF16_FP32)
        recorder = GraphRecorder()
        torch.compile(model, backend=recorder, fullgraph=True)(torch.ones(2, 4)).sum().backward()
        forward, backward = (graph_collectives(g[0].graph) for g in (recorder.forward, recorder.backward))
        assert [(c.kind, c.dtype) for c in forward] == [("all_gather", torch.bfloat16)] * 2
        for kind in ("reduce_scatter", "all_reduce"):
            assert [c.dtype for c in backward if c.kind == kind] == [torch.float32] * 2
        assert _is_fp32_and_sharded(model)
    torch._dynamo.reset()


class Recording(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.complex = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.count = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)
        self.register_buffer("table", torch.ones(4))
        self.inner = nn.Linear(4, 4)
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        self.seen = {
            "parameters": [self.weight.dtype, self.complex.dtype, self.count.dtype, self.inner.weight.dtype],
            "buffer": self.table.dtype,
            "inputs": torch.utils._pytree.tree_map(
                lambda leaf: getattr(leaf, "dtype", leaf), ((x, *rest), named)
            ),
        }
        return self.weight * x, {"complex": self.complex, "count": self.count, "text": "as it is"}


def test_inputs_are_cast_where_they_float_and_nowhere_else():
    arguments = (
        torch.ones(4),
        torch.arange(4),
        "text",
        [torch.ones(4, dtype=torch.float64), (None, torch.ones(4))],
    )
    named = {"mask": torch.ones(4, dtype=torch.bool), "nested": {"x": torch.ones(4), "z": torch.ones(4) * 1j}}
    bf16 = torch.bfloat16
    cast = (
        (bf16, torch.int64, "text", [bf16, (None, bf16)]),
        {"mask": torch.bool, "nested": {"x": bf16, "z": torch.complex64}},
    )
    as_given = (
        (torch.float32, torch.int64, "text", [torch.float64, (None, torch.float32)]),
        {"mask": torch.bool, "nested": {"x": torch.float32, "z": torch.complex64}},
    )
    with fake_process_group(0, 2):
        for policy, inputs in (
            (BF16_FP32, cast),
            (MixedPrecisionPolicy(bf16, cast_forward_inputs=False), as_given),
            (MixedPrecisionPolicy(), as_given),
            (MixedPrecisionPolicy(reduce_dtype=bf16), as_given),
        ):
            model = simple_fsdp(Recording(), mp_policy=policy)
            model(*arguments, **named)
            weight = policy.param_dtype or torch.float32
            assert model.seen["inputs"] == inputs
            assert model.seen["parameters"] == [weight, torch.complex64, torch.int32, weight]
            assert model.seen["buffer"] == torch.float32
            assert (arguments[0].dtype, named["nested"]["x"].dtype) == (torch.float32, torch.float32)


def test_outputs_are_cast_where_they_float():
    with fake_process_group(0, 2):
        for output, expected in ((torch.float64, torch.float64), (None, torch.bfloat16)):
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output)
            out, rest = simple_fsdp(Recording(), mp_policy=policy)(torch.ones(4))
            assert out.dtype == expected
            assert (rest["complex"].dtype, rest["count"].dtype) == (torch.complex64, torch.int32)
            assert rest["text"] == "as it is"


def test_only_the_wrapped_root_casts():
    """A fp32 island inside a bf16 model: each call's policy holds for the parameters that call has sharded."""
    with fake_process_group(0, 2):
        model = nn.Sequential(nn.Linear(4, 4), Recording(), nn.Linear(4, 4))
        island = model[1]
        simple_fsdp(island, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16))
        model[1].register_forward_hook(lambda module, args, out: out[0])
        simple_fsdp(model, mp_policy=BF16_FP32)
        assert model(torch.ones(2, 4)).dtype == torch.bfloat16
        assert island.seen["inputs"] == ((torch.float32,), {})
        assert island.seen["parameters"][0] == torch.float32


class Averaging(nn.Module):
    """Keeps a running mean in a buffer, as normalisation layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.add_(x)
        return self.weight * x


def _keeps_buffers(rank: int, world: int) -> torch.Tensor:
    model = Averaging()
    buffer = model.mean
    simple_fsdp(model, mesh(world), mp_policy=BF16_FP32)
    model(torch.full((4,), 1.0 + rank))
    assert model.mean is buffer
    assert model.mean.dtype == torch.float32
    return model.mean


def test_buffers_keep_their_dtype_and_each_ranks_updates(workers):
    assert [mean.tolist() for mean in workers(2).run(_keeps_buffers)] == [[1.0] * 4, [2.0] * 4]


# -- tensor parallel ------------------------------------------------------------------------------------------


class ReplicatedNorm(nn.Module):
    """A weight replicated over tensor-parallel ranks that each scale their own part of a sequence with it."""

    def __init__(self, tp: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(5), tp, [Replicate()], src_data_rank=None))

    def forward(self, x: DTensor) -> DTensor:
        return x * self.weight


def _tensor_parallel(rank: int, world: int, policy: MixedPrecisionPolicy) -> tuple[list[Any], torch.Tensor]:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = simple_fsdp(ReplicatedNorm(both["tp"]), both["dp"], mp_policy=policy)
    x = DTensor.from_local(torch.full((2, 5), 1.0 + rank), both["tp"], [Shard(0)], run_check=False)
    with record_collectives() as collectives:
        out = model(x)
        assert isinstance(out, DTensor)
        assert tuple(out.shape) == (4, 5)
        out.to_local().float().sum().backward()
        grad = model.weight.grad.full_tensor()
    tp_ranks = tuple(sorted(both["tp"].mesh.tolist()))
    return [(c.kind, c.dtype) for c in collectives if c.ranks == tp_ranks], grad


def test_reductions_over_tensor_parallel_ranks_keep_the_reduce_dtype(workers):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for over_tp, grad in workers(4).run(_tensor_parallel, policy):
        assert over_tp == [("all_reduce", torch.float32)]
        assert grad.dtype == torch.float32
        # Two rows of (1 + rank): the sum over tensor-parallel ranks, then the mean over data-parallel ones.
        assert grad.tolist() == [2 * (1 + 2 + 3 + 4) / 2] * 5


# -- initialisation --------------------------------------------------------------------------------------------

INITIALISERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.03, b=0.03),
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "in place on data": lambda w: w.data.normal_(2.0, 0.5),
    "constant": lambda w: nn.init.constant_(w, 3.0),
}


def _initialises(rank: int, world: int) -> None:
    for shape, (name, initialise) in itertools.product(((4,), (2, 2)), INITIALISERS.items()):
        torch.manual_seed(5)
        expected = [torch.empty(6, 5), torch.empty(6, 5)]
        for weight in expected:
            initialise(weight)
        model = simple_fsdp(nn.Sequential(*(nn.Linear(5, 6, bias=False) for _ in range(2))), mesh(*shape))
        torch.manual_seed(5)
        with sharded_parameters(model):
            for layer in model:
                assert isinstance(layer.weight, DTensor)
                initialise(layer.weight)
        first, second = (p.full_tensor() for p in model.parameters())
        assert torch.equal(first, expected[0]), name
        assert torch.equal(second, expected[1]), name
        if name != "constant":
            assert not torch.equal(first, second), "a second call draws other numbers"
            assert not torch.equal(first[:2], first[2:4]), "other ranks draw other numbers"


def test_sharded_initialisation_gives_the_numbers_of_the_whole(workers):
    workers(4).run(_initialises)


def _initialised_before(rank: int, world: int) -> None:
    torch.manual_seed(5)
    plain = nn.Linear(5, 6)
    torch.manual_seed(5)
    model = simple_fsdp(nn.Linear(5, 6), mesh(world))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)


def test_what_was_initialised_before_wrapping_stays(workers):
    workers(4).run(_initialised_before)
