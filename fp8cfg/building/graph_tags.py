"""Graph tags: kinds of leaves of a lowered graph, for fiddle.selectors, `select(graph, tag=OptimizerState)`, and fdl.set_tagged."""

from __future__ import annotations

import fiddle as fdl
from fiddle._src.codegen.import_manager import register_import_alias
from fiddle.experimental.auto_config import with_tags

__all__ = ["FP8Layers", "OptimizerState", "with_tags"]


class FP8Layers(fdl.Tag):  # type: ignore[misc]
    """Layers that run in FP8 only where asked for, each true or false: the output layer and attention."""


class OptimizerState(fdl.Tag):  # type: ignore[misc]
    """Codecs of what an optimizer keeps for each parameter: its master weight and its moments."""


# The code that Fiddle's new_codegen writes for a tagged leaf calls auto_config.with_tags, which it does not import: NameError. Seen
# with fiddle 0.3.1; it ends with the Fiddle that imports it (auto_config/ir_to_cst.py).
register_import_alias(__name__, "from fp8cfg import graph_tags as auto_config")
