"""The `simplefsdp` command: finds the subcommand and runs it.

Owns: the table of subcommands and the exit code. Must not know: what a subcommand does; each is a module
with a `main(argv) -> int` that is imported only when it is called, so that `--help` and typing mistakes
answer at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from simplefsdp.exits import EXIT_FAILURE, EXIT_USAGE
from simplefsdp.garbage import rare_collections


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Args:
        module: module with `main(argv: list[str]) -> int`.
        summary: one line for `simplefsdp --help`.
        answers: it traces, answers and ends; until then, garbage is looked for seldom, which saves a tenth of the time.
    """

    module: str
    summary: str
    answers: bool = False


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "train": Command("simplefsdp.llama.train", "train a sharded, compiled Llama"),
        "plan": Command(
            "simplefsdp.planner.command",
            "predict speed and memory on hardware that is not there",
            answers=True,
        ),
        "explain": Command(
            "simplefsdp.explainer.command",
            "show what the compiler passes make of a model, and its cost",
            answers=True,
        ),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `simplefsdp COMMAND [options]`.

    Args:
        argv: the arguments after the program's name; `None` takes them from `sys.argv`.

    Returns:
        The exit code: 0 success, 1 failure, 2 bad input.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else EXIT_USAGE
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"simplefsdp: unknown command {name!r}; use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    command = COMMANDS[name]
    with rare_collections() if command.answers else contextlib.nullcontext():
        code: int = importlib.import_module(command.module).main(rest)
    return code


def run() -> int:
    """Runs `main` for a process that ends with it.

    It ends without a last search for garbage, which takes 2 s after a trace; and quietly when whoever read its output
    is gone, as with `simplefsdp plan ... | head`.
    """
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        code = EXIT_FAILURE
    gc.freeze()
    return code


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: simplefsdp COMMAND [options]", "", *rows, "", "simplefsdp COMMAND --help lists the options."]
    )


if __name__ == "__main__":
    sys.exit(run())
