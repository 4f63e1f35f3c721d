"""Planning problems of the size and shape of Llama training graphs, from layer shapes and a hardware profile.

Compute is priced with the cost model from the shapes of the matmuls; nothing is traced. Forward has one gather per
parameter, backward one gather and one reduce-scatter per parameter, both in the order of use.
"""

import dataclasses

from inductor_passes.costs.compute import Work
from inductor_passes.costs.model import ProfileCostModel
from inductor_passes.costs.profiles import load_profile
from inductor_passes.costs.topology import topology_of
from inductor_passes.plan import GroupKey, Role
from inductor_passes.planners.build import Traced, build_problem

BF16, FP32 = 2, 4
NODES_PER_MATMUL = 4


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


def parameters(llama):
    """(name, block, rows, columns) in registration order; columns 0 for a vector."""
    out = [("tok_embeddings", None, llama.vocab, llama.dim)]
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
    llama, ranks, *, backward, tokens=8192, budget_gb=4.0, profile="h100_sxm", tensor_parallel=1
):
    """The problem of one graph: ``tokens`` per rank, fully sharded over ``ranks``, bf16 gathers, fp32 reductions."""
    model = ProfileCostModel(load_profile(profile))
    group = topology_of(range(ranks), 8)
    gather_key, reduce_key = (
        GroupKey("all_gather", "fsdp", "bf16"),
        GroupKey("reduce_scatter", "fsdp", "fp32", "avg"),
    )
    node_ns, collectives = [], []
    traced = parameters(llama)

    def compute(rows, columns, passes):
        elements = rows * max(1, columns) // tensor_parallel
        flops = (
            0 if columns == 0 or (rows == llama.vocab and passes < 0) else 2 * tokens * elements * abs(passes)
        )
        moved = abs(passes) * BF16 * (elements + tokens * (rows + max(1, columns)) // tensor_parallel)
        time = model.compute_ns(Work(flops, moved, "bfloat16"))
        node_ns.extend([time // NODES_PER_MATMUL] * NODES_PER_MATMUL)

    def add(name, block, rows, columns, role, ready):
        elements = rows * max(1, columns) // tensor_parallel
        gather = role is Role.GATHER
        wire = elements * (BF16 if gather else FP32)
        here = len(node_ns)
        node_ns.extend([0, 0])
        shard = wire // ranks
        collectives.append(
            Traced(
                name=name,
                key=gather_key if gather else reduce_key,
                role=role,
                size_bytes=wire,
                transfer_ns=model.transfer_ns("all_gather" if gather else "reduce_scatter", group, wire),
                ready=ready,
                issue=here,
                wait=here + 1,
                need=here + 2 if gather else -1,
                copy_in_ns=model.copy_ns(shard if gather else wire),
                copy_out_ns=model.copy_ns(wire if gather else shard),
                staging_bytes=wire,
                block=block,
            )
        )

    if not backward:
        for name, block, rows, columns in traced:
            add(name, block, rows, columns, Role.GATHER, 0)
            compute(rows, columns, -1 if name == "tok_embeddings" else 1)
    else:
        for name, block, rows, columns in reversed(traced):
            if name != "tok_embeddings":
                add(name, block, rows, columns, Role.GATHER, 0)
            compute(rows, columns, -1 if name == "tok_embeddings" else 2)
            add(name, block, rows, columns, Role.REDUCE, len(node_ns))
    collectives = [
        dataclasses.replace(item, need=len(node_ns)) if item.need < 0 else item for item in collectives
    ]
    alphas = {
        gather_key: model.alpha_ns("all_gather", group),
        reduce_key: model.alpha_ns("reduce_scatter", group),
    }
    return build_problem(
        node_ns,
        collectives,
        alphas,
        issue_ns=model.issue_ns(),
        kernel_ns=model.kernel_ns(),
        memory_budget_bytes=None if budget_gb is None else int(budget_gb * 10**9),
    ).problem
