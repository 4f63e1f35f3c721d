"""Put the passes where TorchInductor looks for them, next to the passes of others, and take them out again.

It owns the chaining with what a user has set already. It must not know what the passes do. All state lives in
TorchInductor's configuration: importing this file changes nothing.

Order of the passes in one compilation: reshard (joint graph), then bucket (forward graph, and backward
graph when the first backward runs), then reorder (fused scheduler nodes of each).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inductor_passes import _compat
from inductor_passes._compat import SchedulerSettings
from inductor_passes.config import PassConfig
from inductor_passes.costs.agree import agree_on_profile
from inductor_passes.hooks import GraphHook, Hook, JointHook, PostGradHook, ReorderHook
from inductor_passes.setups import Setup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed import ProcessGroup

_HOOKS: tuple[type[GraphHook], ...] = (JointHook, PostGradHook)


def install(config: PassConfig | None = None, groups: Sequence[ProcessGroup] | None = None) -> str:
    """Register the passes with TorchInductor, for all later compilations of this thread.

    Passes that are set already stay and run first. Installing the same configuration again changes nothing
    but makes it the default; another configuration is added, and each graph uses the one its tags name.

    Every rank of `groups` must call this, with equal arguments: the first one reads the hardware profile and
    sends it to the others.

    Args:
        config: options; None means `PassConfig()`.
        groups: this rank's process groups, one for each mesh dim; None is the default process group.

    Returns:
        The key by which a tag names this configuration on this machine.

    Raises:
        ValueError: the hardware profile cannot be read.
    """
    setup = make_setup(config, groups)
    for cls in _HOOKS:
        passes = _compat.hook_passes(cls.hook)
        position = next((i for i, item in enumerate(passes) if isinstance(item, cls)), len(passes))
        previous = passes[position].setups if position < len(passes) else ()
        setups = (*(item for item in previous if item != setup), setup)
        _compat.set_hook_passes(cls.hook, [*passes[:position], cls(setups), *passes[position + 1 :]])
    _scheduler_settings(SchedulerSettings.current(), setup).apply()
    return setup.key


def uninstall() -> None:
    """Take the passes out again. Passes of others stay as they are."""
    for cls in _HOOKS:
        passes = _compat.hook_passes(cls.hook)
        ours = [item for item in passes if isinstance(item, cls)]
        for item in ours:
            item.active = False  # someone else's wrapper may still hold it
        if ours:
            _compat.set_hook_passes(cls.hook, [item for item in passes if not isinstance(item, cls)])
    settings = SchedulerSettings.current()
    for item in settings.passes:
        if isinstance(item, ReorderHook):
            item.active = False
    _without_ours(settings).apply()


def options(config: PassConfig | None = None) -> dict[str, Any]:
    """Options for one `torch.compile(model, options=...)` that run the passes without any global change.

    Passes of others that are set at this moment run first. Every rank must call this, with equal arguments.

    Args:
        config: options of the passes, used for every tagged graph; None means `PassConfig()`.

    Returns:
        A dictionary for `torch.compile(options=...)`; merge it with options of your own.

    Raises:
        ValueError: the hardware profile cannot be read.
    """
    setup = make_setup(config)
    scheduler = _scheduler_settings(_without_ours(SchedulerSettings.current()), setup, pinned=True)
    return scheduler.options() | {
        cls.hook: _compat.hook_value(
            [
                *(item for item in _compat.hook_passes(cls.hook) if not isinstance(item, cls)),
                cls((setup,), pinned=True),
            ]
        )
        for cls in _HOOKS
    }


def make_setup(config: PassConfig | None = None, groups: Sequence[ProcessGroup] | None = None) -> Setup:
    """Configuration and hardware profile together; collective, see `install`."""
    config = PassConfig() if config is None else config
    if not isinstance(config, PassConfig):
        raise TypeError(f"config must be a PassConfig or None, got {type(config).__name__}")
    agreed = agree_on_profile(config.profile, groups, config.kernel_costs)
    return Setup(config, agreed.profile, agreed.run)


def installed() -> Iterator[Hook]:
    """The pass objects registered with TorchInductor in this thread, with the records of what they did."""
    for cls in _HOOKS:
        yield from (item for item in _compat.hook_passes(cls.hook) if isinstance(item, cls))
    yield from (item for item in SchedulerSettings.current().passes if isinstance(item, ReorderHook))


def _scheduler_settings(current: SchedulerSettings, setup: Setup, pinned: bool = False) -> SchedulerSettings:
    """Settings under which the reorder pass runs too, after the passes that run already.

    Passes that are listed but not enabled stay off. The stock overlap pass would undo the order; for graphs that are
    not ours `ReorderHook` runs it.
    """
    ours = next((item for item in current.passes if isinstance(item, ReorderHook)), None)
    if ours is None and not setup.config.reorder:
        return current
    previous = current if ours is None else ours.previous
    setups = (*(item for item in (ours.setups if ours else ()) if item != setup), setup)
    hook = ReorderHook(setups, pinned, previous)
    if ours is None:
        passes = (*(current.passes if current.enabled else ()), hook)
    else:
        passes = tuple(hook if item is ours else item for item in current.passes)
    return SchedulerSettings(True, passes, None if current.stock_overlap is None else False)


def _without_ours(current: SchedulerSettings) -> SchedulerSettings:
    """The settings as they would be had the reorder pass never been installed."""
    ours = next((item for item in current.passes if isinstance(item, ReorderHook)), None)
    if ours is None or ours.previous is None:
        return current
    others = tuple(item for item in current.passes if item is not ours)
    kept = () if ours.previous.enabled else ours.previous.passes
    return SchedulerSettings(ours.previous.enabled, (*kept, *others), ours.previous.stock_overlap)
