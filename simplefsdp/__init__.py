"""Fully sharded data parallel training that the compiler can see.

model = simple_fsdp(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
model = torch.compile(model, fullgraph=True)
"""

from inductor_passes.config import PassConfig

from .accumulate import no_sync
from .api import register_forward_method, simple_fsdp
from .initialize import sharded_parameters
from .optimizer import clip_grad_norm_
from .policy import GradientSync, MixedPrecisionPolicy
from .state import full_parameters, full_state_dict, load_full_state_dict

__all__ = [
    "GradientSync",
    "MixedPrecisionPolicy",
    "PassConfig",
    "clip_grad_norm_",
    "full_parameters",
    "full_state_dict",
    "load_full_state_dict",
    "no_sync",
    "register_forward_method",
    "sharded_parameters",
    "simple_fsdp",
]
