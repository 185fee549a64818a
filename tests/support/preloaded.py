"""Preloaded modules, and a composition, of the process that others are forked from (forked.py)."""

from contextlib import suppress

import fp8cfg
import fp8cfg.cli.resume
import fp8cfg.cli.train
import fp8cfg.training.loop
from tests.support.small import small

with suppress(ImportError):
    import torchao.float8  # noqa: F401
fp8cfg.build(small("precision=bf16_fp8"))
