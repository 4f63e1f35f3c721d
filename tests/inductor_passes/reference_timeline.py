"""The machine of ``inductor_passes.timeline``, one nanosecond at a time: the oracle for the fast simulator.

It shares no code with it: it asks at every tick what the stream and each group are doing.
"""

from collections import deque

from inductor_passes.timeline import Compute, Start


def simulate_by_ticks(nodes):
    """Step time, exposed ns per collective, begin time per node, live bytes per node."""
    todo = deque(enumerate(nodes))
    begins, live_bytes, exposed = {}, {}, {}
    queues, running, finished = {}, {}, set()
    live = now = busy_for = 0
    current = None

    def settle():
        """Everything that happens at this tick without taking time."""
        nonlocal live, busy_for, current
        changed = True
        while changed:
            changed = False
            for group, queue in queues.items():
                while queue and running.get(group) is None:
                    number, left = queue.popleft()
                    if left == 0:
                        finished.add(number)
                    else:
                        running[group] = [number, left]
                    changed = True
            if current is None and todo:
                position, node = todo.popleft()
                begins[position] = now
                live += node.alloc_bytes
                live_bytes[position] = live
                current = node
                if isinstance(node, Compute):
                    busy_for = node.duration_ns
                elif isinstance(node, Start):
                    busy_for = node.issue_ns
                    exposed[node.collective] = 0
                else:
                    busy_for = 0
                changed = True
            if current is not None and busy_for == 0:
                if isinstance(current, Start):
                    queues.setdefault(current.group, deque()).append(
                        (current.collective, current.duration_ns)
                    )
                elif not isinstance(current, Compute) and current.collective not in finished:
                    continue
                live -= current.free_bytes
                current = None
                changed = True

    def communicating():
        return any(queues.values()) or any(item is not None for item in running.values())

    settle()
    while todo or current is not None or communicating():
        blocked_on = None
        if current is not None and busy_for == 0:
            blocked_on = current.collective
        elif current is None:
            waited = {node.collective for node in nodes if not isinstance(node, Compute | Start)}
            blocked_on = next(c for c in exposed if c not in finished and c not in waited)
        if blocked_on is not None:
            exposed[blocked_on] += 1
        now += 1
        if busy_for:
            busy_for -= 1
        for group, item in running.items():
            if item is not None:
                item[1] -= 1
                if item[1] == 0:
                    finished.add(item[0])
                    running[group] = None
        settle()
    order = range(len(nodes))
    return now, exposed, [begins[i] for i in order], [live_bytes[i] for i in order]
