"""MS-AMP backend: the FP8 linear layers and the optimizers of MS-AMP."""

from __future__ import annotations

from fp8cfg.schema.backends import Capabilities

CAPABILITIES = Capabilities(
    priority=40,
    own_state=True,
    level="O2",
    level_pow2=True,
    compiles=False,
    adam_weight_decay=(
        "MS-AMP leaves it out of the moments that it stores; set optim.name=adamw,"
        " optim.weight_decay=0, or backend=native opt_level=O2"
    ),
)
