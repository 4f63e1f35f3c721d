"""See what the compiler did with a model: bucket tables, schedules, graphs before and after each pass.

Names are imported when they are first used: the commands beside them answer mistakes before torch is there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simplefsdp.explainer.api import explain
    from simplefsdp.explainer.report import Report
    from simplefsdp.explainer.schedule import Timeline

__all__ = ["Report", "Timeline", "explain"]

_MODULES = {"Report": "report", "Timeline": "schedule", "explain": "api"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # from now on an ordinary attribute
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
