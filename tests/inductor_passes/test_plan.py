"""Problems and plans as data: windows from traces, what plans say, what is refused, why things stay alone."""

import ast
import dataclasses
import pathlib
import subprocess
import sys

import pytest

import inductor_passes
from inductor_passes.plan import (
    AloneReason,
    Bucket,
    Collective,
    Event,
    GroupKey,
    Plan,
    PlanningProblem,
    Role,
)
from inductor_passes.planners import PLANNER_NAMES, plan_collectives
from inductor_passes.planners.check import check_plan
from inductor_passes.planners.schedule import in_flight
from tests.inductor_passes.plan_strategies import GATHER, GATHER_FP32, REDUCE, REPLICATE, TENSOR

ALPHA = {GATHER: 10, GATHER_FP32: 10, REDUCE: 10, REPLICATE: 10, TENSOR: 10}


def gather(name, need, **fields):
    """A parameter's gather, needed at slot ``need``."""
    values = {
        "size_bytes": 8,
        "transfer_ns": 5,
        "copy_in_ns": 0,
        "copy_out_ns": 2,
        "staging_bytes": 8,
        **fields,
    }
    return Collective(
        name, values.pop("key", GATHER), Role.GATHER, values.pop("size_bytes"), values.pop("transfer_ns"),
        values.pop("earliest_issue", 0), values.pop("latest_issue", need), need, **values,
    )  # fmt: skip


def reduction(name, ready, last, **fields):
    """A gradient's reduction, ready at slot ``ready``."""
    values = {
        "size_bytes": 8,
        "transfer_ns": 5,
        "copy_in_ns": 2,
        "copy_out_ns": 0,
        "staging_bytes": 8,
        **fields,
    }
    return Collective(
        name, values.pop("key", REDUCE), Role.REDUCE, values.pop("size_bytes"), values.pop("transfer_ns"),
        ready, last, last, **values,
    )  # fmt: skip


def problem(regions, *items, **fields):
    return PlanningProblem(tuple(regions), tuple(items), ALPHA, **fields)


def reasons(plan):
    return dict(plan.alone)


class TestProblem:
    @pytest.mark.parametrize(
        ("item", "text"),
        [
            (gather("w", 4), r"collective 0 \(w\): need 0 <= earliest_issue .* <= 2, got 0, 4, 4"),
            (gather("w", 1, earliest_issue=2), r"collective 0 \(w\): need 0 <= earliest_issue"),
            (gather("w", 1, key=GroupKey("all_gather", "x", "bf16")), r"no alpha for key all_gather/x/bf16"),
            (gather("w", 1, depends_on=(0,)), r"depends on 0, which is not an earlier collective"),
            (
                dataclasses.replace(gather("w", 1), role=Role.FIXED),
                r"a fixed collective has one slot to start in",
            ),
        ],
    )
    def test_contradictions_are_refused_by_name(self, item, text):
        with pytest.raises(ValueError, match=text):
            problem([1, 1], item)

    def test_a_dependency_must_be_traced_first(self):
        with pytest.raises(ValueError, match=r"collective 1 \(b\): is traced before collective 0"):
            problem([1, 1], gather("a", 2), gather("b", 1, depends_on=(0,)))


class TestPlan:
    def test_json_round_trip(self):
        plan = plan_collectives(problem([30, 30], gather("a", 0), gather("b", 1), reduction("c", 1, 2)))
        assert Plan.from_json(plan.to_json()) == plan
        assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
        with pytest.raises(ValueError, match='"format": 1'):
            Plan.from_json('{"format": 7}')

    def test_equal_under_any_hash_seed(self):
        """Byte-equal plans from two processes with different hash seeds, for every planner."""
        code = (
            # An empty package in front: importing the real one loads torch, which planning does without.
            "import sys, types\n"
            "package = sys.modules['inductor_passes'] = types.ModuleType('inductor_passes')\n"
            f"package.__path__ = [{str(pathlib.Path(inductor_passes.__file__).parent)!r}]\n"
            "from tests.inductor_passes.llama_problems import *\n"
            "from inductor_passes.planners import *\n"
            "p = llama_problem(Llama(3, 4096, 14336, 1024), 256, backward=True, budget_gb=1.0)\n"
            "print([plan_collectives(p, n).to_json() for n in PLANNER_NAMES])\n"
            "assert 'torch' not in sys.modules"
        )
        root = str(pathlib.Path(__file__).parents[2])
        outs = [
            subprocess.run(
                [sys.executable, "-c", code],
                env={"PYTHONHASHSEED": seed, "PYTHONPATH": root},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("0", "12345")
        ]
        assert outs[0] == outs[1]

    def test_planning_knows_no_torch(self):
        """Neither the planners nor what they stand on import torch, or anything of the package that could."""
        root = pathlib.Path(inductor_passes.__file__).parent
        files = [*root.glob("planners/*.py"), root / "plan.py", root / "timeline.py", root / "config.py"]
        for path in files:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    assert not name.startswith("torch"), path
                    if name.startswith("inductor_passes"):
                        assert name.startswith(("inductor_passes.plan", "inductor_passes.timeline")), (
                            path,
                            name,
                        )

    def test_in_flight_by_hand(self):
        """A gather held for two regions, a gradient for one, and the copy out of a bucket."""
        chosen = problem(
            [1, 1, 1],
            gather("a", 2, size_bytes=3),
            gather("b", 2, size_bytes=4),
            reduction("c", 1, 3, size_bytes=5),
        )
        buckets = (Bucket((0, 1), 0, 2), Bucket((2,), 1, 2))
        events = (Event(0, "issue", 0), Event(1, "issue", 1), Event(2, "wait", 1), Event(2, "wait", 0))
        held = in_flight(chosen, buckets, events)
        assert held.per_region == (7, 12, 0)
        assert held.peak_bytes == 16


class TestCheckPlan:
    """Each rule is checked: a plan broken in that one way is refused."""

    PROBLEM = problem(
        [30, 30, 30],
        gather("a", 0),
        gather("b", 1),
        gather("c", 2),
        gather("d", 2, key=GATHER_FP32, depends_on=(2,)),
        memory_budget_bytes=100,
    )

    def broken(self, **changes):
        plan = plan_collectives(self.PROBLEM, "none")
        check_plan(self.PROBLEM, plan)
        return dataclasses.replace(plan, **changes)

    def test_members(self):
        plan = plan_collectives(self.PROBLEM, "none")
        with pytest.raises(ValueError, match="every collective must be in exactly one bucket"):
            check_plan(self.PROBLEM, self.broken(buckets=plan.buckets[:-1]))
        mixed = (*plan.buckets[:2], Bucket((2, 3), 2, 2))
        with pytest.raises(ValueError, match="different keys"):
            check_plan(self.PROBLEM, self.broken(buckets=mixed))
        turned = (Bucket((1, 0), 0, 0), *plan.buckets[2:])
        with pytest.raises(ValueError, match="members must ascend"):
            check_plan(self.PROBLEM, self.broken(buckets=turned))

    def test_windows(self):
        plan = plan_collectives(self.PROBLEM, "none")
        late = (Bucket((0,), 1, 1), *plan.buckets[1:])
        with pytest.raises(ValueError, match="outside the window of 0"):
            check_plan(self.PROBLEM, self.broken(buckets=late))
        late = (Bucket((0,), 0, 1), *plan.buckets[1:])
        with pytest.raises(ValueError, match="too late for 0"):
            check_plan(self.PROBLEM, self.broken(buckets=late))

    def test_events(self):
        plan = plan_collectives(self.PROBLEM, "none")
        with pytest.raises(ValueError, match="started and waited for"):
            check_plan(self.PROBLEM, self.broken(events=plan.events[:-1]))
        with pytest.raises(ValueError, match="go back from slot"):
            check_plan(self.PROBLEM, self.broken(events=(plan.events[0], plan.events[2], plan.events[1])))
        swapped = (*plan.events[:4], plan.events[4], plan.events[6], plan.events[5], plan.events[7])
        with pytest.raises(ValueError, match="starts before 2, which feeds it, is there"):
            check_plan(self.PROBLEM, self.broken(events=swapped))
        doubled = (*plan.events, plan.events[-1])
        with pytest.raises(ValueError, match="waited for twice"):
            check_plan(self.PROBLEM, self.broken(events=doubled))

    def test_budget(self):
        plan = plan_collectives(self.PROBLEM)
        assert plan.peak_in_flight_bytes > 7
        with pytest.raises(ValueError, match="exceed the budget of 7"):
            check_plan(dataclasses.replace(self.PROBLEM, memory_budget_bytes=7), plan)


class TestReasons:
    def test_hidden_stays_alone(self):
        """Long compute hides every gather but the first: a bucket would only add copies."""
        plan = plan_collectives(problem([100, 100, 100], gather("a", 0), gather("b", 1), gather("c", 2)))
        assert [bucket.members for bucket in plan.buckets] == [(0,), (1,), (2,)]
        assert reasons(plan) == {
            0: AloneReason.SLOWER,
            1: AloneReason.HIDDEN,
            2: AloneReason.HIDDEN,
        }
        assert [item.bucket for item in plan.exposed] == [0]
        assert plan.step_ns == plan.lower_bound.time_ns == 315

    def test_exposed_alphas_are_merged(self):
        """Compute too short for four alphas, but long enough for two."""
        items = [gather(f"w{n}", n, transfer_ns=1, copy_out_ns=0) for n in range(6)]
        plan = plan_collectives(problem([6] * 6, *items))
        assert len(plan.buckets) < 6
        assert plan.step_ns < plan_collectives(problem([6] * 6, *items), bucketing=False).step_ns

    def test_each_reason(self):
        budget = 20
        chosen = problem(
            [5, 5, 5, 5],
            gather("first", 0, size_bytes=3, staging_bytes=3, latest_issue=0),
            gather("window", 4, earliest_issue=4),
            gather("alone", 1, key=GATHER_FP32),
            reduction("a", 1, 4, key=REPLICATE),
            reduction("b", 2, 4, key=REPLICATE, depends_on=(3,)),
            reduction("big", 1, 4, size_bytes=12, staging_bytes=12),
            reduction("bigger", 2, 4, size_bytes=12, staging_bytes=12),
            Collective("tp", TENSOR, Role.FIXED, 0, 1, 1, 1, 2),
            memory_budget_bytes=budget,
        )
        plan = plan_collectives(chosen)
        check_plan(chosen, plan)
        why = reasons(plan)
        assert why[1] is AloneReason.WINDOW
        assert why[2] is AloneReason.ONLY_ONE
        assert why[4] is AloneReason.DEPENDENCY
        assert why[5] is why[6] is AloneReason.MEMORY
        assert why[7] is AloneReason.FIXED
        assert set(reasons(plan_collectives(chosen, bucketing=False)).values()) == {
            AloneReason.OFF,
            AloneReason.FIXED,
        }

    def test_none_says_so(self):
        plan = plan_collectives(problem([5, 5], gather("a", 0), gather("b", 1)), "none")
        assert set(reasons(plan).values()) == {AloneReason.PLANNER}

    def test_exposed_says_why_and_behind_what(self):
        """A long reduction is ahead of a gather that nothing else keeps waiting."""
        chosen = problem([5, 5, 40], reduction("r", 0, 3, transfer_ns=60), gather("g", 1, earliest_issue=1))
        plan = plan_collectives(chosen, "none")
        texts = {plan.buckets[item.bucket].members: item.reason for item in plan.exposed}
        assert texts == {
            (0,): "nothing computed before it is needed",
            (1,): "compute between start and wait is shorter than it",
        }


class TestKnobs:
    """Every knob changes the plan."""

    ITEMS = tuple(gather(f"w{n}", n, block="ab"[n // 3]) for n in range(6))

    def members(self, planner="auto", **fields):
        chosen = problem([8] * 6, *self.ITEMS, **fields)
        plan = plan_collectives(chosen, planner)
        check_plan(chosen, plan)
        return [bucket.members for bucket in plan.buckets]

    def test_planners(self):
        assert self.members("none") == [(n,) for n in range(6)]
        assert self.members("block") == [(0, 1, 2), (3, 4, 5)]
        longer = problem([20] * 6, *self.ITEMS)
        greedy = [bucket.members for bucket in plan_collectives(longer, "greedy").buckets]
        assert greedy == [(0,), (1, 2), (3, 4, 5)]
        with pytest.raises(
            ValueError, match="planner must be one of 'auto', 'greedy', 'block', 'none', got 'best'"
        ):
            plan_collectives(problem([1], gather("a", 0)), "best")

    def test_memory_budget(self):
        """Without memory nothing may be held, so nothing is prefetched or merged; little memory allows little."""
        assert self.members(memory_budget_bytes=0) == [(n,) for n in range(6)]
        assert self.members("block", memory_budget_bytes=0) == [(n,) for n in range(6)]
        peaks = []
        for budget in (0, 20, 50, None):
            chosen = problem([8] * 6, *self.ITEMS, memory_budget_bytes=budget)
            plan = plan_collectives(chosen)
            peaks.append(plan.peak_in_flight_bytes)
            assert budget is None or plan.peak_in_flight_bytes <= budget
        assert peaks == sorted(peaks)
        assert peaks[0] == 0 < peaks[1]

    def test_block_issues_one_ahead(self):
        plan = plan_collectives(problem([8] * 6, *self.ITEMS), "block")
        assert [(bucket.issue_slot, bucket.wait_slot) for bucket in plan.buckets] == [(0, 0), (0, 3)]

    @pytest.mark.parametrize("count", [6, 20])
    def test_no_more_prefetch_than_needed(self, count):
        """Hidden gathers, enumerated and searched: far less is held than when all of them start at once."""
        plan = plan_collectives(problem([100] * count, *(gather(f"w{n}", n) for n in range(count))))
        assert plan.step_ns == plan.lower_bound.time_ns
        assert plan.peak_in_flight_bytes <= 2 * 8

    def test_greedy_reductions(self):
        """A bucket of two takes 20: it fits under 20 between its gradients, not under 19, and not under 21 when a
        gather of 15 on the same group is used meanwhile."""
        grads = [reduction(f"g{n}", n + 1, 6) for n in range(4)]
        plan = plan_collectives(problem([20] * 6, *grads), "greedy")
        assert [bucket.members for bucket in plan.buckets] == [(0, 1, 2, 3)]
        plan = plan_collectives(problem([20, 19, 5, 5, 5, 5], *grads), "greedy")
        assert [bucket.members for bucket in plan.buckets] == [(0,), (1,), (2,), (3,)]
        busy = [gather("w", 2, transfer_ns=15, earliest_issue=2), *grads]
        plan = plan_collectives(problem([20, 21, 1, 1, 1, 1], *busy), "greedy")
        assert [bucket.members for bucket in plan.buckets if 1 in bucket.members] == [(1, 2)]
        busy[0] = gather("w", 1, transfer_ns=15, earliest_issue=1)
        plan = plan_collectives(problem([20, 21, 1, 1, 1, 1], *busy), "greedy")
        assert [bucket.members for bucket in plan.buckets if 1 in bucket.members] == [(1,)]


class TestChain:
    def test_a_reduction_of_a_reduction(self):
        """Reduce-scatter, then all-reduce of the shard, behind 20 ns of compute and with 40 ns to hide under.

        As traced: 20 + 15 + 15 + 40. The first is waited for in the gap where it is done, so both hide.
        """
        chosen = problem(
            [20, 20, 20],
            reduction("rs", 1, 3),
            reduction("ar", 1, 3, key=REPLICATE, size_bytes=0, depends_on=(0,)),
        )
        assert plan_collectives(chosen, "none").step_ns == 90
        plan = plan_collectives(chosen)
        check_plan(chosen, plan)
        assert plan.step_ns == 60
        assert [(event.slot, event.action, event.bucket) for event in plan.events] == [
            (1, "issue", 0),
            (2, "wait", 0),
            (2, "issue", 1),
            (3, "wait", 1),
        ]

    def test_a_gather_of_a_gather_shares_no_bucket_with_it(self):
        chosen = problem([1] * 4, *(gather(f"w{n}", n, depends_on=(n - 1,) if n else ()) for n in range(4)))
        plan = plan_collectives(chosen)
        check_plan(chosen, plan)
        assert all(len(bucket.members) == 1 for bucket in plan.buckets)


def test_every_planner_on_an_empty_problem():
    for planner in PLANNER_NAMES:
        plan = plan_collectives(problem([5, 6]), planner)
        assert plan.step_ns == 11
        assert plan.buckets == ()
