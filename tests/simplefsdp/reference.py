"""The unsharded reference: one copy of a model for each rank, fed that rank's batches, gradients averaged.

Owns: running a case plainly and sharded, and comparing loss, gradients, parameters and buffers step by step. Must not
know: how anything is sharded; it shares no code with the package under test.

`check_against_reference` is what a worker function calls. Values are float64 unless a policy says otherwise, so that a
factor of W, a row out of place or a dropped term cannot hide in a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

STEPS = 3
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Case:
    """A module and how to feed it.

    Attributes:
        build: makes the module; runs under a fixed seed, so it makes the same one every time.
        batch: makes the module's arguments from a generator that is seeded by rank and step.
        rtol: relative tolerance; the default is for float64.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Any, ...]]
    rtol: float = 1e-9

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def arguments(self, rank: int, step: int) -> tuple[Any, ...]:
        return self.batch(torch.Generator().manual_seed(1000 * step + rank))


@dataclass
class Record:
    """What one rank saw: a loss and gradients for each step, parameters and buffers after it. Tensors are whole."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    parameters: list[dict[str, torch.Tensor]] = field(default_factory=list)
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def note(self, model: nn.Module) -> None:
        self.parameters.append({name: whole(param) for name, param in model.named_parameters()})
        self.buffers.append({name: buffer.clone() for name, buffer in model.named_buffers()})


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy of the whole tensor, whether or not it is sharded; a collective if it is."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def loss_of(output: Any) -> torch.Tensor:
    """A loss that weighs every element of every output differently."""
    losses = []
    for leaf in tree_leaves(output):
        if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            continue
        value = leaf.abs() if leaf.is_complex() else leaf.float() if leaf.dtype.itemsize < 4 else leaf
        weight = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
        losses.append((value * value * weight).sum() + (value * weight).sum())
    return torch.stack(losses).sum()


def train_reference(
    case: Case, world_size: int, policy: MixedPrecisionPolicy | None = None, steps: int = STEPS
) -> list[Record]:
    """Train `world_size` plain copies in step; return what each rank has to see.

    With a policy, each rank's forward uses parameters and inputs cast to `param_dtype`, and gradients are averaged in
    `reduce_dtype`: (sum over ranks) / W, rounded once more to the parameter's dtype.
    """
    models = [case.module() for _ in range(world_size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LEARNING_RATE) for model in models]
    records = [Record() for _ in range(world_size)]
    for step in range(steps):
        for rank, model in enumerate(models):
            loss, gradients = _loss_and_gradients(model, case.arguments(rank, step), policy)
            records[rank].losses.append(loss)
            records[rank].gradients.append(gradients)
        mean = {
            name: _mean([record.gradients[-1][name] for record in records], policy, parameter.dtype)
            for name, parameter in models[0].named_parameters()
        }
        for record, model, optimizer in zip(records, models, optimizers, strict=True):
            record.gradients[-1] = mean
            for name, parameter in model.named_parameters():
                parameter.grad = None if mean[name] is None else mean[name].clone()
            optimizer.step()
            record.note(model)
    return records


def train_sharded(
    case: Case,
    rank: int,
    model: nn.Module,
    call: Callable[..., Any] | None = None,
    steps: int = STEPS,
) -> Record:
    """Train a wrapped model on this rank's batches; `call` runs it (the compiled module, for instance)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    record = Record()
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of((model if call is None else call)(*case.arguments(rank, step)))
        loss.backward()
        record.losses.append(loss.detach())
        record.gradients.append(
            {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}
        )
        optimizer.step()
        record.note(model)
    return record


def check_same(actual: Record, expected: Record, rtol: float) -> None:
    """Raise AssertionError, naming step and tensor, unless both ranks saw the same.

    Args:
        actual, expected: what the wrapped model and the reference saw.
        rtol: tolerance relative to each tensor's largest element (or to 0.001, where all are smaller), at least two
            units in the last place of its dtype; 0 asks for equal bits.
    """

    def check(where: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        floating = theirs.is_floating_point() or theirs.is_complex()
        relative = max(rtol, 2 * torch.finfo(theirs.dtype).eps) if floating and rtol > 0 else 0.0
        largest = max(theirs.abs().max().item(), 1e-3) if floating and theirs.numel() > 0 else 0.0
        torch.testing.assert_close(
            ours, theirs, rtol=0.0, atol=relative * largest, msg=lambda text: f"{where}: {text}"
        )

    for step, (ours, theirs) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        check(f"loss of step {step}", ours, theirs)
    for what in ("gradients", "parameters", "buffers"):
        for step, (ours, theirs) in enumerate(
            zip(getattr(actual, what), getattr(expected, what), strict=True)
        ):
            assert list(ours) == list(theirs), f"{what} of step {step}: {list(ours)} != {list(theirs)}"
            for name, tensor in theirs.items():
                assert (ours[name] is None) == (tensor is None), (
                    f"{what} of step {step}: {name} is {ours[name]}, not {tensor}"
                )
                if tensor is not None:
                    check(f"{what} of step {step}: {name}", ours[name], tensor)


def check_same_interface(model: nn.Module, plain: nn.Module) -> None:
    """Raise unless names, order, shapes, dtypes, frozenness and ties of `model` are those of `plain`."""

    def described(module: nn.Module) -> list[Any]:
        first: dict[int, str] = {}
        return [
            (
                name,
                first.setdefault(id(p), name),
                tuple(p.shape),
                p.dtype,
                p.requires_grad,
                isinstance(p, nn.Parameter),
            )
            for name, p in module.named_parameters(remove_duplicate=False)
        ]

    assert described(model) == described(plain)
    assert [type(m).__name__ for m in model.modules()] == [type(m).__name__ for m in plain.modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        assert parameter.to_local().is_contiguous()


def check_against_reference(
    case: Case,
    rank: int,
    world_size: int,
    wrap: Callable[[nn.Module], nn.Module],
    *,
    backend: str | None = None,
    policy: MixedPrecisionPolicy | None = None,
    bitwise: bool = False,
) -> None:
    """Wrap, train and compare a case in every respect.

    Args:
        case: the model and its data.
        rank: this rank.
        world_size: number of ranks.
        wrap: calls `simple_fsdp`.
        backend: compile with it, fullgraph; None runs eagerly.
        policy: what `wrap` passes as `mp_policy`.
        bitwise: compare bits instead of applying the case's tolerance.
    """
    expected = train_reference(case, world_size, policy)[rank]
    model = case.module()
    assert wrap(model) is model
    check_same_interface(model, case.module())
    call = None if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    check_same(train_sharded(case, rank, model, call), expected, 0.0 if bitwise else case.rtol)


def _loss_and_gradients(
    model: nn.Module, arguments: tuple[Any, ...], policy: MixedPrecisionPolicy | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    for parameter in model.parameters():
        parameter.grad = None
    if policy is None:
        loss = loss_of(model(*arguments))
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}
    if policy.cast_forward_inputs:
        arguments = _cast(arguments, policy.param_dtype)
    leaves = {
        name: _cast(p.detach().clone(), policy.param_dtype).requires_grad_(p.requires_grad)
        for name, p in model.named_parameters()
    }
    loss = loss_of(_cast(functional_call(model, leaves, arguments), policy.output_dtype))
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def _mean(
    gradients: list[torch.Tensor | None], policy: MixedPrecisionPolicy | None, dtype: torch.dtype
) -> torch.Tensor | None:
    present = [gradient.to_dense() for gradient in gradients if gradient is not None]  # some come sparse
    assert len(present) in (0, len(gradients)), "a parameter is used on some ranks only"
    if not present:
        return None
    if policy is not None and policy.reduce_dtype is not None and not present[0].is_complex():
        present = [gradient.to(policy.reduce_dtype) for gradient in present]
    return (torch.stack(present).sum(0) / len(present)).to(dtype)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
