"""Name collectives after the parameters they carry, so that a graph's text shows what its tags say.

Compile caches key a graph by its text, which leaves out `meta`, and with it the tags: two models with equal
graphs but different module names or configurations would share an entry, and with it a plan made for the
other. Names are part of the text. They also make dumps and generated code readable. Nothing reads a name
back.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from inductor_passes import _compat
from inductor_passes import graph as fxg

if TYPE_CHECKING:
    from torch import fx


def name_collectives(graph: fx.Graph, config_key: str) -> None:
    """Rename every tagged collective to its kind, its parameter and the key of the configuration in use.

    Args:
        graph: graph whose node names change; a second call changes nothing.
        config_key: short text that identifies the configuration.
    """
    for start in fxg.starts(graph):
        param = fxg.param_fqn(start)
        if param:
            name = f"{fxg.get_kind(start)}_{re.sub(r'[^0-9A-Za-z_]', '_', param)}_{config_key}"
            if not start.name.startswith(name):
                _compat.rename(start, name)
