"""Finds parameters that came to a wrapped model after `simple_fsdp`: nobody shards them or reduces their gradients.

They would train apart on every rank without an error. Looks at the whole model, so it is called when something may have
changed, not at every step.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .slots import WrapState, find_state

__all__ = ["check_complete"]

_NAMED = 3  # names in a message before "and N more"


def check_complete(wrap: WrapState) -> None:
    """Refuse trainable parameters below the root that no `simple_fsdp` call has seen.

    Raises:
        RuntimeError: there are some, by name.
    """
    strangers = list(_strangers(wrap.root))
    if strangers:
        more = f" and {len(strangers) - _NAMED} more" if len(strangers) > _NAMED else ""
        raise RuntimeError(
            f"{', '.join(map(repr, strangers[:_NAMED]))}{more}: added to the model after simple_fsdp, so neither "
            "sharded nor would gradients be reduced, and ranks would train apart. Add parameters before simple_fsdp, "
            "or wrap the new module by a call of its own (simple_fsdp(model.new, ...)); frozen ones "
            "(requires_grad=False) may stay as they are"
        )
    wrap.complete = True


def _strangers(root: nn.Module) -> Iterator[str]:
    """Names of the trainable parameters below `root` that are neither sharded nor ignored by any call."""
    known: set[str] = set()
    kept: set[int] = set()
    for prefix, module in root.named_modules():
        state = find_state(module)
        if state is not None:
            known.update(_join(prefix, name) for name in state.slots)
            if state.is_root:
                known.update(_join(prefix, name) for name in state.wrap.ignored)
                kept.update(map(id, state.wrap.ignored.values()))
    for prefix, module in root.named_modules():
        for name, param in module._parameters.items():
            full_name = _join(prefix, name)
            if param is not None and param.requires_grad and full_name not in known and id(param) not in kept:
                yield full_name


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
