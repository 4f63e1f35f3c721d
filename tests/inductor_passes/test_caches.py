"""Compile caches: what one process compiled serves the next one, and never the wrong rank.

The models are matrix products and collectives alone, so that no kernel has to be built.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from inductor_passes import PassConfig, options
from simplefsdp import MixedPrecisionPolicy, simple_fsdp
from tests.helpers.emitted import emitted_code
from tests.helpers.meshes import mesh
from tests.helpers.worlds import fake_process_group

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),  # importing TorchInductor
    pytest.mark.timeout(400),  # two processes one after the other, which a busy machine starts slowly
]


def products(rows: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, rows, bias=False), nn.Linear(rows, 8, bias=False))


def lookups() -> dict[str, int]:
    """How often the FX graph cache answered since the counters were cleared."""
    return {what: counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass")}


def whole_lookups() -> dict[str, int]:
    """The same of AOTAutograd's cache, whose entries hold forward and backward together."""
    return {what: counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss", "bypass")}


def step(model: nn.Module) -> list[float]:
    """Loss and gradient norms of one compiled step."""
    torch._dynamo.reset()
    counters.clear()
    model.zero_grad()
    x = torch.ones(2, 8)
    loss = torch.compile(model, fullgraph=True)(x).square().mean()
    loss.backward()
    return [loss.item(), *(p.grad.to_local().norm().item() for p in model.parameters())]


def main(planner: str) -> None:
    """What the processes of the first test run."""
    with fake_process_group(0, 4):
        values = step(simple_fsdp(products(), passes=PassConfig(planner=planner, profile="h100_sxm")))
    print(json.dumps({"values": values, "lookups": lookups(), "whole": whole_lookups()}))


def main_in_a_process(
    planner: str, settings: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `main` in a process of its own, with these environment variables."""
    return subprocess.run(
        [sys.executable, "-c", f"from tests.inductor_passes.test_caches import main; main({planner!r})"],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | settings,
    )


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    """Forward and backward, with all passes installed, whatever the seed of Python's hashes."""

    def run(seed: str, planner: str = "none") -> dict:
        settings = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        out = main_in_a_process(planner, settings, timeout_s=170)
        return json.loads(out.stdout.splitlines()[-1])

    first, second = run("1"), run("2")
    assert first["lookups"] == {"hit": 0, "miss": 2, "bypass": 0}
    assert second["lookups"] == {"hit": 2, "miss": 0, "bypass": 0}
    if WHOLE:
        assert first["whole"] == {"hit": 0, "miss": 1, "bypass": 0}
        assert second["whole"] == {"hit": 1, "miss": 0, "bypass": 0}
    assert first["values"] == second["values"]


def cached_on(rank: int, ranks: int = 4, *, rows: int = 8, **arguments: Any) -> dict[str, int]:
    """Lookups of one rank's step in the caches as they are."""
    with fake_process_group(rank, ranks):
        if arguments.pop("tensor_parallel", False):
            both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            model = products(rows)
            parallelize_module(model, both["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            step(simple_fsdp(model, both["dp"], **arguments))
        else:
            arguments.setdefault("passes", PassConfig(planner="none", profile="h100_sxm"))
            step(simple_fsdp(products(rows), **arguments))
    return whole_lookups()


WHOLE = torch.__version__ >= "2.13"
"""Whether AOTAutograd's cache takes these models: that of torch 2.11 bypasses graphs that call `DTensor.to_local`."""
only_where_whole = pytest.mark.skipif(not WHOLE, reason="older caches bypass calls of DTensor.to_local")
HIT, MISS = {"hit": 1, "miss": 0, "bypass": 0}, {"hit": 0, "miss": 1, "bypass": 0}


@only_where_whole
def test_ranks_share_what_one_of_them_compiled_where_their_shards_are_alike():
    with fresh_cache():
        assert cached_on(0, rows=10) == MISS  # 10 rows: 3, 3, 3 and 1
        assert cached_on(1, rows=10) == HIT
        assert cached_on(3, rows=10) == MISS


@only_where_whole
@pytest.mark.parametrize(
    "change",
    [
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        {"passes": PassConfig(planner="block", blocks=("0",), profile="h100_sxm")},
        {"sharding_factor": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_one_model_compiled_does_not_serve_one_that_is_wrapped_otherwise(change):
    """Also where the two look alike to the compiler: tags and precision are in no graph that torch keys."""
    with fresh_cache():
        assert cached_on(0) == MISS
        assert cached_on(0, **change) == MISS
        assert cached_on(0, **change) == HIT


@only_where_whole
def test_tensor_parallel_ranks_do_not_share():
    """DTensor may trace constants of the rank's place, which no key of torch's holds."""
    with fresh_cache():
        assert cached_on(0, tensor_parallel=True) == MISS
        assert cached_on(0, tensor_parallel=True) == HIT
        assert cached_on(1, tensor_parallel=True) == MISS


def test_generated_code_depends_on_shapes_alone():
    """Ranks with equal shards get equal code, byte for byte; where a shard is smaller, its padding shows."""
    passes = options(PassConfig(planner="block", blocks=("Sequential",), profile="h100_sxm"))
    codes = []
    for rank in (0, 1, 3):
        with fake_process_group(rank, 4):  # 10 rows: 3, 3, 3 and 1
            model = simple_fsdp(products(10))
            by_graph = emitted_code(model, torch.ones(2, 8, requires_grad=True), options=passes)["cpu"]
        # The first line numbers the graphs of this process.
        codes.append({graph: code.split("\n", 1)[1] for graph, code in by_graph.items()})
    assert codes[0] == codes[1]
    assert codes[0] != codes[2]
    first, _, last = (re.findall(r"_c10d_functional\.(\w+)\.default\(", code["backward"]) for code in codes)
    assert first == last
    assert "reduce_scatter_tensor" in first


def one_cold_rank(rank: int, world_size: int) -> tuple[list[float], list[float], dict[str, int]]:
    """A step on cold caches, then one where rank 0 finds its code and rank 1 has to compile."""
    model = simple_fsdp(products(), mesh(2), passes=PassConfig(planner="none", profile="h100_sxm"))
    with fresh_cache():
        before = step(model)
        if rank == 0:
            after = step(model)
        else:
            with fresh_cache():
                after = step(model)
        return before, after, lookups()


def test_one_cold_rank_among_warm_ones_finishes_with_the_same_values(workers):
    (before, after, warm), (before_1, after_1, cold) = workers(2).run(one_cold_rank, timeout=170)
    assert warm == {"hit": 2, "miss": 0, "bypass": 0}
    assert cold == {"hit": 0, "miss": 2, "bypass": 0}
    assert before == after
    assert before_1 == after_1
