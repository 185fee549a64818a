"""Recipe arguments: composes the recipe of a command line, and writes command lines for recipes."""

from __future__ import annotations

import os
import shlex
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
from fp8cfg.schema.messages import LEVELS, Level, level_of, say_on_stderr
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import STDIN

_EQUIVALENT_VERBS = {
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
"""Commands of other trainers, and the verbs of fp8cfg."""
_ADVICE = {
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
"""Commands of other tools, and advice."""


def changed_words(arguments: Arguments, changes: Sequence[str]) -> list[str]:
    """Applies changes to the overrides of a command.

    Args:
        arguments: Arguments of the command.
        changes: New overrides. They replace overrides of the same keys.

    Returns:
        The overrides.
    """
    changed_keys = {full(parsed(word)[0]) for word in changes}
    words = []
    for word in arguments.words:
        if is_hydra(word) or full(parsed(word)[0]) not in changed_keys:
            words.append(word)
    return [*words, *changes]


def command_line(arguments: Arguments, changes: Sequence[str], *verb: str) -> str:
    """Returns a command line for suggestions.

    Args:
        arguments: Arguments of the original command.
        changes: Overrides to change.
        verb: The verb and its options. Training by default.
    """
    command = ["fp8cfg", *verb, *arguments.plain, *changed_words(arguments, changes)]
    for folder in arguments.options.get("--config-dir", []):
        command.append(f"--config-dir={folder}")
    return shlex.join(command)


def recipe_path(arg: str) -> Path:
    """Returns the path of a recipe file. "-" is standard input."""
    if arg == "-":
        return STDIN
    return Path(arg)


def recipe_file(plain: list[str], verbs: tuple[str, ...]) -> Path | None:
    """Returns the recipe file of a command, None without one.

    Args:
        plain: Arguments that are neither options nor overrides.
        verbs: Verbs, for the suggestion on a wrong argument.

    Raises:
        ConfigError: An argument is not a recipe file, or there are two.
    """
    for arg in plain:
        if not is_recipe_file(arg):
            raise ConfigError(no_verb(arg, verbs))
    if len(plain) > 1:
        raise ConfigError(
            f"{plain[1]}: a second recipe file; one builds on another with `recipe: NAME`"
        )
    if not plain:
        return None
    return recipe_path(plain[0])


def open_library(config_dir: str | None) -> Library:
    """Opens the shipped config groups together with those of --config-dir.

    Args:
        config_dir: The user's config folder, if any.
    """
    if not config_dir:
        return Library()
    return Library(Path(config_dir))


def chooses(name: str) -> str | None:
    """Returns the group with a preset of this name, None without one."""
    for group in ("recipe", "precision", "data"):
        if name in choices(group):
            return group
    return None


def no_verb(arg: str, verbs: tuple[str, ...]) -> str:
    """Returns the error for an argument that is neither an override nor a recipe file.

    Args:
        arg: The argument.
        verbs: Valid verbs, for the suggestion.
    """
    if arg in verbs:
        return f"{arg}: a command comes first, as in: fp8cfg {arg}"
    group = chooses(arg)
    if group:
        return f"{arg}: not of the form key=value; did you mean '{group}={arg}'?"
    if os.path.isfile(f"{arg}.yaml"):
        return f"{arg}: no command, recipe file or key=value; did you mean '{arg}.yaml'?"
    if arg in _ADVICE:
        return f"{arg}: no such command; {_ADVICE[arg]}"
    verb = _EQUIVALENT_VERBS.get(arg) or nearest(arg, verbs, 0.75)
    if verb:
        return f"{arg}: no such command; did you mean {verb!r}?"
    if os.path.isdir(arg):
        return f"{arg}: is a folder; run folders are for fp8cfg resume, rerun and diff"
    if os.path.isfile(arg):
        hint = f"; write: fp8cfg import megatron {shlex.quote(arg)}" if arg.endswith(".sh") else ""
        return f"{arg}: not a recipe file; its name must end in .yaml or .json{hint}"
    line = malformed(arg)
    # `malformed` has a specific hint.
    if ";" in line or "," in line:
        return line
    return f"{arg or repr(arg)}: no command, recipe file or key=value; fp8cfg --help has them"


def compose_recipe(
    words: Sequence[str],
    config_dir: str | None = None,
    file: Path | None = None,
    base: Recipe | None = None,
) -> Recipe:
    """Composes and checks a recipe, and prints the notes.

    Args:
        words: Overrides.
        config_dir: The user's config folder.
        file: The recipe file, instead of `recipe=`.
        base: The recipe, instead of `recipe=`.

    Raises:
        ConfigError: An argument or the recipe is wrong.
    """
    resolved = resolve_recipe(words, config_dir, file, base)
    refuse_if(resolved.problems)
    say_notes(resolved.notes)
    return resolved.recipe


def resolve_recipe(
    words: Sequence[str],
    config_dir: str | None = None,
    file: Path | None = None,
    base: Recipe | None = None,
    sweep: bool = False,
) -> ResolvedRecipe:
    """Composes a recipe without printing notes or rejecting problems.

    Args:
        words: See `compose_recipe`.
        config_dir: See `compose_recipe`.
        file: See `compose_recipe`.
        base: See `compose_recipe`.
        sweep: Whether this is a job of a sweep.

    Returns:
        The recipe with its problems, notes and changed values.

    Raises:
        ConfigError: An argument is wrong.
    """
    library = open_library(config_dir)
    return precedence.composed(words, library, file, base, sweep)


def resolve_on_ranks(
    words: Sequence[str],
    config_dir: str | None = None,
    file: Path | None = None,
    base: Recipe | None = None,
) -> ResolvedRecipe:
    """Composes a recipe for the ranks of a launcher. Arguments as `resolve_recipe`.

    If the layout does not fit num_nodes and devices of the recipe, the launcher's are tried.
    """
    library = open_library(config_dir)
    return precedence.composed(words, library, file, base, on_ranks=True)


def idle_folder(words: Sequence[str], config_dir: str | None) -> list[str]:
    """Returns a note if --config-dir has no effect on the recipe of an existing run.

    Args:
        words: Valid overrides.
        config_dir: The user's config folder.
    """
    if config_dir is None:
        return []
    library = open_library(config_dir)
    choices = Overrides.parse(words, library, has_recipe=True).choices
    files = [library.file(group, choice.name) for group, choice in choices.items()]
    if any(file.is_relative_to(Path(config_dir).resolve()) for file in files if file):
        return []
    return [
        f"note: --config-dir {config_dir}: no effect, no override chooses one of its presets; the"
        " recipe is the run's own"
    ]


def say_notes(notes: Iterable[str], level: Level = "info") -> None:
    """Prints notes to standard error, on the first rank only.

    Args:
        notes: The notes.
        level: Minimum level to print.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for line in notes:
        if level_of(line) >= LEVELS[level]:
            say_on_stderr(printable(line))


Settle = Callable[[Sequence[str]], "ResolvedRecipe"]
"""Composes the recipe of overrides, as a verb does it."""
_MAX_TRIES = 4
"""Maximum number of tries for a command line.

The first try is as found. The second adds the machine. The third adds the batch size, which may
change with the machine. One more is a reserve.
"""


def command_lines(
    arguments: Arguments, settle: Settle, *verb: str, has_blanks: bool = False
) -> CommandLine:
    """Returns a function that writes the command line of a fit, for suggestions.

    A suggested command must work. So the function composes the recipe of the command and compares
    it with the fit. It returns "" if they differ, or if the command would be rejected.

    Args:
        arguments: Arguments of the original command.
        settle: Composes the recipe of overrides.
        verb: The verb and its options. Training by default.
        has_blanks: Whether to add overrides with PATH and FOLDER for missing training data.
    """

    def write_command(fit: Fit) -> str:
        """Returns the command line of a fit, or ""."""
        words = [*fit.words]
        for _ in range(_MAX_TRIES):
            overrides = changed_words(arguments, words)
            resolved = settle([word for word in overrides if not is_hydra(word)])
            # Overrides can change other keys too, such as the batch size. Set those explicitly.
            # A smoke run is cut to its size when it starts, so its recipe always differs.
            if not fit.recipe.trainer.smoke:
                missing = changed_overrides(resolved.recipe, fit.recipe)
                if missing:
                    words += missing
                    continue
            if resolved.problems:
                return ""
            if has_blanks:
                words += training_data.missing_overrides(fit.recipe)
            return command_line(arguments, words, *verb)
        return ""

    return write_command
