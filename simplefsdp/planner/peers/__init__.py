"""What other implementations would do with the same step: their schedules as plans for the same simulator.

A file for the rules of each peer; `units` and `compiled_blocks` are what they share.
"""

from simplefsdp.planner.peers.compiled_blocks import compile_blocks
from simplefsdp.planner.peers.ddp import DDP_COMPILED, DDP_EAGER, plan_ddp
from simplefsdp.planner.peers.fsdp2 import FSDP2_COMPILED, FSDP2_EAGER, plan_fsdp2
from simplefsdp.planner.peers.stock_manual import STOCK_MANUAL, plan_stock_manual
from simplefsdp.planner.peers.stock_overlap import (
    STOCK_OVERLAP,
    bucket_cap,
    plan_stock_overlap,
    ranks_of_shards,
)
from simplefsdp.planner.peers.units import NotModelledError, Sharing, sharing_of

__all__ = [
    "DDP_COMPILED",
    "DDP_EAGER",
    "FSDP2_COMPILED",
    "FSDP2_EAGER",
    "STOCK_MANUAL",
    "STOCK_OVERLAP",
    "NotModelledError",
    "Sharing",
    "bucket_cap",
    "compile_blocks",
    "plan_ddp",
    "plan_fsdp2",
    "plan_stock_manual",
    "plan_stock_overlap",
    "ranks_of_shards",
    "sharing_of",
]
