"""torchao backend: Float8Linear and the prototype MXFP8Linear."""

from __future__ import annotations

from fp8cfg.schema.backends import Capabilities

CAPABILITIES = Capabilities(
    priority=20,
    skips_on_device=True,
    fully_shards=True,
    fp8_gather="cast",
    pipeline_parallel=True,
    requantizes=True,
    layer_modules=("torchao.float8",),
)
