#!/usr/bin/env python3
"""Planned memory of the large recipes on their own H100s, FP8 next to BF16, in GiB of the rank that takes most.

    python tools/compare_memory.py                             # bf16, bf16_fp8 and bf16_fp8_current: a minute
    python tools/compare_memory.py bf16 bf16_fp8_block         # other presets

Exits with 1 if a preset needs more than the first one.
"""

from __future__ import annotations

import argparse

import fp8cfg
from fp8cfg.schema.recipe_registry import recipes
from fp8cfg.schema.tables import table

LARGE = 8
"""GPUs."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("presets", nargs="*", default=["bf16", "bf16_fp8", "bf16_fp8_current"])
    presets = parser.parse_args().presets
    rows, larger = [], 0
    for name, make in recipes().items():
        if name == "from_hf":
            continue
        recipe = make()
        gpus = recipe.trainer.num_nodes * recipe.trainer.devices
        if gpus < LARGE:
            continue
        peaks = [peak(name, preset, gpus) for preset in presets]
        larger += sum(other > peaks[0] for other in peaks[1:])
        granularity = recipe.model.recompute_granularity
        rows.append([name, str(gpus), granularity, *(f"{n / 2**30:.1f}" for n in peaks)])
    print(table(["recipe", "GPUs", "recompute", *presets], rows, right=range(3, 3 + len(presets))))
    print(f"{larger} larger than {presets[0]}")
    return int(larger > 0)


def peak(name: str, preset: str, gpus: int) -> int:
    """Bytes on the rank that takes most."""
    recipe = fp8cfg.compose([f"recipe={name}", f"precision={preset}"])
    return fp8cfg.plan(recipe, "h100", gpus).widest.total


if __name__ == "__main__":
    raise SystemExit(main())
