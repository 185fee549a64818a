"""Worker that takes training steps of the fp8cfg that is first on its path, a line of JSON on stdin for each request.

    {"make": NAME, "words": [...], "compiled": false}    builds the recipe of these words, and takes three steps to warm up
    {"step": NAME}                                       {"seconds": 0.21}: process time of one step
    {"profile": NAME}                                    {"table": ...}: where the time of one step goes

An answer of {"refused": [...]} has the lines of a recipe that this tree does not take. It imports what trees of both sides of a
change have, and nothing of the tools.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import fp8cfg
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import Fp8cfgError
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step

STEPS: dict[str, Callable[[], float]] = {}


def make(name: str, words: list[str], compiled: bool) -> dict[str, Any]:
    recipe = fp8cfg.compose(words)
    job, count = fp8cfg.build(recipe), iter(range(10**9))
    batches, _ = run_data(recipe)
    if compiled:
        job.compile_model()
    STEPS[name] = lambda: train_step(job, batches, next(count), World()).wait().loss
    return {"losses": [STEPS[name]() for _ in range(3)]}


def step(name: str) -> dict[str, Any]:
    began = time.process_time()
    STEPS[name]()
    return {"seconds": time.process_time() - began}


def profile(name: str) -> dict[str, Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        STEPS[name]()
    return {
        "table": found.key_averages().table(
            sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=48
        )
    }


def answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "make" in request:
            return make(request["make"], request["words"], request["compiled"])
        return step(request["step"]) if "step" in request else profile(request["profile"])
    except Fp8cfgError as e:
        return {"refused": list(getattr(e, "problems", None) or str(e).splitlines())}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a tree prints is no answer
    torch.set_num_threads(int(sys.argv[1]))
    torch._dynamo.config.recompile_limit = 64  # several configurations of one class in one process
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
