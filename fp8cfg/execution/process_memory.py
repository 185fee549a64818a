"""Memory of a finished run, in a process that trains another one."""

from __future__ import annotations

import gc
import sys


def free_memory() -> None:
    """Frees the memory and the compiled code of a finished run. Loads no torch."""
    # Objects in reference cycles keep their GPU memory until a collection. Without a reset,
    # torch.compile would reach its limit of recompilations after a few models.
    gc.collect()
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.empty_cache()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
