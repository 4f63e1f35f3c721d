"""A call that cannot be carried out names what is wrong and leaves the module as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from simplefsdp import MixedPrecisionPolicy, simple_fsdp
from tests.helpers.worlds import fake_process_group


def snapshot(module: nn.Module) -> Any:
    """Everything a half-finished call could have changed."""

    def attributes(owner: Any) -> list[tuple[str, int]]:
        # Containers are compared by what they hold.
        return [
            (
                name,
                id(value)
                if not isinstance(value, dict)
                else hash(tuple((k, id(v)) for k, v in value.items())),
            )
            for name, value in vars(owner).items()
        ]

    return [
        (
            name,
            type(owner),
            attributes(owner),
            [(key, id(p), attributes(p) if p is not None else None) for key, p in owner._parameters.items()],
            [(key, id(b)) for key, b in owner._buffers.items()],
        )
        for name, owner in module.named_modules()
    ]


class Last(nn.Module):
    """A good layer, then `last`, so that a call gets somewhere before it fails."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), last
        self.register_buffer("table", torch.ones(3))


class HeldTwice(nn.Module):
    def __init__(self, hold: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.cache = hold(self.weight)


class HidingProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._parameters["weight"] = nn.Parameter(torch.ones(3))

    @property
    def weight(self) -> torch.Tensor:
        return self._parameters["weight"] * 2


def with_gradient() -> nn.Module:
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    return module


def with_hook(register: str) -> nn.Module:
    module = nn.Linear(2, 2)
    getattr(module.bias, register)(lambda value: None)
    return module


def on_own_mesh() -> nn.Module:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    module = nn.Module()
    local = torch.ones(2, 2)
    module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
    return module


@dataclass(frozen=True)
class Refusal:
    """What is passed, and the error that has to say so."""

    module: Callable[[], nn.Module]
    error: type[Exception]
    message: str
    arguments: dict[str, Any] = field(default_factory=dict)


def fine() -> nn.Module:
    return nn.Linear(3, 5)


def fails(_: nn.Parameter) -> Shard:
    raise KeyError("the user's own mistake")


class Aliased(nn.Module):
    """Two parameters, made of one tensor of 6 elements."""

    def __init__(self, a: Callable[[torch.Tensor], torch.Tensor], b: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        memory = torch.arange(6.0).reshape(2, 3)
        self.a, self.b = nn.Parameter(a(memory)), nn.Parameter(b(memory))


ALIASED = r"parameters 'last\.a' and 'last\.b' are different objects that share memory: .*clone"
HELD = r"attribute 'last\.cache' holds memory of parameter 'last\.weight'"
REFUSALS = {
    "lazy": Refusal(lambda: nn.LazyLinear(3), ValueError, r"'last\.weight' is not initialised yet"),
    "sparse": Refusal(
        lambda: nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse())]),
        TypeError,
        r"'last\.0' has layout torch\.sparse_coo: only dense parameters .*ignored_params",
    ),
    "max_norm": Refusal(
        lambda: nn.Embedding(6, 3, max_norm=0.5),
        ValueError,
        r"'last\.weight': an Embedding with max_norm=0\.5 changes its weight in forward.*max_norm=None or list",
    ),
    "max_norm of a bag": Refusal(
        lambda: nn.EmbeddingBag(6, 3, max_norm=1.0), ValueError, r"EmbeddingBag with max_norm=1\.0"
    ),
    "gradient": Refusal(
        with_gradient, ValueError, r"'last\.weight' has a gradient: call zero_grad\(\) before"
    ),
    "hook": Refusal(
        lambda: with_hook("register_hook"),
        ValueError,
        r"'last\.bias' has gradient hooks: register them after",
    ),
    "post-accumulate hook": Refusal(
        lambda: with_hook("register_post_accumulate_grad_hook"),
        ValueError,
        r"'last\.bias' has gradient hooks",
    ),
    "property": Refusal(
        HidingProperty, TypeError, r"'last\.weight': HidingProperty defines a property of that name.*rename"
    ),
    "held in a tuple": Refusal(
        lambda: HeldTwice(lambda w: (w, 1)),
        ValueError,
        r"'last\.cache' holds memory of parameter 'last\.weight' outside .*nn\.ParameterList or nn\.ParameterDict",
    ),
    "held in a set": Refusal(lambda: HeldTwice(lambda w: {w}), ValueError, HELD),
    "held deeply": Refusal(lambda: HeldTwice(lambda w: {"all": [(w,)]}), ValueError, HELD),
    "held by a closure": Refusal(lambda: HeldTwice(lambda w: lambda x: x * w), ValueError, HELD),
    "held by a default": Refusal(lambda: HeldTwice(lambda w: [lambda x, w=w: x * w]), ValueError, HELD),
    "held by a partial": Refusal(
        lambda: HeldTwice(lambda w: functools.partial(torch.add, other={"w": w})), ValueError, HELD
    ),
    "held as its data": Refusal(lambda: HeldTwice(lambda w: w.data), ValueError, HELD),
    "held as a view": Refusal(lambda: HeldTwice(lambda w: w[1:].unsqueeze(0)), ValueError, HELD),
    "held as a buffer": Refusal(lambda: HeldTwice(lambda w: nn.Buffer(w.detach())), ValueError, HELD),
    "the same memory twice": Refusal(lambda: Aliased(lambda m: m, lambda m: m), ValueError, ALIASED),
    "overlapping slices": Refusal(
        lambda: Aliased(lambda m: m.view(6)[:4], lambda m: m.view(6)[3:]), ValueError, ALIASED
    ),
    "a matrix and one of its columns": Refusal(
        lambda: Aliased(lambda m: m, lambda m: m[:, 1]), ValueError, ALIASED
    ),
    "a matrix and its transpose": Refusal(lambda: Aliased(lambda m: m, lambda m: m.t()), ValueError, ALIASED),
    "script": Refusal(
        lambda: torch.jit.script(nn.Linear(2, 2)), TypeError, r"module 'last' is a torch\.jit\.ScriptModule"
    ),
    "tensor-parallel mesh of another root": Refusal(
        on_own_mesh,
        ValueError,
        r"'last\.weight' is a DTensor on the mesh .*tp=4.*cannot be joined with .*dp_shard=4",
    ),
    "placement out of range": Refusal(
        fine,
        ValueError,
        r"chose dim 2 for parameter 'last\.weight', which has shape \(5, 3\)",
        {"shard_placement_fn": lambda p: Shard(2) if p.shape == (5, 3) else None},
    ),
    "placement of another type": Refusal(
        fine,
        TypeError,
        r"returned 0 for parameter 'last\.weight' of shape \(5, 3\); return .*Shard\(dim\), or None",
        {"shard_placement_fn": lambda p: 0 if p.shape == (5, 3) else None},
    ),
    "placement function fails": Refusal(fine, KeyError, "own mistake", {"shard_placement_fn": fails}),
    "factor": Refusal(
        fine, ValueError, r"must divide the 4 .*possible here: 1, 2, 4", {"sharding_factor": 3}
    ),
    "partial reshard": Refusal(
        fine,
        TypeError,
        r"must be True or False, got 2; .*use sharding_factor for hybrid",
        {"reshard_after_forward": 2},
    ),
    "policy of another type": Refusal(
        fine,
        TypeError,
        r"mp_policy must be a simplefsdp\.MixedPrecisionPolicy, got dtype; for example",
        {"mp_policy": torch.bfloat16},
    ),
    "policy of integers": Refusal(
        fine,
        TypeError,
        r"mp_policy\.reduce_dtype must be a floating-point torch\.dtype or None, got torch\.int32",
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.int32)},
    ),
    "passes of another type": Refusal(
        fine, TypeError, r"passes must be an inductor_passes\.PassConfig, got str", {"passes": "auto"}
    ),
    "ignored names": Refusal(
        fine, TypeError, r"ignored_params must hold parameters, got str", {"ignored_params": ["last.weight"]}
    ),
}


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    before = snapshot(module)
    yield
    assert snapshot(module) == before


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_call_changes_nothing(name):
    refusal = REFUSALS[name]
    with fake_process_group(0, 4):
        model = Last(refusal.module())
        with unchanged(model), pytest.raises(refusal.error, match=refusal.message):
            simple_fsdp(model, **refusal.arguments)


def test_what_is_refused_works_once_it_is_ignored():
    with fake_process_group(0, 4):
        for name in ("max_norm", "gradient", "hook", "property", "held deeply", "sparse"):
            model = Last(REFUSALS[name].module())
            simple_fsdp(model, ignored_params=list(model.last.parameters()))
            assert isinstance(model.first.weight, DTensor)
            assert not any(isinstance(p, DTensor) for p in model.last.parameters())


def test_memory_shared_with_an_ignored_parameter_is_refused():
    with fake_process_group(0, 4):
        model = Last(Aliased(lambda m: m, lambda m: m))
        with unchanged(model), pytest.raises(ValueError, match=ALIASED):
            simple_fsdp(model, ignored_params=[model.last.b])
        simple_fsdp(model, ignored_params=[model.last.a, model.last.b])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda m: m[0], lambda m: m[1]),
        (lambda m: m[:, :1], lambda m: m[:, 1:]),  # interleaved
        (lambda m: m.view(6)[::2], lambda m: m.view(6)[1::2]),
        (lambda m: m[:0], lambda m: m),
    ],
)
def test_disjoint_parts_of_one_buffer_become_shards_of_their_own(a, b):
    memory = torch.arange(6.0).reshape(2, 3)
    with fake_process_group(0, 1):
        model = simple_fsdp(Aliased(a, b))
        assert torch.equal(model.a.to_local(), a(memory))
        assert torch.equal(model.b.to_local(), b(memory))


class CallsItself(nn.Module):
    """A recursive closure, one without a value, and one that reads the parameter through the module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

        def recursive(n):
            return n and recursive(n - 1)

        def unfinished():
            return later

        self.functions = [recursive, unfinished, lambda x: x * self.weight]
        if len(self.functions) == 0:
            later = 0


def test_functions_that_hold_no_parameter_are_fine():
    with fake_process_group(0, 4):
        simple_fsdp(CallsItself())


def test_a_second_wrap_is_refused_and_the_first_stays():
    with fake_process_group(0, 4):
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 3))
        simple_fsdp(model)
        with unchanged(model):
            with pytest.raises(ValueError, match="this Sequential is wrapped by simple_fsdp already"):
                simple_fsdp(model)
            with pytest.raises(ValueError, match="this Linear is wrapped by simple_fsdp already"):
                simple_fsdp(model[1])
            # Holds no parameter itself: what is below it belongs to the first call.
            with pytest.raises(
                ValueError, match=r"Sequential is part of a model .*wrap inner modules before outer"
            ):
                simple_fsdp(model[0])
            with pytest.raises(ValueError, match="is part of a model that simple_fsdp has wrapped already"):
                simple_fsdp(nn.ModuleList([nn.Linear(2, 2), model[0]]))


def test_layers_first_then_the_model_is_allowed():
    with fake_process_group(0, 4):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        for layer in model:
            simple_fsdp(layer)
        layers = snapshot(model[0]), snapshot(model[1])
        simple_fsdp(model)
        assert (snapshot(model[0]), snapshot(model[1])) == layers


def test_a_tie_across_two_calls_is_refused_with_both_names():
    with fake_process_group(0, 4):
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        simple_fsdp(model[0])
        with (
            unchanged(model),
            pytest.raises(ValueError, match=r"'1\.weight' is tied to 'weight', .*both modules in one call"),
        ):
            simple_fsdp(model)


def test_a_compiled_module_and_a_function_are_refused():
    with fake_process_group(0, 4):
        with pytest.raises(ValueError, match=r"must come before torch\.compile"):
            simple_fsdp(torch.compile(nn.Linear(2, 2), backend="eager"))
        with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got function"):
            simple_fsdp(fine)


def test_models_that_synchronise_gradients_themselves_are_refused():
    with fake_process_group(0, 2):
        with pytest.raises(ValueError, match="holds a DistributedDataParallel"):
            simple_fsdp(nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))))
        with pytest.raises(ValueError, match="holds a FSDPLinear"):
            simple_fsdp(fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,))))


def test_what_would_crash_or_fail_later_is_refused():
    with fake_process_group(0, 2):
        model = simple_fsdp(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
        with pytest.raises(RuntimeError, match="call it before simple_fsdp"):
            model.share_memory()
        with pytest.raises(
            ValueError, match=r"DTensor of shape \(6, 4\) to the sharded parameter '1.weight'"
        ):
            model[1].weight = model[0].weight
