"""Backends for FP8 GEMMs, the choice among them, and the plan of each linear layer.

The package itself does not import torch.
"""

from __future__ import annotations

SHIPPED = ("native", "te", "torchao", "msamp")
"""Backends of this version in the order of lists. Each one is a folder."""
REFERENCE = "native"
"""Backend with every key, for any machine. It is preferred for emulation and used without FP8."""
