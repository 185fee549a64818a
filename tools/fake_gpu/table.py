#!/usr/bin/env python3
"""Launches, copies, waits and the peak of memory of training code on the fake GPU, and who waits; exit code 1 where one is above its
ceiling.

    make test-fake-gpu                                        # sets the fake GPU up, too
    . FOLDER/env.sh; $FAKE_GPU_PYTHON -m tools.fake_gpu.table  # on one that is there
    ... -m tools.fake_gpu.table linear --places CS --names     # cases with one of these words; who copies and waits; every kernel
    ... -m tools.fake_gpu.table --record                       # writes the counts down as the ceilings (ceilings.toml)
"""

from __future__ import annotations

import argparse
import gc
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from tools.fake_gpu.recorder import Requests, is_fake, record

CEILINGS = Path(__file__).with_name("ceilings.toml")
FIGURES = ("launches", "copies", "waits")
PEAK = "GiB"
"""The figure of the peak above what was held before, of which a hundredth and a MiB more are allowed: blocks of the allocator are
rounded up, and found in the order in which others were freed."""
Counts = dict[str, int | float]


def counts(parts: dict[str, Requests]) -> Counts:
    """The figures of a case: launches of forward and backward together where it has both, and of each part."""
    found = {"launches": sum(r.launches for name, r in parts.items() if name != "update")}
    found |= {name: r.launches for name, r in parts.items()} if len(parts) > 1 else {}
    every = sum(parts.values(), Requests())
    return {**found, "copies": every.copies(), "waits": every.waits}


def over(case: str, found: Counts, ceilings: dict[str, Counts]) -> list[str]:
    """A line for each figure above its ceiling, and for a case that has none. Peaks of whole steps are alike within 3 MiB: small tensors
    go as Python collects them."""
    if case not in ceilings:
        return [f"{case}: no ceiling is recorded; run it with --record"]
    lines = [
        f"{case}: {found[name]} {name}, {most} are allowed"
        for name in FIGURES
        if found[name] > (most := ceilings[case][name])
    ]
    peak, most = found[PEAK], ceilings[case][PEAK]
    return lines + (
        [f"{case}: {peak:.3f} GiB of peak, {most:.3f} are allowed"]
        if peak > 1.01 * most + 2**-8
        else []
    )


def read(path: Path = CEILINGS) -> dict[str, Counts]:
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(ceilings: dict[str, Counts], path: Path = CEILINGS) -> None:
    lines = [
        "# The most launches, copies, waits and GiB of peak of each case of tools/fake_gpu/table.py, on torch 2.11; --record writes them."
    ]
    for case, found in ceilings.items():
        lines += [
            "",
            f'["{case}"]',
            *(f"{name} = {found[name]}" for name in FIGURES),
            f"{PEAK} = {found[PEAK]:.4f}",
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def every_case(blackwell: bool) -> dict[str, Callable[[], dict[str, Callable[[], object]]]]:
    """The cases by name, each still to be made, of a GPU of compute capability 10.0 on or of one before it."""
    from functools import partial

    from tools.fake_gpu import cases

    found: dict[str, Callable[[], dict[str, Callable[[], object]]]] = {}
    if blackwell:
        for how in ("eager", "compiled"):
            for scaling in cases.BLACKWELL:
                found[f"linear {scaling} {how}"] = partial(
                    cases.linear, scaling, False, how == "compiled"
                )
        for scaling in cases.BLACKWELL:
            found[f"set_weight {scaling} eager"] = partial(cases.set_weight, scaling)
        found["step bf16_mxfp8 eager"] = partial(cases.step, "precision=bf16_mxfp8")
        return found | te_cases(("mxfp8", "nvfp4"))
    for how in (False, True):
        ran = "compiled" if how else "eager"
        for scaling in cases.SCALINGS:
            for held in (False, True) if scaling != "bf16" else (False,):
                found[f"linear {scaling}{' FP8 weight' * held} {ran}"] = partial(
                    cases.linear, scaling, held, how
                )
        for scaling in [] if how else [name for name, made in cases.SCALINGS.items() if made]:
            found[f"set_weight {scaling} eager"] = partial(cases.set_weight, scaling)
        for scaling in ("bf16", "delayed", "block"):
            found[f"8B layer {scaling} {ran}"] = partial(cases.layer_8b, scaling, how)
        for count in (1, 4):
            found[f"low-bit AdamW {count} {ran}"] = partial(cases.optimizer, "low-bit", count, how)
    for preset in ("bf16", "bf16_fp8", "bf16_fp8_current"):
        found[f"step {preset} eager"] = partial(cases.step, f"precision={preset}")
    found["step fp16_fp8 eager"] = partial(cases.step, "precision=fp16_fp8")
    found["step fsdp bf16_fp8 eager"] = partial(
        cases.step, "precision=bf16_fp8", "storage.shard=fsdp"
    )
    found["step fsdp fp16_fp8 eager"] = partial(
        cases.step, "precision=fp16_fp8", "storage.shard=fsdp"
    )
    found["step fsdp SGD bf16_fp8 eager"] = partial(
        cases.step, "precision=bf16_fp8", "storage.shard=fsdp", "optim.name=sgd"
    )
    moments = "storage.exp_avg=fp8", "storage.exp_avg_sq=fp16_scaled"
    found["step fsdp moments bf16_fp8 eager"] = partial(
        cases.step, "precision=bf16_fp8", "storage.shard=fsdp", *moments
    )
    found["step fp16_fp8 SGD interval eager"] = partial(
        cases.step, "precision=fp16_fp8", "fp8.interval=2", "optim.name=sgd"
    )
    for how in ("eager", "compiled"):  # once there are ranks
        found[f"linear current amax group {how}"] = partial(
            cases.linear, "current", compile=how == "compiled", shared=True
        )
    masked = "precision=bf16_fp8", "trainer.micro_batch_size=8", "data.eod_mask_loss=true"
    found["step 2 ranks masked bf16_fp8 eager"] = partial(cases.step, *masked, ranks=2)
    for name, words in {
        "block": ("bf16_fp8_block", "fp8.format=e4m3"),
        "row": ("bf16_fp8_current", "fp8.granularity=row"),
    }.items():
        precision, *keys = words
        found[f"step {name} FP8 weights eager"] = partial(
            cases.step, f"precision={precision}", *keys, "fp8.params=true"
        )
    for level in ("O1", "O2", "O3"):
        found[f"step {level} bf16_fp8 eager"] = partial(
            cases.step, "precision=bf16_fp8", f"opt_level={level}"
        )
    found["step bf16_fp8_current_coat eager"] = partial(
        cases.step, "precision=bf16_fp8_current_coat"
    )
    selective = "model.recompute_granularity=selective"
    found["step bf16_fp8 compiled"] = partial(cases.step, "precision=bf16_fp8", compile=True)
    found["step bf16_fp8 selective compiled"] = partial(
        cases.step, "precision=bf16_fp8", selective, compile=True
    )
    found["step bf16_fp8 BF16 weights eager"] = partial(
        cases.step, "precision=bf16_fp8", "fp8.params=false"
    )
    held, kept = "fp8.params=false", "fp8.keep_transpose_cache=true"
    accumulating = (
        "precision=bf16_fp8",
        "trainer.global_batch_size=32",
        "trainer.micro_batch_size=8",
    )
    found["step bf16_fp8 BF16 weights 4 microbatches eager"] = partial(
        cases.step, *accumulating, held
    )
    for how in (False, True):
        ran = f"4 microbatches {'compiled' if how else 'eager'}"
        found[f"step bf16_fp8 {ran}"] = partial(cases.step, *accumulating, compile=how)
        found[f"step bf16_fp8 transposes kept {ran}"] = partial(
            cases.step, *accumulating, kept, compile=how
        )
    found["step bf16_fp8 BF16 weights full eager"] = partial(
        cases.step, "precision=bf16_fp8", held, "model.recompute_granularity=full"
    )
    found["step emulated bf16_fp8 eager"] = partial(
        cases.step, "precision=bf16_fp8", "fp8.emulate=true"
    )
    found["step emulated bf16_mxfp8 compiled"] = partial(
        cases.step, "precision=bf16_mxfp8", "fp8.emulate=true", compile=True
    )
    found["fused AdamW 4 eager"] = partial(cases.optimizer, "fused", 4)
    found["save bf16_fp8 eager"] = cases.host_copies
    return found | te_cases(("delayed", "current", "block"))


def te_cases(scalings: tuple[str, ...]) -> dict[str, Callable[[], dict[str, Callable[[], object]]]]:
    """The cases of Transformer Engine (setup_te.sh): its linear layer, and steps with backend=te."""
    from functools import partial

    from tools.check_gpu import PRESETS
    from tools.fake_gpu import cases

    found: dict[str, Callable[[], dict[str, Callable[[], object]]]] = {}
    for scaling in scalings:
        words = f"precision={PRESETS[scaling]}", "backend=te"
        found[f"te linear {scaling} eager"] = partial(cases.te_linear, scaling)
        for held in (False, True):
            found[f"te step {scaling}{' FP8 weights' * held} eager"] = partial(
                cases.step, *words, f"fp8.params={held}"
            )
        found[f"te step {scaling} 4 microbatches eager"] = partial(
            cases.step, *words, "trainer.global_batch_size=32", "trainer.micro_batch_size=8"
        )
        if scaling in ("delayed", "current"):
            found[f"te step {scaling} O2 eager"] = partial(cases.step, *words, "opt_level=O2")
    return found


def measured(
    parts: dict[str, Callable[[], object]], places: str
) -> tuple[dict[str, Requests], float]:
    """What a third time asks for, part by part, and the peak of memory above what was held before it, GiB."""
    import torch

    for _ in range(2):
        for part in parts.values():
            part()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    held, found = torch.cuda.memory_allocated(), {}
    for name, part in parts.items():
        with record(places) as found[name]:
            part()
    return found, (torch.cuda.max_memory_allocated() - held) / 2**30


def is_chosen(case: str, words: list[str]) -> bool:
    """Whether the name of the case has all of `words`."""
    return all(word in case.split() for word in words)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="cases that have all of these words in their names"
    )
    parser.add_argument(
        "--places",
        default="S",
        metavar="KINDS",
        help="requests whose lines are printed: C copies, S waits (default), K, T, G launches, M memsets",
    )
    parser.add_argument("--names", action="store_true", help="every request by name")
    parser.add_argument(
        "--record", action="store_true", help="write the counts down as the ceilings"
    )
    args = parser.parse_args()
    if not is_fake():
        parser.error(
            "this is not the fake GPU: make one by tools/fake_gpu/setup.sh, and source its env.sh"
        )
    import torch

    from fp8cfg.backends.te.rules import unavailable
    from tools.gpu_rows.proof import without_proof

    cases = every_case(torch.cuda.get_device_capability() >= (10, 0))
    if not any(is_chosen(case, args.words) for case in cases):
        parser.error(
            f"{' '.join(args.words)}: no case has these words; the cases are {', '.join(cases)}"
        )
    without_proof()
    ceilings, wrong = read(), []
    print(
        f"{'case':34}{'forward':>9}{'backward':>9}{'update':>8}{'launches':>10}{'copies':>8}{'waits':>7}{'+GiB':>7}",
        flush=True,
    )
    for case, make in cases.items():
        if not is_chosen(case, args.words) or (case.startswith("te ") and unavailable()):
            continue
        requests, peak = measured(make(), args.places)
        found = {**counts(requests), PEAK: peak}
        cells = [found.get(name, "") for name in ("forward", "backward", "update", *FIGURES)]
        print(
            f"{case:34}"
            + "".join(str(c).rjust(w) for c, w in zip(cells, (9, 9, 8, 10, 8, 7), strict=True))
            + f"{peak:7.2f}",
            flush=True,
        )
        every = sum(requests.values(), Requests())
        for (what, place), times in every.places.most_common():
            print(f"{times:9} x {what[:60]} from {place}")
        for times, name in every.names() if args.names else ():
            print(f"{times:9} x {name}")
        if args.record:
            ceilings[case] = found
        else:
            wrong += over(case, found, ceilings)
    if args.record:
        write(ceilings)
    print("\n".join(wrong) if wrong else "no figure is above its ceiling")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
