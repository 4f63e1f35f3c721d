"""`simplefsdp plan`: what a run would show on hardware that is not there.

Owns what is done for which option, and the exit code. Mistakes are answered before torch is imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simplefsdp.exits import EXIT_FAILURE
from simplefsdp.llama.options import UsageError, answer
from simplefsdp.planner.options import PlanOptions
from simplefsdp.planner.request import Request

if TYPE_CHECKING:
    from inductor_passes.costs.profiles import HardwareProfile
    from simplefsdp.explainer.hardware import Hardware
    from simplefsdp.planner.scale import ScalePoint
    from simplefsdp.planner.step import Step

PROG = "simplefsdp plan"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the options; `None` takes them from `sys.argv`.

    Returns:
        The exit code: 0 success, 1 the model cannot be traced, 2 bad input.
    """
    return answer(PlanOptions, argv, _run, prog=PROG)


def _run(options: PlanOptions) -> int:
    if options.validate:
        from simplefsdp.planner.validation import validation_text

        print(validation_text())
        return 0
    options.check()
    if options.emit_triton is not None:
        return _emit(options, options.emit_triton)

    from simplefsdp.explainer.trace_errors import TraceError
    from simplefsdp.planner.published import trust_text

    hardware = options.on_hardware()
    try:
        profile = hardware.load()
    except ValueError as error:
        raise UsageError(f"--hardware: {error}") from error
    try:
        if options.search:
            _search(options, hardware, profile)
        else:
            _predict(options, hardware, profile)
        print(f"\n{trust_text()}")
    except TraceError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _request(options: PlanOptions) -> Request:
    return Request(
        model=options.model,
        seq=options.seq,
        layers=options.layers,
        batch=options.local_batch or 1,
        ac=options.ac or "selective",
        devices=options.gpus,
        factor=options.sharding_factor or options.gpus,
        precision=options.precision,
        memory_budget_gb=options.memory_budget_gb,
        reshard=options.reshard_after_forward,
        whole=options.whole,
        planner="none",
    )


def _predict(options: PlanOptions, hardware: Hardware, profile: HardwareProfile) -> None:
    """Compare planners in the step that the options describe; then scale it, if asked to."""
    from simplefsdp.planner.compare import predict_peers
    from simplefsdp.planner.predict import predict
    from simplefsdp.planner.text import best_text, memory_text, planners_text
    from simplefsdp.planner.tracing import trace_fresh

    step = trace_fresh(dataclasses.replace(_request(options), eager=True), hardware)
    traced = step.traced
    stored = traced.stored(step.request.factor)
    predictions = [
        predict(
            traced.graphs,
            profile,
            stored,
            runs=traced.runs,
            planner=planner,
            tokens=step.tokens,
            flops_per_token=step.flops_per_token,
        )
        for planner in options.planners
    ]
    peers = predict_peers(
        traced.graphs,
        traced.eager,
        profile,
        stored,
        runs=traced.runs,
        tokens=step.tokens,
        flops_per_token=step.flops_per_token,
    )
    best = min(predictions, key=lambda item: item.step_ns)
    checkpointing = "" if options.is_own_model else f", activation checkpointing {step.request.ac}"
    print(
        f"{step.name} on {options.gpus} {hardware.name}, sharded over {step.request.factor}{checkpointing}; modelled, "
        f"hardware profile {profile.name}; {traced.note}"
    )
    print("\n".join(f"warning: {line}" for line in traced.warnings), end="\n" if traced.warnings else "")
    print()
    print(planners_text([*predictions, *peers.predictions]))
    for line in peers.lines():
        print(f"\n{line}")
    print()
    print(best_text(best))
    print(memory_text(best.memory, hardware, is_own=options.is_own_model))
    if options.scale:
        _scale(options, hardware, profile, step)


def _search(options: PlanOptions, hardware: Hardware, profile: HardwareProfile) -> None:
    """Print the best choices."""
    from simplefsdp.planner.found import findings_text
    from simplefsdp.planner.rescale import RescaleError
    from simplefsdp.planner.search import Search, Space, sharding_factors
    from simplefsdp.planner.tracing import say_on_terminal, trace_all

    assert hardware.memory_bytes is not None
    factors = sharding_factors(options.gpus, profile.value("ranks_per_node"))
    own = options.is_own_model
    space = Space(
        modes=(options.ac,) if options.ac else (("none",) if own else ("none", "selective", "full")),
        batch=1 if own else options.local_batch,
        factors=factors if options.sharding_factor is None else (options.sharding_factor,),
        reshards=(True, False) if options.reshard_after_forward else (False,),
        planners=options.planners,
    )
    search = Search(
        _request(options),
        space,
        profile,
        hardware.memory_bytes,
        lambda requests: trace_all(requests, hardware, say_on_terminal),
        say_on_terminal,
        options.best,
    )
    try:
        findings = search.run()
    except RescaleError as error:
        say_on_terminal("")
        raise UsageError(f"--search cannot compute variants of this model: {error}") from error
    print(f"{options.model} on {options.gpus} {hardware.name}; modelled, hardware profile {profile.name}")
    print(findings_text(findings, options, hardware))


def _emit(options: PlanOptions, directory: Path) -> int:
    """Write the code of forward and backward; this process needs no torch for it."""
    from simplefsdp.planner.emit.command import FEW_LAYERS, EmitError, check_free, emit, save, summary
    from simplefsdp.planner.emit.gpus import find_gpu
    from simplefsdp.planner.emit.worker import EmitRequest

    hardware = options.on_hardware()
    check_free(directory)
    gpu = find_gpu(hardware.profile)
    assert gpu is not None  # checked with the options
    step = dataclasses.replace(
        _request(options),
        layers=None if options.is_own_model else options.layers or FEW_LAYERS,
        planner=options.planners[-1],
    )
    request = EmitRequest(step, gpu, hardware.profile, lower=options.emit_ptx)
    layers = "" if step.layers is None else f" with {step.layers} blocks"
    title = f"{options.model}{layers} on {options.gpus} {hardware.name}, sharded over {step.factor}"
    try:
        emitted = emit(request)
        files = save(emitted, title, directory)
    except EmitError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except OSError as error:
        raise UsageError(f"--emit-triton {directory}: {error.strerror or error}") from error
    print(f"{title}; written by {emitted.writer}; attention: {emitted.attention}")
    print(summary(emitted))
    print("\n".join(map(str, files)))
    return 0


def _scale(options: PlanOptions, hardware: Hardware, profile: HardwareProfile, step: Step) -> None:
    """Print a table for each way to shard and one that compares them, and draw them if asked to."""
    from simplefsdp.planner.picture import plot_scaling
    from simplefsdp.planner.rescale import RescaleError
    from simplefsdp.planner.scale import Scaling, scaling_text, ways_text
    from simplefsdp.planner.tracing import trace_fresh

    scaling = Scaling(
        step,
        profile,
        hardware.memory_bytes,
        options.planners[-1],
        options.global_batch,
        lambda request: trace_fresh(request, hardware),
    )
    series: dict[str, list[ScalePoint]] = {}
    kind = (
        "weak scaling, each device keeps its batch"
        if options.global_batch is None
        else f"strong scaling, global batch {options.global_batch}"
    )
    title = f"{step.name}, {kind}, planner {options.planners[-1]}; modelled, hardware profile {profile.name}"
    print(f"\n{title}")
    try:
        for way, points in scaling.series(options.sharding_factor):
            if isinstance(points, str):
                text = points
            else:
                text = scaling_text(points, hardware.memory_bytes)
                series[way.name] = points
            if way.in_full:
                print(f"\n{way.name}\n{text}")
        if len(series) > 1:
            print("\nall ways to shard: step, ms; * the fastest that fits, (in brackets) does not fit")
            print(ways_text(series, hardware.memory_bytes))
    except RescaleError as error:
        raise UsageError(f"--scale cannot compute other numbers of devices: {error}") from error
    if options.plot is not None and series:
        try:
            plot_scaling(series, title, hardware.memory_bytes, options.plot)
        except (ImportError, OSError) as error:
            raise UsageError(f"--plot {options.plot}: {error}") from error
