"""`simplefsdp.explain`: from a model and its inputs to a report.

Owns the choice of world (the running process group, or an imagined one) and of the passes' setup.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from inductor_passes.config import PassConfig
from inductor_passes.costs.agree import find_profile
from inductor_passes.costs.profiles import load_profile
from inductor_passes.hooks import JointHook
from inductor_passes.install import installed, make_setup
from inductor_passes.setups import Setup
from simplefsdp import _compat
from simplefsdp.api import simple_fsdp
from simplefsdp.explainer.capture import RECOMPILE, Capture, Interruption
from simplefsdp.explainer.report import Report
from simplefsdp.explainer.runs import Run
from simplefsdp.explainer.world import fake_copy, fake_inputs, fake_parameters
from simplefsdp.garbage import rare_collections
from simplefsdp.parametrize import is_wrapped, slots_of

__all__ = ["explain"]

_PLAIN = int | float | str | bool | None
"""What an output may hold beside tensors."""
_ADVISING_LOGGERS = ("torch._dynamo", "torch._higher_order_ops")  # torch 2.11 to 2.14


def explain(
    model: nn.Module,
    *inputs: Any,
    ranks: int | None = None,
    profile: str | None = None,
    wrap: Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    title: str | None = None,
    eager: bool = False,
    dumps: bool = True,
) -> Report:
    """Show what the passes make of one training step of a model, and what it costs on modelled hardware.

    Nothing is executed, nothing is communicated and no tensor memory is taken: the step is traced with fake tensors.
    Parameters, gradients and buffers of `model` are left as they are.

    Args:
        model: a model that `simple_fsdp` has wrapped, to explain on the process group that runs; or an unwrapped one,
            with `ranks`, to explain on a process group that does not exist. It may be on the meta device.
        inputs: arguments of the model; only shapes and dtypes count.
        ranks: size of the imagined process group.
        profile: hardware profile to model with: a shipped name or the path of a profile file. None takes the one the
            model was wrapped with; of an unwrapped model, that of its `PassConfig`.
        wrap: keyword arguments of `simple_fsdp` for an unwrapped model: `sharding_factor`, `mp_policy`, `passes`, ...
        loss: from the model's output to a scalar; None starts backward at every output that needs a gradient.
        title: first words of the report; None is the class of the model.
        eager: also read what eager mode would run, into `Report.eager`.
        dumps: keep each graph before and after each pass, in `Report.dumps`. False is faster: only plans are made.

    Returns:
        The report.

    Raises:
        ValueError: `ranks` for a wrapped model, or none for an unwrapped one; a profile that does not exist.
        RuntimeError: a process group runs and `ranks` asks for another; the model cannot be traced.
    """
    model = getattr(model, "_orig_mod", model)
    wrapped = any(map(is_wrapped, model.modules()))
    if wrapped and (ranks is not None or wrap):
        raise ValueError(
            "explain: the model is wrapped already, on its own process group: leave out ranks and wrap"
        )
    if not wrapped and ranks is None:
        raise ValueError(
            "explain: wrap the model with simple_fsdp first, or give ranks= to imagine a process group"
        )
    if profile is not None:
        load_profile(profile)  # a wrong name is reported before anything is traced
    mode = _compat.fake_mode()
    name = title or type(model).__name__
    if wrapped:
        setups, pinned = _installed_setups(profile)
        with fake_parameters(model, mode):
            capture, runs = _trace(model, fake_inputs(inputs, mode), setups, pinned, loss, eager, dumps)
        ranks = dist.get_world_size()
    else:
        assert ranks is not None
        with _imagined_world(ranks):
            options = dict(wrap or {})
            passes = options.get("passes") or PassConfig()
            if profile is not None:
                passes = dataclasses.replace(passes, profile=profile)
            options["passes"] = passes
            setups, pinned = (make_setup(passes),), True
            copied = simple_fsdp(fake_copy(model, mode), **options)
            capture, runs = _trace(copied, fake_inputs(inputs, mode), setups, pinned, loss, eager, dumps)
    return Report(
        title=f"{name} on {ranks} ranks",
        profile=", ".join(capture.profiles) or setups[-1].profile.name,
        graphs=tuple(capture.graphs),
        runs=runs,
        dumps=tuple(capture.dumps),
        interruptions=tuple(capture.interruptions),
        eager=tuple(capture.eager),
    )


def _installed_setups(profile: str | None) -> tuple[tuple[Setup, ...], bool]:
    """What the installed passes choose from; with another profile, the last of them, for every graph."""
    setups = next((hook.setups for hook in installed() if isinstance(hook, JointHook)), ())
    if not setups:
        config = PassConfig(profile=profile)
        return (Setup(config, find_profile(profile)),), True
    if profile is None:  # other ranks may not explain anything: there are no plans to compare with
        return tuple(dataclasses.replace(setup, run="") for setup in setups), False
    config = dataclasses.replace(setups[-1].config, profile=profile)
    return (Setup(config, load_profile(profile)),), True


@contextlib.contextmanager
def _imagined_world(ranks: int) -> Iterator[None]:
    if ranks < 1:
        raise ValueError(f"explain: ranks must be at least 1, got {ranks}")
    if not dist.is_initialized():
        with _compat.fake_world(ranks):
            yield
        return
    if dist.get_backend() != "fake" or dist.get_world_size() != ranks:
        raise RuntimeError(
            f"explain: a process group of {dist.get_world_size()} ranks runs in this process: wrap the model and leave "
            "out ranks, or imagine another one in a process without"
        )
    yield


@contextlib.contextmanager
def _quiet_dynamo() -> Iterator[None]:
    """Keep back torch's advice on checkpointed regions: it helps who writes a model, not who looks at one."""
    loggers = [logging.getLogger(name) for name in _ADVISING_LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _step_of(model: nn.Module) -> Callable[..., Any]:
    """A function of its own that calls the model: reports do not add up, nor count against a training that follows."""

    def step(*inputs: Any) -> Any:
        return model(*inputs)

    return _compat.with_own_code(step)


def _trace(
    model: nn.Module,
    inputs: tuple[Any, ...],
    setups: tuple[Setup, ...],
    pinned: bool,
    loss: Callable[[Any], torch.Tensor] | None,
    eager: bool,
    dumps: bool,
) -> tuple[Capture, tuple[Run, ...]]:
    """Compile and run one step with fake tensors; what was found, and which graphs the step ran."""
    capture = Capture(setups, pinned, eager, dumps)
    known = _compat.compilations()
    # Never dynamic: an earlier trace with other sizes would make Dynamo put symbols for them, which have no cost.
    compiled = torch.compile(_step_of(model), backend=capture, dynamic=False)
    with warnings.catch_warnings(), _quiet_dynamo(), rare_collections():
        warnings.filterwarnings(
            "ignore", message="the .* pass keeps", category=RuntimeWarning
        )  # in the report
        output = compiled(*inputs)
        if loss is not None:
            output = loss(output)
        leaves = _compat.tree_leaves(output)
        starts = [value for value in leaves if isinstance(value, torch.Tensor) and value.requires_grad]
        opaque = [value for value in leaves if not isinstance(value, torch.Tensor | _PLAIN)]
        if (
            not starts
            and opaque
            and torch.is_grad_enabled()
            and any(p.requires_grad for p in model.parameters())
        ):
            raise RuntimeError(
                f"explain: backward starts at tensors, and the output of {type(model).__name__} is a "
                f"{type(opaque[0]).__name__}; return tensors in tuples, lists or dicts, register the class with "
                "torch.utils._pytree, or pass loss="
            )
        if starts:
            torch.autograd.backward(starts, [torch.empty_like(value) for value in starts])
        once, runs = capture.compiled, capture.runs
        compiled(*inputs)
    if capture.compiled > once:
        capture.interruptions += [
            Interruption(RECOMPILE, place, reason) for reason, place in _compat.recompile_reasons(known)
        ]
    if not capture.profiles and next(slots_of(model), None) is not None:
        raise RuntimeError(
            f"explain: no parameter of {type(model).__name__} was read in a compiled graph; is its forward disabled "
            "for torch.compile?"
        )
    return capture, runs
