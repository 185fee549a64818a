"""Fiddle tags for the leaves of a lowered graph.

Use them to select or set related leaves at once:

    selectors.select(graph, tag=OptimizerState)
    fdl.set_tagged(graph, tag=FP8Layers, value=True)
"""

from __future__ import annotations

import fiddle as fdl
from fiddle._src.codegen.import_manager import register_import_alias
from fiddle.experimental.auto_config import with_tags

__all__ = ["FP8Layers", "OptimizerState", "with_tags"]


class FP8Layers(fdl.Tag):  # type: ignore[misc]
    """Switches (true or false) for FP8 in the output layer and in attention."""


class OptimizerState(fdl.Tag):  # type: ignore[misc]
    """Storage codecs of the optimizer state: master weights and moments."""


# Fiddle's new_codegen (auto_config/ir_to_cst.py) writes calls of auto_config.with_tags without the
# import, so the generated code raises NameError. Seen with fiddle 0.3.1. The alias adds the import.
register_import_alias(__name__, "from fp8cfg import graph_tags as auto_config")
