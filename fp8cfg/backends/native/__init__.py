"""Native backend: FP8 in plain torch, emulated or with torch's scaled matrix products."""

from __future__ import annotations

from fp8cfg.schema.backends import Capabilities

CAPABILITIES = Capabilities(
    priority=10,
    statistics=True,
    counts_values=True,
    moves_scales=True,
    skips_on_device=True,
    fully_shards=True,
    fp8_gather="params",
    tensor_parallel=True,
    pipeline_parallel=True,
    weight_workspace=True,
    adapters=True,
)
