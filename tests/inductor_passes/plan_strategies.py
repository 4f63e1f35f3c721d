"""Random planning problems: several keys and groups, dependencies, fixed collectives, tight budgets."""

from hypothesis import strategies as st

from inductor_passes.plan import Collective, GroupKey, PlanningProblem, Role

GATHER = GroupKey("all_gather", "dp", "bf16")
GATHER_FP32 = GroupKey("all_gather", "dp", "fp32")
REDUCE = GroupKey("reduce_scatter", "dp", "fp32", "avg")
REPLICATE = GroupKey("all_reduce", "rep", "fp32", "avg")
TENSOR = GroupKey("all_reduce", "tp", "bf16", "sum")


@st.composite
def problems(draw, most_movable=5, most_regions=5, most_fixed=1):
    """A valid problem with at least one movable collective."""
    regions = draw(st.integers(1, most_regions))
    slots = st.integers(0, regions)
    movable = draw(st.integers(1, most_movable))
    keys = [
        draw(st.sampled_from([GATHER, GATHER, GATHER_FP32, REDUCE, REDUCE, REPLICATE]))
        for _ in range(movable)
    ]
    keys += [draw(st.sampled_from([TENSOR, REDUCE]))] * draw(st.integers(0, most_fixed))
    items = []
    for number, key in enumerate(keys):
        if number >= movable:
            first, last = sorted([draw(slots), draw(slots)])
            items.append(
                Collective(f"f{number}", key, Role.FIXED, 0, draw(st.integers(0, 9)), first, first, last)
            )
            continue
        gather = key.kind == "all_gather"
        earliest = draw(st.sampled_from([0, 0, 0, draw(slots)])) if gather else draw(slots)
        need = draw(st.integers(earliest, regions)) if gather else regions
        latest = need
        if draw(st.integers(0, 7)) == 0:
            latest = draw(st.integers(earliest, need))
        feeders = [
            other
            for other in range(number)
            if items[other].earliest_issue <= earliest and (items[other].role is Role.REDUCE) != gather
        ]
        depends = ()
        if feeders and draw(st.integers(0, 2)) == 0:
            depends = (draw(st.sampled_from(feeders)),)
        size = draw(st.integers(0, 6))
        items.append(
            Collective(
                name=f"c{number}",
                key=key,
                role=Role.GATHER if gather else Role.REDUCE,
                size_bytes=size,
                transfer_ns=draw(st.integers(0, 12)),
                earliest_issue=earliest,
                latest_issue=latest,
                latest_wait=need,
                depends_on=depends,
                copy_in_ns=draw(st.integers(0, 2)),
                copy_out_ns=draw(st.integers(0, 3)),
                staging_bytes=draw(st.sampled_from([0, size])),
                block=draw(st.sampled_from([None, "a", "b"])),
            )
        )
    for number in range(len(items) - 1, -1, -1):
        for other in items[number].depends_on:
            late = min(items[other].latest_issue, items[number].latest_issue)
            items[other] = Collective(
                **{
                    **{name: getattr(items[other], name) for name in items[other].__dataclass_fields__},
                    "latest_issue": late,
                    "latest_wait": min(items[other].latest_wait, items[number].latest_issue),
                }
            )
    return PlanningProblem(
        region_ns=tuple(draw(st.integers(0, 20)) for _ in range(regions)),
        collectives=tuple(items),
        alpha_ns={key: draw(st.integers(0, 10)) for key in (GATHER, GATHER_FP32, REDUCE, REPLICATE, TENSOR)},
        issue_ns=draw(st.integers(0, 1)),
        kernel_ns=draw(st.integers(0, 1)),
        memory_budget_bytes=draw(st.sampled_from([None, 0, draw(st.integers(0, 12)), 40])),
    )
