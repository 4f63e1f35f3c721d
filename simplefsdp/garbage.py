"""How often Python looks for unreachable cycles of objects.

Owns one threshold. A trace makes millions of objects that stay, and every look goes through them again. Does not import
torch: the command line uses this before anything that does.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["rare_collections"]

_OBJECTS_BETWEEN_COLLECTIONS = 200_000


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Look for garbage seldom while this lasts; where the collector is off, it stays off."""
    before = gc.get_threshold()
    if before[0]:  # 0 is off
        gc.set_threshold(max(before[0], _OBJECTS_BETWEEN_COLLECTIONS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
