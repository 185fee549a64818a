#!/usr/bin/env python3
"""Print a table of the model families, in Markdown: the largest differences of logits and gradients from transformers' model with the
same random weights (float32, a small shape; of gradients relative to the largest of each parameter), how many sizes have their
published counts, the validation loss of the tiny recipe in bf16 and in bf16_fp8 after the same steps on a CPU, and the share of all
matmul FLOPs in FP8 of the tiny and of the largest recipe. Needs transformers.

    python tools/make_families_table.py                      # 100 steps each: some ten minutes a family on a core
    python tools/make_families_table.py --steps 0            # all but the losses, in a minute
    python tools/make_families_table.py --steps 20 qwen3     # families by their names
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import fp8cfg
from fp8cfg.models import parameter_counts
from fp8cfg.models.hf_checkpoint import to_hf
from fp8cfg.planning.coverage import planned_coverage
from fp8cfg.planning.layer_plan import plan_layers, transformer_config
from fp8cfg.schema.recipe_registry import recipes
from tools.command import run
from tools.families import PUBLISHED, TINY, build, config_of

FAMILIES = [name.removesuffix("_tiny") for name in TINY]
HEADER = (
    "family",
    "recipes",
    "logits",
    "gradients",
    "published counts",
    "loss, bf16",
    "loss, bf16_fp8",
    "FP8, tiny",
    "FP8, largest",
)


def differences(name: str) -> tuple[float, float]:
    """The largest absolute difference of a logit, and of a gradient relative to the largest one of its parameter."""
    their, ours, config, layout = build(name, torch.float32)
    tokens = torch.randint(config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    logits = (ours(tokens) - their(tokens).logits).abs().max().item()
    ours(tokens[:, :-1], tokens[:, 1:]).backward()
    their(tokens, labels=tokens).loss.backward()
    gradients = {
        n: p.grad for n, p in ours.named_parameters(remove_duplicate=False) if p.grad is not None
    }
    found = to_hf(gradients, config, dataclasses.replace(layout, centered=None))
    return logits, max(
        ((found[n] - p.grad).abs().max() / p.grad.abs().max()).item()
        for n, p in their.named_parameters()
        if p.grad is not None
    )


def sizes_of(family: str) -> list[str]:
    """The names of the recipes in the file of `family`, but for tiny and short ones, that are that family's."""
    return [
        name
        for name in recipes()
        if name.startswith(family) and not name.endswith("_tiny") and name not in ALIASES
    ]


ALIASES = {"llama_1b", "llama_3b", "llama_8b", "llama_70b", "llama_405b"}
"""Short names of others."""


def published(names: list[str]) -> str:
    """How many of `names` have their published count, of how many that have one here."""
    right = 0
    known = [name for name in names if name in PUBLISHED]
    for name in known:
        digits = len(str(PUBLISHED[name]).rstrip("0").partition(".")[2])
        total = parameter_counts(config_of(recipes()[name]().model))["total"] / 1e9
        right += abs(round(total, digits) - PUBLISHED[name]) <= 10**-digits / 2 + 1e-9
    return f"{right} of {len(known)}"


def share(name: str) -> float:
    """The planned share of all matmul FLOPs in FP8, of recipe `name` under bf16_fp8."""
    recipe = fp8cfg.compose([f"recipe={name}", "precision=bf16_fp8"])
    return planned_coverage(recipe, plan_layers(recipe)).share


def loss(name: str, precision: str, steps: int) -> float:
    """The validation loss of recipe `name` on the small shipped corpus after `steps` steps."""
    words = [
        f"recipe={name}",
        f"precision={precision}",
        "data=tiny",
        f"trainer.max_steps={steps}",
        "trainer.accelerator=cpu",
        "trainer.compile=off",
        f"trainer.val_check_interval={steps}",
        "trainer.limit_val_batches=4",
        f"checkpoint.every_n_steps={steps}",
        "optim.warmup_steps=1",
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return fp8cfg.fit(fp8cfg.build(fp8cfg.compose(words)), folder=Path(folder) / "run").val_loss


def row(family: str, steps: int) -> list[str]:
    name, names = f"{family}_tiny", sizes_of(family)
    logits, gradients = differences(name)
    largest = max(
        names, key=lambda n: parameter_counts(transformer_config(recipes()[n]()))["total"]
    )
    losses = [
        f"{loss(name, precision, steps):.3f}" if steps else "-"
        for precision in ("bf16_mixed", "bf16_fp8")
    ]
    return [
        family,
        str(len(names)),
        f"{logits:.0e}",
        f"{gradients:.0e}",
        published(names),
        *losses,
        f"{share(name):.0%}",
        f"{share(largest):.0%} ({largest})",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "family", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; default: all"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        metavar="N",
        help="optimizer steps of each run, none with 0; default: %(default)s",
    )
    options = parser.parse_args()
    if options.steps < 0:
        parser.error(f"--steps {options.steps}: expected a whole number from 0")
    if unknown := [family for family in options.family if family not in FAMILIES]:
        parser.error(f"{unknown[0]}: no such family; choose from {', '.join(FAMILIES)}")
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for family in options.family or FAMILIES:
        print(f"| {' | '.join(row(family, options.steps))} |", flush=True)
    return 0


if __name__ == "__main__":
    run(main)
