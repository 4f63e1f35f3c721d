"""The event simulator: worked examples, reasons, and equality with a tick-by-tick reference."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.timeline import Compute, ExposureReason, Start, Wait, simulate
from tests.helpers.effort import count_calls
from tests.inductor_passes.reference_timeline import simulate_by_ticks


@st.composite
def schedules(draw):
    """Random valid schedules: starts before waits, some collectives never waited for, three groups."""
    count = draw(st.integers(0, 6))
    nodes, open_, started = [], [], 0
    memory = st.integers(0, 5)
    for _ in range(draw(st.integers(0, 18))):
        choice = draw(st.sampled_from("csw"))
        if choice == "s" and started < count:
            group, length, issue = (
                draw(st.sampled_from("AB")),
                draw(st.integers(0, 9)),
                draw(st.integers(0, 2)),
            )
            nodes.append(Start(started, group, length, issue, draw(memory), draw(memory)))
            open_.append(started)
            started += 1
        elif choice == "w" and open_:
            number = open_.pop(draw(st.integers(0, len(open_) - 1)))
            nodes.append(Wait(number, draw(memory), draw(memory)))
        else:
            nodes.append(Compute(draw(st.integers(0, 6)), draw(memory), draw(memory)))
    return nodes


@settings(max_examples=200, deadline=None)
@given(schedules())
def test_equals_the_reference(nodes):
    fast = simulate(nodes)
    step, exposed, begins, live = simulate_by_ticks(nodes)
    assert fast.step_ns == step
    assert {item.collective: item.exposed_ns for item in fast.collectives} == exposed
    assert list(fast.begin_ns) == begins
    assert list(fast.live_bytes) == live
    assert fast.step_ns == fast.compute_ns + fast.exposed_ns


def test_hidden_and_exposed_by_hand():
    timeline = simulate([Start(0, "g", 10), Compute(4), Start(1, "g", 3), Wait(0), Compute(20), Wait(1)])
    first, second = timeline.collectives
    assert (first.begin_ns, first.end_ns, first.waited_ns, first.exposed_ns) == (0, 10, 4, 6)
    assert (second.issued_ns, second.begin_ns, second.end_ns, second.exposed_ns) == (4, 10, 13, 0)
    assert timeline.step_ns == 30
    assert timeline.compute_ns == 24


@pytest.mark.parametrize(
    ("nodes", "reason", "blocker"),
    [
        ([Start(0, "g", 5), Wait(0), Compute(9)], ExposureReason.FIRST, None),
        ([Compute(9), Start(0, "g", 5), Wait(0)], ExposureReason.LAST, None),
        ([Compute(9), Start(0, "g", 5)], ExposureReason.LAST, None),
        ([Compute(1), Start(0, "g", 5), Compute(2), Wait(0), Compute(1)], ExposureReason.SHORT, None),
        ([Start(0, "g", 5), Compute(5), Wait(0), Compute(1)], ExposureReason.HIDDEN, None),
        (
            [Compute(1), Start(7, "g", 50), Start(0, "g", 5), Compute(4), Wait(0), Compute(1), Wait(7)],
            ExposureReason.QUEUED,
            7,
        ),
    ],
)
def test_reasons(nodes, reason, blocker):
    timing = next(item for item in simulate(nodes).collectives if item.collective == 0)
    assert timing.reason is reason
    assert timing.blocker == blocker


def test_memory_curve():
    nodes = [Start(0, "g", 5, alloc_bytes=100), Compute(5, 10, 4), Wait(0), Compute(5, 0, 100), Compute(1)]
    timeline = simulate(nodes, initial_bytes=1000)
    assert timeline.live_bytes == (1100, 1110, 1106, 1106, 1006)
    assert timeline.peak_bytes == 1110
    assert simulate([]).peak_bytes == 0


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([Wait(3)], "collective 3 is waited for before its start"),
        ([Start(3, "g", 1), Wait(3), Wait(3)], "collective 3 is waited for twice"),
        ([Start(3, "g", 1), Start(3, "g", 1)], "collective 3 is started twice"),
    ],
)
def test_impossible_schedules_are_refused(nodes, message):
    with pytest.raises(ValueError, match=message):
        simulate(nodes)


def test_linear():
    """Eight times the nodes take eight times as many calls, but for the start."""

    def effort(count):
        nodes = []
        for index in range(count):
            nodes += [Start(index, "g", 3), Compute(2), Wait(index)]
        return count_calls(lambda: simulate(nodes))

    assert effort(8_000) < 8.2 * effort(1_000)
