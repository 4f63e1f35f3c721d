"""Fully sharded data parallel training that the compiler can see.

model = simple_fsdp(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
model = torch.compile(model, fullgraph=True)

Names are imported when they are first used: the command line answers a mistyped option, and starts the ranks, without
the seconds that importing torch takes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inductor_passes.config import PassConfig

    from .accumulate import no_sync
    from .api import register_forward_method, simple_fsdp
    from .explainer import Report, Timeline, explain
    from .initialize import sharded_parameters
    from .optimizer import clip_grad_norm_
    from .policy import GradientSync, MixedPrecisionPolicy
    from .state import full_parameters, full_state_dict, load_full_state_dict

__all__ = [
    "GradientSync",
    "MixedPrecisionPolicy",
    "PassConfig",
    "Report",
    "Timeline",
    "clip_grad_norm_",
    "explain",
    "full_parameters",
    "full_state_dict",
    "load_full_state_dict",
    "no_sync",
    "register_forward_method",
    "sharded_parameters",
    "simple_fsdp",
]

_MODULES = {
    "GradientSync": ".policy",
    "MixedPrecisionPolicy": ".policy",
    "PassConfig": "inductor_passes.config",
    "Report": ".explainer",
    "Timeline": ".explainer",
    "clip_grad_norm_": ".optimizer",
    "explain": ".explainer",
    "full_parameters": ".state",
    "full_state_dict": ".state",
    "load_full_state_dict": ".state",
    "no_sync": ".accumulate",
    "register_forward_method": ".api",
    "sharded_parameters": ".initialize",
    "simple_fsdp": ".api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name], __name__), name)
    globals()[name] = value  # from now on an ordinary attribute
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
