"""Planning problems of the size and shape of Llama training graphs, from layer shapes and a hardware profile.

Compute is priced with the cost model from the shapes of the matmuls; nothing is traced. Forward has one gather per
parameter, backward one gather and one reduce-scatter per parameter, both in the order of use.
"""

import dataclasses

from inductor_passes.costs.compute import Work
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.costs.profiles import load_profile
from inductor_passes.costs.topology import topology_of
from inductor_passes.plan import Collective, GroupKey, PlanningProblem, Role

BF16, FP32 = 2, 4


@dataclasses.dataclass(frozen=True)
class Llama:
    layers: int
    dim: int
    hidden: int
    kv_dim: int
    vocab: int = 128256


LLAMA_8B = Llama(32, 4096, 14336, 1024)
LLAMA_70B = Llama(80, 8192, 28672, 1024)
LLAMA_405B = Llama(126, 16384, 53248, 1024)


def parameters(llama: Llama) -> list[tuple[str, str | None, int, int]]:
    """(name, block, rows, columns) in registration order; columns 0 for a vector."""
    out: list[tuple[str, str | None, int, int]] = [("tok_embeddings", None, llama.vocab, llama.dim)]
    for layer in range(llama.layers):
        block = f"layers.{layer}"
        out += [
            (f"{block}.attention_norm", block, llama.dim, 0),
            (f"{block}.wq", block, llama.dim, llama.dim),
            (f"{block}.wk", block, llama.kv_dim, llama.dim),
            (f"{block}.wv", block, llama.kv_dim, llama.dim),
            (f"{block}.wo", block, llama.dim, llama.dim),
            (f"{block}.ffn_norm", block, llama.dim, 0),
            (f"{block}.w1", block, llama.hidden, llama.dim),
            (f"{block}.w3", block, llama.hidden, llama.dim),
            (f"{block}.w2", block, llama.dim, llama.hidden),
        ]
    return [*out, ("norm", None, llama.dim, 0), ("output", None, llama.vocab, llama.dim)]


def llama_problem(
    llama: Llama,
    ranks: int,
    *,
    backward: bool,
    tokens: int = 8192,
    budget_gb: float | None = 4.0,
    profile: str = "h100_sxm",
    tensor_parallel: int = 1,
) -> PlanningProblem:
    """The problem of one graph: ``tokens`` per rank, fully sharded over ``ranks``, bf16 gathers, fp32 reductions."""
    model = ProfileCostModel(load_profile(profile))
    group = topology_of(range(ranks), 8)
    keys = {
        Role.GATHER: GroupKey("all_gather", "fsdp", "bf16"),
        Role.REDUCE: GroupKey("reduce_scatter", "fsdp", "fp32", "avg"),
    }
    regions: list[int] = []
    collectives: list[Collective] = []

    def compute(rows: int, columns: int, passes: int) -> None:
        elements = rows * max(1, columns) // tensor_parallel
        flops = 2 * tokens * elements * passes if columns else 0
        moved = max(1, passes) * BF16 * (elements + tokens * (rows + max(1, columns)) // tensor_parallel)
        regions.append(model.compute_ns(Work(flops, moved, "bfloat16")))

    def add(name: str, block: str | None, elements: int, role: Role) -> None:
        gather = role is Role.GATHER
        wire = elements // tensor_parallel * (BF16 if gather else FP32)
        slot = len(regions)
        collectives.append(
            Collective(
                name=name,
                key=keys[role],
                role=role,
                size_bytes=wire,
                transfer_ns=model.transfer_ns(keys[role].kind, group, wire),
                earliest_issue=0 if gather else slot,
                latest_issue=slot if gather else -1,
                latest_wait=slot if gather else -1,
                copy_in_ns=model.copy_ns(wire // ranks if gather else wire),
                copy_out_ns=model.copy_ns(wire if gather else wire // ranks),
                staging_bytes=wire,
                block=block,
            )
        )

    for name, block, rows, columns in reversed(parameters(llama)) if backward else parameters(llama):
        looked_up = name == "tok_embeddings"
        elements = rows * max(1, columns)
        if not (backward and looked_up):
            add(name, block, elements, Role.GATHER)
        compute(rows, columns, 0 if looked_up else 1 + backward)
        if backward:
            add(name, block, elements, Role.REDUCE)
    last = len(regions)
    collectives = [
        dataclasses.replace(item, latest_issue=last, latest_wait=last) if item.latest_issue < 0 else item
        for item in collectives
    ]
    return PlanningProblem(
        region_ns=tuple(regions),
        collectives=tuple(collectives),
        alpha_ns={key: model.alpha_ns(key.kind, group) for key in keys.values()},
        issue_ns=model.issue_ns(),
        kernel_ns=model.kernel_ns(),
        memory_budget_bytes=None if budget_gb is None else int(budget_gb * 10**9),
    )
