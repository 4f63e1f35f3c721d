"""How much Python a function runs, counted rather than timed: the same on a busy machine as on an idle one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def count_calls(function: Callable[[], Any]) -> int:
    """Calls of Python and C functions that `function` makes in this thread.

    Work inside one C call (a sort, a slice) counts once whatever its size, so this finds loops that grow too fast, not
    long copies.
    """
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls
