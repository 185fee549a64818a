"""Costs of the changes that a search for a fit weighs, in parts of a step; what changes the numbers goes after what does not."""

from __future__ import annotations

from typing import Any

RECOMPUTE = {"none": 0.0, "selective": 0.05, "full": 0.33}
"""Cost of model.recompute_granularity in steps: full repeats the forward pass, a third of the products; selective, of attention
alone, takes some per cent (arXiv 2205.05198, section 5)."""
SHARD = {"none": 0.0, "zero1": 0.02, "zero2": 0.03, "fsdp": 0.1}
"""Cost of storage.shard: ZeRO sends what an all-reduce does, FSDP half as much again (arXiv 1910.02054, section 7)."""
STAGED = 0.3
"""Cost of storage.shard=fsdp in pipeline stages beyond that: weights are gathered twice for each of many microbatches. It goes
after full recomputation, which sends no more."""
LAYOUT = 0.5
"""Cost of giving up a layout that runs, which is never changed for the user: it is offered after all that keeps it."""
CURED = 0.25
"""Cost of writing what the refusals of a layout say, such as float32 masters, which keeps the layout."""
LEVEL = {None: 0.0, "O1": 1.0, "O2": 1.1, "O3": 1.2}
"""A level changes the numbers, and goes after everything that does not; so does giving one up."""
CACHE, TRANSPOSED = "fp8.keep_transpose_cache", 0.01
"""A key that is given up where it contradicts others or takes too much, and the cost of that: each backward pass reads and writes
each weight once more (docs/concepts.md)."""
HALVED = 0.02
"""Cost of halving the microbatch, whose products are smaller then."""
UNQUANTIZED = {"fp8.params": False}
"""Under storage.shard=fsdp no rank has its shards in FP8 beside them: a byte a parameter over the ranks. What is gathered has the
compute dtype then, twice the bytes sent."""
MOMENTS: dict[str, Any] = {"storage.exp_avg": "bf16", "storage.exp_avg_sq": "bf16"}
"""Moments in fewer bits, which change the numbers on any layout: the last that is tried."""
