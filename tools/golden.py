#!/usr/bin/env python3
"""Records what users can observe of a checkout, so that a refactoring can prove that it changed nothing.

    python tools/golden.py record FOLDER [--checkout PATH] [--only SECTION ...]
    python tools/golden.py compare OLD NEW

`record` writes one text file per section. It runs the checkout at PATH (default: this one) with
the current interpreter, so a git worktree of an earlier commit can be recorded with the same
packages. `compare` prints a unified diff and exits with 1 if there is one.

    git worktree add ../before COMMIT
    python tools/golden.py record before.golden --checkout ../before
    python tools/golden.py record after.golden
    python tools/golden.py compare before.golden after.golden

Losses are bits of one machine: record both sides on the same one.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("time", "seconds", "tokens_per_second", "memory")
"""Fields of metrics.jsonl that differ between equal runs."""

TINY = [
    "recipe=llama_tiny",
    "data=tiny",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.seq_length=32",
    "trainer.global_batch_size=8",
    "trainer.micro_batch_size=4",
    "trainer.max_steps=6",
    "optim.warmup_steps=2",
    "trainer.val_check_interval=3",
    "trainer.limit_val_batches=2",
    "checkpoint.every_n_steps=2",
]

JOBS = {
    "bf16": ["precision=bf16"],
    "delayed": ["precision=bf16_fp8", "fp8.margin=1", "fp8.amax_history_len=4"],
    "delayed_fp8_params": ["precision=bf16_fp8", "fp8.params=true"],
    "current": ["precision=bf16_fp8_current"],
    "block": ["precision=bf16_fp8_block"],
    "mxfp8": ["precision=bf16_mxfp8"],
    "nvfp4": ["precision=bf16_nvfp4"],
    "opt_level_1": ["precision=bf16_fp8", "opt_level=O1"],
    "opt_level_2": ["precision=bf16_fp8", "opt_level=O2"],
    "opt_level_3": ["precision=bf16_fp8", "opt_level=O3"],
    "fp16": ["precision=fp16_fp8", "precision.initial_loss_scale=256"],
    "lora": ["precision=bf16_fp8", "task=lora"],
}
"""Training jobs by name, each with the overrides that it adds to TINY."""

TWO_RANK_JOBS = {
    "two_ranks_zero1": ["precision=bf16_fp8"],
    "two_ranks_fsdp": ["precision=bf16_fp8", "storage.shard=fsdp"],
    "two_ranks_tensor": ["precision=bf16_fp8", "trainer.strategy.tensor_model_parallel_size=2"],
}
"""The same for jobs that torchrun starts on two ranks."""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fp8cfg"]

GOOD_COMMANDS = [
    "check recipe=llama_8b precision=bf16_fp8",
    "check recipe=llama_70b precision=bf16_fp8_block trainer.num_nodes=8",
    "check recipe=llama_tiny opt_level=O2 precision=bf16",
    "check recipe=gpt3_tiny task=pretrain fp8.margin=1 precision=fp16_fp8",
    "explain fp8.margin recipe=llama_8b precision=bf16_fp8",
    "explain trainer.plugins precision=bf16_fp8",
    "explain storage.master_weight opt_level=O2 precision=bf16",
    "diff recipe=llama_8b -- recipe=llama_8b precision=bf16_fp8",
    "plan recipe=llama_tiny precision=bf16_fp8",
    "plan recipe=llama_8b precision=bf16_fp8 --gpu h100",
    "plan recipe=mistral_tiny precision=bf16_mxfp8 --gpu b200",
    "list precision",
    "export --python recipe=llama_8b precision=bf16_fp8 fp8.margin=1",
    "export accelerate recipe=llama_8b precision=bf16_fp8",
    "export megatron recipe=llama_8b precision=bf16_fp8",
    "completion bash",
    "completion --words fp8.ma",
    "--version",
    "--cfg job recipe=llama_tiny",
]

BAD_COMMANDS = [
    "fp8.margn=1",
    "recipe=llama_9b",
    "precision=bf16_fp9",
    "check fp8.margin=abc precision=bf16_fp8",
    "check fp8.margin=1 precision=bf16",
    "check fp8.margin=1 precision=bf16_fp8_current",
    "check recipe=llama_70b trainer.strategy.tensor_model_parallel_size=3",
    "check optim.lr=-1",
    "check trainer.max_steps=0",
    "check trainer.devices=3 trainer.global_batch_size=4",
    "check fp8.format=e5m2 precision=bf16_mxfp8",
    "check data.path=nowhere.jsonl",
    "check data=jsonl",
    "explain fp8.marg",
    "plan recipe=llama_8b --gpu v100",
    "export nosuch recipe=llama_8b",
    "export torchtitan recipe=llama_8b precision=bf16_fp8_current",
    "resume nosuch-folder",
    "nosuchverb",
    "train missing.yaml",
    "check _target_=os.system",
    "sweep nosuch=1,2",
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record_parser = commands.add_parser("record")
    record_parser.add_argument("folder", type=Path)
    record_parser.add_argument("--checkout", type=Path, default=ROOT)
    record_parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    compare_parser = commands.add_parser("compare")
    compare_parser.add_argument("old", type=Path)
    compare_parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return compare(arguments.old, arguments.new)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        text = SECTIONS[name](Checkout(arguments.checkout.resolve()))
        (arguments.folder / f"{name}.txt").write_text(text)
        print(f"{name}: {len(text.splitlines())} lines")
    return 0


def compare(old: Path, new: Path) -> int:
    """Prints a unified diff of two records. Returns 1 if they differ."""
    names = sorted({path.name for folder in (old, new) for path in folder.glob("*.txt")})
    has_difference = False
    for name in names:
        lines = [read_lines(folder / name) for folder in (old, new)]
        for line in difflib.unified_diff(*lines, f"old/{name}", f"new/{name}", n=1, lineterm=""):
            has_difference = True
            print(line)
    if not has_difference:
        print(f"no difference in {len(names)} sections")
    return int(has_difference)


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class Checkout:
    """A checkout of the project, run in subprocesses by the current interpreter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def python(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs `python ARGUMENTS` in `cwd` with the checkout's fp8cfg."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "COLUMNS": "100",
            "NO_COLOR": "1",
            # One thread: the order of a sum does not depend on the machine's load.
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def run_all(self, commands: list[list[str]]) -> Iterator[str]:
        """Runs commands of fp8cfg two at a time. Yields command, exit code and output of each."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:

            def run(argv: list[str]) -> str:
                done = self.python("-m", "fp8cfg", *argv, cwd=Path(folder))
                output = (done.stdout + done.stderr).replace(folder, "FOLDER")
                output = output.replace(str(self.folder), "CHECKOUT")
                return f"$ fp8cfg {' '.join(argv)}\n{output}exit code {done.returncode}\n\n"

            yield from threads.map(run, commands)

    def recipe_names(self) -> list[str]:
        """Names of all recipes except from_hf, which needs a folder."""
        script = "from fp8cfg.recipes import __all__ as names; print(*names)"
        names = self.python("-c", script, cwd=self.folder).stdout.split()
        return sorted(name for name in names if name != "from_hf")

    def verbs(self) -> list[str]:
        text = self.python("-m", "fp8cfg", "--help", cwd=self.folder).stdout
        # Its place differs between commits, and all have `plan`.
        verbs = next(part for part in text.split("\n\n") if "\n  plan  " in part)
        return re.findall(r"^  (\w+)  ", verbs, re.MULTILINE)


def record_losses(checkout: Checkout) -> str:
    """Loss and gradient norm of every step of JOBS, and of a run that is stopped and resumed."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(name, overrides, ["-m", "fp8cfg"]) for name, overrides in JOBS.items()]
        jobs += [(name, overrides, TORCHRUN) for name, overrides in TWO_RANK_JOBS.items()]
        for name, overrides, command in jobs:
            argv = [*command, *TINY, *overrides, f"log.folder={folder}/{name}"]
            done = checkout.python(*argv, cwd=Path(folder))
            lines += [f"{name}: exit code {done.returncode}", *hex_steps(Path(folder, name))]

        resumed = Path(folder, "resumed")
        argv = [*TINY, *JOBS["delayed"], f"log.folder={resumed}", "trainer.max_steps=4"]
        checkout.python("-m", "fp8cfg", *argv, cwd=Path(folder))
        argv = ["resume", str(resumed), "trainer.max_steps=8"]
        done = checkout.python("-m", "fp8cfg", *argv, cwd=Path(folder))
        lines += [f"resumed: exit code {done.returncode}", *hex_steps(resumed)]
    return "\n".join(lines) + "\n"


def hex_steps(run_folder: Path) -> list[str]:
    """One line per record in metrics.jsonl. Times are left out, floats are written in hex."""
    lines = []
    for text in read_lines(run_folder / "metrics.jsonl"):
        record = json.loads(text)
        values = []
        for key, value in record.items():
            if key in MEASURED:
                continue
            values.append(f"{key}={value.hex() if isinstance(value, float) else value}")
        lines.append("  " + " ".join(values))
    return lines


def record_schema(checkout: Checkout) -> str:
    return "".join(checkout.run_all([["schema"]]))


def record_recipes(checkout: Checkout) -> str:
    """Every recipe, exported in BF16 and in FP8."""
    commands = []
    for name in checkout.recipe_names():
        for precision in ("bf16", "bf16_fp8"):
            presets = [f"recipe={name}", f"precision={precision}"]
            commands.append(["export", "--json", "--full", *presets])
    return "".join(checkout.run_all(commands))


def record_plans(checkout: Checkout) -> str:
    """The plan of every large recipe on the number of GPUs that it names."""
    commands = []
    for name in checkout.recipe_names():
        if not name.endswith("_tiny"):
            argv = ["plan", f"recipe={name}", "precision=bf16_fp8", "--gpu", "h100", "--json"]
            commands.append(argv)
    return "".join(checkout.run_all(commands))


def record_help(checkout: Checkout) -> str:
    verbs = checkout.verbs()
    return "".join(checkout.run_all([["--help"], *([verb, "--help"] for verb in verbs)]))


def record_commands(checkout: Checkout) -> str:
    """Exit codes and output of good and bad command lines."""
    commands = [line.split() for line in (*GOOD_COMMANDS, *BAD_COMMANDS)]
    return "".join(checkout.run_all(commands))


SIGNATURES = """
import inspect
import fp8cfg, fp8cfg.recipes
for module in (fp8cfg, fp8cfg.recipes):
    for name in sorted(module.__all__):
        value = getattr(module, name)
        try:
            print(f"{module.__name__}.{name}{inspect.signature(value)}")
        except (TypeError, ValueError):
            print(f"{module.__name__}.{name}: {type(value).__name__}")
        if not inspect.isclass(value):
            continue
        for member in sorted(vars(value)):
            if member.startswith("_") or member.startswith("model_"):
                continue
            attribute = inspect.getattr_static(value, member)
            function = getattr(attribute, "__func__", attribute)
            signature = inspect.signature(function) if inspect.isfunction(function) else ""
            print(f"    .{member}{signature}")
"""


def record_signatures(checkout: Checkout) -> str:
    """Signatures of all public functions, classes and methods, without the modules of types."""
    done = checkout.python("-c", SIGNATURES, cwd=checkout.folder)
    text = re.sub(r"fp8cfg\.(?:[a-z0-9_]+\.)+(?=[A-Z])", "", done.stdout + done.stderr)
    # Functions that are defaults print their address.
    return re.sub(r" at 0x[0-9a-f]+", "", text)


SECTIONS: dict[str, Callable[[Checkout], str]] = {
    "losses": record_losses,
    "schema": record_schema,
    "recipes": record_recipes,
    "plans": record_plans,
    "help": record_help,
    "commands": record_commands,
    "signatures": record_signatures,
}


if __name__ == "__main__":
    sys.exit(main())
