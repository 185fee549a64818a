"""Recipe arguments: the recipe that the words and the file of a command line compose, and command lines that compose it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fp8cfg.cli.argv import Arguments, is_hydra, is_recipe_file
from fp8cfg.cli.help import choices
from fp8cfg.composition import precedence
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.overrides import Overrides, malformed, parsed
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.planning import training_data
from fp8cfg.planning.fit_search import CommandLine, Fit, changed_overrides
from fp8cfg.schema.errors import ConfigError, nearest, printable, refuse_if
from fp8cfg.schema.keys import full
from fp8cfg.schema.messages import LEVELS, Level, colored, level_of
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import STDIN

_THEIRS = {
    "run": "train",
    "fit": "train",
    "pretrain": "train",
    "finetune": "train",
    "start": "train",
    "validate": "check",
    "verify": "check",
    "lint": "check",
    "estimate": "plan",
    "info": "doctor",
    "env": "doctor",
    "generate": "sample",
    "eval": "evaluate",
    "preprocess": "data prepare",
}
"""Commands of other trainers by ours."""
_INSTEAD = {
    "nemo": "nemo llm pretrain --factory NAME is: fp8cfg recipe=NAME, and finetune adds task=sft",
    "llm": "nemo llm pretrain --factory NAME is: fp8cfg recipe=NAME, and finetune adds task=sft",
    "accelerate": "the ranks of this machine are started by: fp8cfg launch --local N",
    "torchrun": "the ranks of this machine are started by: fp8cfg launch --local N",
    "deepspeed": "the ranks of this machine are started by: fp8cfg launch --local N",
    "sbatch": "a script for it is written by: fp8cfg export slurm",
    "serve": "vLLM serves what this writes: fp8cfg export hf RUN_FOLDER OUT --fp8 block",
    "convert": "write: fp8cfg export hf RUN_FOLDER OUT, or fp8cfg import PROJECT FILE",
    "plot": "write: fp8cfg report RUN_FOLDER, which draws the curves of runs",
    "bench": "write: fp8cfg plan, which predicts step time and memory",
    "profile": "log.profile=START:END of a run records its steps; fp8cfg plan predicts memory",
}
"""Words that other tools begin with, and what does it here."""


def changed_words(arguments: Arguments, changes: Sequence[str]) -> list[str]:
    """The words of `arguments` with `changes`, which stand in the place of those for the same keys."""
    new = {full(parsed(word)[0]) for word in changes}
    return [
        *(word for word in arguments.words if is_hydra(word) or full(parsed(word)[0]) not in new),
        *changes,
    ]


def command_line(arguments: Arguments, changes: Sequence[str], *verb: str) -> str:
    """The line that runs `arguments` with the words `changes`, by `verb` and its options, or training."""
    folder = [f"--config-dir={name}" for name in arguments.options.get("--config-dir", [])]
    return shlex.join(
        ["fp8cfg", *verb, *arguments.plain, *changed_words(arguments, changes), *folder]
    )


def recipe_path(arg: str) -> Path:
    """The path of the recipe file that `arg` stands for."""
    return STDIN if arg == "-" else Path(arg)


def recipe_file(plain: list[str], verbs: tuple[str, ...]) -> Path | None:
    """The recipe file among arguments that are no words. Raises ConfigError for what is no file and no verb."""
    for arg in plain:
        if not is_recipe_file(arg):
            raise ConfigError(no_verb(arg, verbs))
    if len(plain) > 1:
        raise ConfigError(
            f"{plain[1]}: a second recipe file; one builds on another with `recipe: NAME`"
        )
    return recipe_path(plain[0]) if plain else None


def chooses(name: str) -> str | None:
    """The group that offers the choice `name`; None where none does."""
    return next(
        (group for group in ("recipe", "precision", "data") if name in choices(group)), None
    )


def no_verb(arg: str, verbs: tuple[str, ...]) -> str:
    """The line for a word without a value that is no verb, or not where a verb stands."""
    if arg in verbs:
        return f"{arg}: a command stands first, as in: fp8cfg {arg}"
    if chosen := chooses(arg):
        return f"{arg}: not of the form key=value; did you mean '{chosen}={arg}'?"
    if os.path.isfile(f"{arg}.yaml"):
        return f"{arg}: no command, recipe file or key=value; did you mean '{arg}.yaml'?"
    if arg in _INSTEAD:
        return f"{arg}: no such command; {_INSTEAD[arg]}"
    verb = _THEIRS.get(arg) or nearest(arg, verbs, 0.75)
    if verb:
        return f"{arg}: no such command; did you mean {verb!r}?"
    if os.path.isdir(arg):
        return f"{arg}: is a folder; that of a run is for fp8cfg resume, rerun and diff"
    if os.path.isfile(arg):
        read = f"; write: fp8cfg import megatron {arg}" if arg.endswith(".sh") else ""
        return f"{arg}: is no recipe file; the name of one ends in .yaml or .json{read}"
    line = malformed(arg)
    if ";" in line or "," in line:
        return line
    return f"{arg or repr(arg)}: no command, recipe file or key=value; fp8cfg --help has them"


def composed(
    words: Sequence[str],
    config_dir: str | None = None,
    file: Path | None = None,
    base: Recipe | None = None,
) -> Recipe:
    """As `fp8cfg.compose`."""
    found = settled(words, config_dir, file, base)
    refuse_if(found.problems)
    say(found.notes)
    return found.recipe


def settled(
    words: Sequence[str],
    config_dir: str | None = None,
    file: Path | None = None,
    base: Recipe | None = None,
    sweep: bool = False,
) -> ResolvedRecipe:
    """As `composed`, or as a job of a `sweep`, with what gave way, and nothing said or refused."""
    return precedence.composed(
        words, Library(Path(config_dir) if config_dir else None), file, base, sweep
    )


def settled_on_ranks(
    words: Sequence[str],
    config_dir: str | None = None,
    file: Path | None = None,
    base: Recipe | None = None,
) -> ResolvedRecipe:
    """As `settled`; of a layout that the recipe's own machines do not have, with those on which a launcher has started ranks."""
    library = Library(Path(config_dir) if config_dir else None)
    return precedence.composed(words, library, file, base, on_ranks=True)


def idle_folder(words: Sequence[str], config_dir: str | None) -> list[str]:
    """A line where nothing of `config_dir` is read beside the recipe of a run: none of `words`, which are right, names it."""
    if config_dir is None:
        return []
    library = Library(Path(config_dir))
    choices = Overrides.parse(words, library, has_recipe=True).choices
    files = [library.file(group, choice.name) for group, choice in choices.items()]
    if any(file.is_relative_to(Path(config_dir).resolve()) for file in files if file):
        return []
    return [
        f"note: --config-dir {config_dir}: changes nothing, no word chooses what it has; the recipe"
        " is the run's own"
    ]


def say(notes: Iterable[str], level: Level = "info") -> None:
    """Prints notes at least of a level to standard error, on the first rank only."""
    if os.environ.get("RANK", "0") != "0":
        return
    for line in notes:
        if level_of(line) >= LEVELS[level]:
            print(colored(printable(line), sys.stderr), file=sys.stderr)


Settle = Callable[[Sequence[str]], "ResolvedRecipe"]
"""What a verb makes of words."""
_TIMES = 4
"""A line is settled at most: as it was found, with the machine, with the batch that comes out otherwise on it, and once more."""


def whole_lines(
    arguments: Arguments, settle: Settle, *verb: str, has_blanks: bool = False
) -> CommandLine:
    """Makes the line of `arguments` and a fit, by `verb` and its options or training; an empty one where it would be refused, or
    settle to another recipe than that of the fit. With `has_blanks` a recipe that lacks training data gets overrides to fill
    in."""

    def line(fit: Fit) -> str:
        words = [*fit.words]
        for _ in range(_TIMES):
            typed = settle([word for word in changed_words(arguments, words) if not is_hydra(word)])
            if apart := _apart(typed, fit):
                words += apart
                continue
            if typed.problems:
                return ""
            if has_blanks:
                words += training_data.missing_overrides(fit.recipe)
            return command_line(arguments, words, *verb)
        return ""

    return line


def _apart(typed: ResolvedRecipe, fit: Fit) -> tuple[str, ...]:
    """The words that make what was `typed` into the recipe of `fit`; none of a smoke run, whose size is cut once it is started."""
    return () if fit.recipe.trainer.smoke else changed_overrides(typed.recipe, fit.recipe)
