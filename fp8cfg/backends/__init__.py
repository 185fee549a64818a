"""Backends: the libraries that execute FP8 GEMMs, the choice among them, and the plan for each linear layer. The package itself
loads no torch.
"""

from __future__ import annotations

SHIPPED = ("native", "te", "torchao", "msamp")
"""The backends of this version, each a folder, in the order in which they are listed."""
REFERENCE = "native"
"""The one that has every key and runs everywhere: where FP8 is emulated it goes first, and where none is asked for it is taken."""
