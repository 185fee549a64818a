"""Rows: each architecture trained a few steps in each precision by fp8cfg.build. `python rows.py [NAME ...]` prints a line for each,
and below it what stays out of FP8 and why; exit code 1 where one did not train, or nothing of it ran in FP8."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import fp8cfg
from tools.architectures import language, other
from tools.libraries.operators import without_operators

ENDS = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
PRECISIONS = {
    "bf16": ["precision=bf16_mixed"],
    "delayed": ["precision=bf16_fp8"],
    "block": ["precision=bf16_fp8_block", ENDS],
    "torchao": ["precision=bf16_fp8_current", "backend=torchao", "fp8.params=false", ENDS],
}
STEPS, WITHIN = 6, 0.1
NAMES = [*language.TRANSFORMERS, *other.OTHER]
REFUSED = {"nn_lstm": "LSTM is no linear layer"}
"""Architectures without a product that can be converted, and what the refusal says."""


class Trained(NamedTuple):
    """Losses of the first batch again and again, the share of the FLOPs in FP8, and what is not, by reason."""

    losses: list[float]
    share: float
    left_out: Sequence[tuple[str, int, float]]


def recipe(precision: str) -> fp8cfg.Recipe:
    return fp8cfg.compose(
        [
            *PRECISIONS[precision],
            "optim.lr=2e-3",
            "optim.lr_decay_style=constant",
            "optim.warmup_steps=0",
            "optim.weight_decay=0",
            f"trainer.max_steps={STEPS}",
            "trainer.accelerator=cpu",
        ]
    )


def trained(name: str, precision: str) -> Trained:
    """Raises ConfigError where the model is refused, and NotFP8Error where it did not run as it was planned."""
    torch.manual_seed(0)
    model, loss_of = language.made(name) if name in language.TRANSFORMERS else other.OTHER[name]()
    job = fp8cfg.build(recipe(precision), model=model.train())
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)  # of dropout
        with job.autocast():
            loss = loss_of(job.model)
            job.backward(loss)
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(loss.item())
    seen = job.prove() if precision != "bf16" else None
    return Trained(losses, seen.share if seen else 0.0, seen.left_out if seen else ())


def row(name: str) -> tuple[bool, str]:
    """Whether the architecture is right, and its lines."""
    found: dict[str, Trained] = {}
    try:
        for precision in PRECISIONS:
            found[precision] = trained(name, precision)
    except fp8cfg.ConfigError as e:
        return REFUSED.get(name, "no such") in str(e), f"refused: {e}"
    except Exception as e:  # whatever it is, the next architecture is tried
        return False, f"FAILED, {precision}: {type(e).__name__}: {str(e).partition(chr(10))[0]}"
    plain, fp8 = found.pop("bf16"), found
    wrong = [_wrong(plain, precision, ran) for precision, ran in fp8.items()]
    shares = " ".join(f"{ran.share:8.1%}" for ran in fp8.values())
    losses = " ".join(f"{ran.losses[-1]:8.4f}" for ran in (plain, *fp8.values()))
    lines = [f"{shares}   {plain.losses[0]:8.4f} -> {losses}{''.join(wrong)}"]
    lines += [
        f"{'':25}left out: {share:.1%}, {count} of {reason}"
        for reason, count, share in fp8["delayed"].left_out
    ]
    return name not in REFUSED and not any(wrong), "\n".join(lines)


def _wrong(plain: Trained, precision: str, ran: Trained) -> str:
    if not all(map(math.isfinite, ran.losses)) or ran.losses[-1] >= ran.losses[0]:
        return f"  FAILED, {precision}: does not learn"
    if ran.share <= 0:
        return f"  FAILED, {precision}: nothing ran in FP8"
    gap = abs(ran.losses[-1] - plain.losses[-1]) / max(plain.losses[0], 1e-3)
    return (
        "" if gap < WITHIN else f"  FAILED, {precision}: {gap:.1%} of the first loss away from bf16"
    )


def main(names: Sequence[str]) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_operators()
    all_right = True
    print(
        f"{'architecture':<24} {'delayed':>8} {'block':>8} {'torchao':>8}   loss, first -> {'bf16':>5} {'delayed':>8} {'block':>8} {'torchao':>8}"
    )
    for name in names or NAMES:
        began = time.perf_counter()
        right, lines = row(name)
        all_right &= right
        first, _, rest = lines.partition("\n")
        print(
            f"{name:<24} {first}  ({time.perf_counter() - began:.1f} s)"
            + (f"\n{rest}" if rest else ""),
            flush=True,
        )
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
