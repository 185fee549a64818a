"""Preloaded modules, and a composition, of the process that others are forked from (forked.py)."""

import gc
import importlib
from contextlib import suppress

import fp8cfg
from tests.support.small import small

# torch's optimizers want Dynamo, and FSDP2 and gloo's functions would be imported by each process that needs them.
for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.nn", "torchao.float8", "fp8cfg.cli.train", "fp8cfg.cli.resume"):
    with suppress(ImportError):
        importlib.import_module(name)
fp8cfg.build(small("precision=bf16_fp8"))
gc.collect()
gc.freeze()  # a full collection in a forked process would go through all of this, and copy its pages
