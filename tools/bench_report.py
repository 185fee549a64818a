#!/usr/bin/env python3
"""Writes the report of a long synthetic run, and prints its size, the time to write it and the time to open it in Chromium.

    python tools/bench_report.py                                   100,000 steps, 400 linear layers
    python tools/bench_report.py --steps 1000 --layers 8 --every 10  a quick look

Statistics are written every --every steps for three tensors of each layer, as `log.fp8_stats_every_n_steps` does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import fp8cfg
from fp8cfg.composition import to_yaml
from tests.support import chromium

TENSORS = ("input", "weight", "grad_output")
GIB = 2**30


def write_synthetic_run(folder: Path, steps: int, layers: int, every: int) -> None:
    """Writes the files of a run that never trained.

    Args:
        folder: The run folder, created here.
        steps: Optimizer steps.
        layers: Linear layers with statistics.
        every: Steps between statistics.
    """
    random.seed(0)
    words = [
        "recipe=llama_8b",
        "precision=bf16_fp8",
        "trainer.strategy.context_parallel_size=1",
        f"trainer.max_steps={steps}",
        f"log.fp8_stats_every_n_steps={every}",
    ]
    recipe = fp8cfg.compose(words)
    tokens = recipe.trainer.global_batch_size * recipe.model.seq_length
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    environment = {"command": ["fp8cfg", *words], "ranks": 8, "gpus": ["NVIDIA H100 80GB HBM3"] * 8}
    (folder / "environment.json").write_text(json.dumps(environment))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = 2 + 3 * math.exp(-5 * step / steps)
            clipped = random.randrange(5)
            row = {
                "step": step,
                "loss": loss + random.gauss(0, 0.05),
                "lr": 3e-4 * (1 - step / steps),
                "grad_norm": abs(random.gauss(1, 0.2)),
                "stepped": step % 9973 != 0,
                "tokens": step * tokens,
                "seconds": 0.4,
                "tokens_per_second": tokens / 0.4 * random.gauss(1, 0.02),
                "memory": 60 * GIB,
                "time": 1.7e9 + 0.4 * step,
                "fp8_clipped": clipped,
                "fp8_infinite": 0,
                "fp8_clipped_values": clipped * random.randrange(1000),
                "fp8_infinite_values": 0,
            }
            file.write(json.dumps(row) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"step": step, "val_loss": loss + 0.1}) + "\n")
    with (folder / "fp8_stats.jsonl").open("w") as file:
        for step in range(every, steps + 1, every):
            for layer in range(layers):
                for tensor in TENSORS:
                    file.write(json.dumps(_statistics(step, layer, tensor)) + "\n")


def _statistics(step: int, layer: int, tensor: str) -> dict[str, object]:
    """Returns a line of fp8_stats.jsonl."""
    amax = math.exp(random.gauss(layer / 100, 0.2) - 8 * (tensor == "grad_output"))
    return {
        "step": step,
        "layer": f"layers.{layer // 4}.linear_{layer % 4}",
        "tensor": tensor,
        "format": "e4m3",
        "amax": amax,
        "scale_min": 448 / amax,
        "scale_max": 448 / amax,
        "underflow": 1e-4 * layer * random.random(),
        "overflow": 1e-5 * max(random.random() - 0.9, 0),
        "error": 0.02 + 0.01 * random.random(),
        "zeros": 0,
        "nonfinite": 0,
        "elements": 1 << 24,
    }


def _cpu_seconds(browser: chromium.Browser) -> float:
    """Returns the CPU time of the page's main thread since it was opened."""
    metrics = browser.call("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


def main(arguments: list[str] | None = None) -> int:
    """Measures and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=400)
    parser.add_argument("--every", type=int, default=100, help="steps between statistics")
    parser.add_argument("--output", type=Path, help="keep the report here")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "run"
        write_synthetic_run(folder, chosen.steps, chosen.layers, chosen.every)
        data = sum(path.stat().st_size for path in folder.iterdir())
        wall, cpu = time.perf_counter(), time.process_time()
        page = fp8cfg.write_report(folder, chosen.output or Path(temporary) / "report.html")
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"run:      {chosen.steps:,} steps, {chosen.layers} layers, {data / 1e6:.0f} MB")
        print(f"report:   {page.stat().st_size / 1e6:.2f} MB")
        print(
            f"to write: {wall:.1f} s, of which {cpu:.1f} s on the CPU; load {os.getloadavg()[0]:.0f}"
        )
        if chromium.PATH is None:
            print("to open:  chromium is not installed")
            return 0
        with chromium.chromium(Path(temporary) / "profile") as browser:
            browser.call("Performance.enable", timeDomain="threadTicks")
            times = [browser.open(page) for _ in range(4)]
            opened = _cpu_seconds(browser)
            browser.run("figures.filter(f => !f.closest('[hidden]')).forEach(draw)")
            browser.frames()
            drawn = _cpu_seconds(browser) - opened
        print(f"to open:  {min(times):.2f} s, of which {opened:.2f} s on the CPU")
        print(f"to draw the figures below: {drawn:.2f} s on the CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
