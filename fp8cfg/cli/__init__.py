"""Command line: one file per verb, and the table of verbs for `--help`, completion and dispatch."""

from __future__ import annotations

from typing import NamedTuple

GROUPS = ("recipe", "precision", "data", "task")
"""Groups of presets, such as recipe=llama_8b."""


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        section: The section of `--help`.
        about: The line of `--help`.
        trains: Whether the verb trains.
        words: Completions after the verb. None completes keys.
        path: Whether the first argument is a path.
    """

    section: str
    about: str
    trains: bool = False
    words: tuple[str, ...] | None = None
    path: bool = False


TRAIN = "Train"
LOOK = "Look before you train"
STUDY = "Study runs"
USE = "Use a trained model"
PREPARE = "Prepare"
VERBS = {
    "train": Verb(TRAIN, "train a recipe; the default verb", trains=True),
    "launch": Verb(TRAIN, "train through torchrun on this machine, or in a Slurm job", trains=True),
    "sweep": Verb(TRAIN, "train every combination of key=a,b; also -m", trains=True),
    "resume": Verb(
        TRAIN, "continue a run from its newest valid checkpoint", trains=True, path=True
    ),
    "rerun": Verb(
        TRAIN, "train a run's recipe again and compare the losses", trains=True, path=True
    ),
    "plan": Verb(LOOK, "predict formats, memory and FLOPs, without a GPU"),
    "check": Verb(LOOK, "validate a recipe without training"),
    "advise": Verb(LOOK, "find the precision for a model, and layers to keep out of it"),
    "doctor": Verb(LOOK, "show what this machine can run", words=()),
    "list": Verb(LOOK, "list recipes, presets and tasks", words=GROUPS),
    "explain": Verb(LOOK, "explain a key: type, meaning, effect, and who set it"),
    "diff": Verb(LOOK, "list the keys in which two recipes or runs differ"),
    "watch": Verb(STUDY, "follow a run from its folder", path=True),
    "runs": Verb(STUDY, "list runs: state, losses, speed", path=True),
    "compare": Verb(STUDY, "compare runs: keys, losses, speed, memory", words=()),
    "report": Verb(STUDY, "write an HTML page: curves, FP8 tensors, memory, recipe", path=True),
    "parity": Verb(STUDY, "compare the losses of precisions with a baseline's", trains=True),
    "sample": Verb(USE, "generate text from a run", path=True),
    "evaluate": Verb(USE, "measure the loss of a run, in one precision or several", path=True),
    "export": Verb(USE, "write a recipe, another project's file, weights or a Slurm script"),
    "init": Verb(PREPARE, "write a commented recipe file to start from"),
    "import": Verb(PREPARE, "convert a configuration of NeMo, Megatron, Accelerate and others"),
    "data": Verb(PREPARE, "tokenize text once, so that training starts immediately"),
    "schema": Verb(PREPARE, "print the JSON Schema of recipe files, for editors", words=()),
    "completion": Verb(
        PREPARE, "print a completion script for your shell", words=("bash", "zsh", "fish")
    ),
}
"""Verbs in the order of `--help`. fp8cfg/cli/NAME.py has USAGE, and run(argv) for the exit code."""
WORDS = (*VERBS, "help")
"""First words of a command line."""
