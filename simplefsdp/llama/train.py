"""Entry of a training run: `simplefsdp train`, or `torchrun -m simplefsdp.llama.train`.

Owns: from a command line to an exit code. Must not know: anything that its parts own.

    no RANK in the environment    check the options, start the ranks, wait for them (launch.py)
    RANK is set                   this is a rank: join the others, train (trainer.py)

Exit codes: 0 finished, or stopped when asked to and saved; 1 failed; 2 bad input. Rank 0 says why in one line;
only an error that nobody foresaw shows a traceback.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simplefsdp.exits import EXIT_FAILURE, EXIT_USAGE
from simplefsdp.llama.launch import launch, watch_launcher
from simplefsdp.llama.options import TrainOptions, UsageError, parse
from simplefsdp.llama.rundir import create_run_directory, find_run_directory

if TYPE_CHECKING:
    from simplefsdp.llama.world import World

PROG = "simplefsdp train"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a training from command-line options.

    Args:
        argv: the options; `None` takes them from `sys.argv`.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_rank = "RANK" in os.environ
    try:
        options = parse(arguments, prog=PROG)
        if is_rank:
            return _train(options)
        find_run_directory(options)
        return launch(arguments, options)
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            _say(str(error))
        return EXIT_USAGE


def _train(options: TrainOptions) -> int:
    """Trains as one rank of several."""
    watch_launcher()
    # Not at the top: the launcher and a wrong option need no torch.
    import warnings

    from simplefsdp.llama.build import make_deterministic
    from simplefsdp.llama.checkpoint import CheckpointError
    from simplefsdp.llama.display import make_display
    from simplefsdp.llama.reporter import Reporter
    from simplefsdp.llama.trainer import NonFiniteError, Trainer
    from simplefsdp.llama.watch import GracefulShutdown, RankWatch
    from simplefsdp.llama.world import join

    if options.deterministic:
        make_deterministic()
    with join(options.device) as world, GracefulShutdown() as shutdown, RankWatch() as watch:
        directory = _create_directory(options, world)
        if world.is_main:
            _show_log("simplefsdp")
            display = make_display(options.recipe.steps, options.log_every)
            reporter = Reporter(display, directory, tensorboard=options.tensorboard)
        else:
            warnings.simplefilter("ignore")  # rank 0 shows the same ones
            reporter = Reporter()
        try:
            Trainer(
                options,
                world,
                directory,
                reporter,
                stop_requested=lambda: shutdown.requested,
                step_done=functools.partial(setattr, watch, "step"),
            ).train()
        except (NonFiniteError, CheckpointError) as error:
            if world.is_main:
                _say(str(error))
            return EXIT_FAILURE
    return 0


def _create_directory(options: TrainOptions, world: World) -> Path:
    """Rank 0 creates the run's directory; every rank gets its path, or the reason why not."""
    from simplefsdp.llama.agreement import Ranks

    directory, error = Path(), None
    if world.is_main:
        try:
            directory = create_run_directory(options)
        except UsageError as mistake:
            error = str(mistake)
    world.agree(error)
    return Ranks(None).first(lambda: directory)


def _show_log(name: str) -> None:
    """Shows what a package logs, such as the progress of tokenising, line by line."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())


def _say(message: str) -> None:
    print(f"{PROG}: error: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
