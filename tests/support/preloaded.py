"""Preloaded modules, and a composition, of the process that others are forked from (forked.py)."""

import gc
import importlib
from contextlib import suppress

import fp8cfg
from tests.support.small import small

# What each process that needs it would import: Dynamo, which torch's optimizers want, the layouts of several ranks, the command line's runs,
# and what tests of several ranks share.
for name in (
    "torch._dynamo",
    "torch.distributed.nn",
    "torchao.float8",
    "numpy.ma",
    "fp8cfg.cli.train",
    "fp8cfg.cli.resume",
    "fp8cfg.training.loop",
    "fp8cfg.parallel.fsdp",
    "fp8cfg.parallel.context",
    "fp8cfg.parallel.pipeline_schedule",
    "fp8cfg.backends.any_model.checks",
    "fp8cfg.interop.hf_trainer",
    "tests.support.fsdp_runs",
    "tests.support.pipeline_steps",
):
    with suppress(ImportError):
        importlib.import_module(name)
fp8cfg.build(small("precision=bf16_fp8"))
gc.collect()
gc.freeze()  # a full collection in a forked process would go through all of this, and copy its pages
