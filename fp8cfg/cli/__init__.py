"""The command line, one small file for each verb; and the table of verbs, which `--help`, completion and the command read."""

from __future__ import annotations

from typing import NamedTuple

GROUPS = ("recipe", "precision", "data", "task")
"""What is chosen by name: recipe=llama_8b."""


class Verb(NamedTuple):
    """A verb: what `--help` says of it; whether it trains; and what a shell completes after it,
    where that is not keys: `words`, and for `path` first a path, which the shell completes itself.
    """

    about: str
    trains: bool = False
    words: tuple[str, ...] | None = None
    path: bool = False


VERBS = {
    "train": Verb("train a recipe; also without a verb", trains=True),
    "launch": Verb("train through an executor: ranks of this machine, or a Slurm job", trains=True),
    "sweep": Verb("train every combination of key=a,b; also -m", trains=True),
    "resume": Verb(
        "go on with a run from its newest checkpoint that verifies", trains=True, path=True
    ),
    "rerun": Verb(
        "the same run again; what has changed, and are the losses equal", trains=True, path=True
    ),
    "list": Verb("recipes and presets, with a line on each", words=GROUPS),
    "explain": Verb("a key: type, bounds, meaning, effect, every layer that set it"),
    "diff": Verb("the keys in which two recipes or run folders differ"),
    "plan": Verb("formats of every GEMM, memory and FLOPs of a run, without a GPU"),
    "check": Verb("say what is wrong with a recipe, and run nothing"),
    "doctor": Verb("this machine: hardware, versions, which precisions run here", words=()),
    "export": Verb("a recipe as YAML, JSON or Python, or as another project's file"),
    "import": Verb("a recipe from Accelerate, NeMo, Megatron-LM, torchtitan and others"),
    "data": Verb("token files from text, for training that begins at once"),
    "sample": Verb("text from a run, in the precision of its training or another", path=True),
    "evaluate": Verb(
        "the loss of a run on a held-out file, in one precision or several", path=True
    ),
    "schema": Verb("the JSON Schema of recipes, for editors", words=()),
    "completion": Verb(
        "a script that makes bash, zsh or fish complete all of this", words=("bash", "zsh", "fish")
    ),
}
"""Every verb by name, in the order of `--help`; fp8cfg/cli/NAME.py has its USAGE and run(argv), which returns the exit code."""
WORDS = (*VERBS, "help")
"""What can stand first on a command line."""
