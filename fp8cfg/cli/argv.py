"""Command-line arguments: split into options, a recipe file and key=value words."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.cli.help import choices
from fp8cfg.schema.errors import ConfigError, nearest, printable, refuse_if

if TYPE_CHECKING:
    from fp8cfg.composition.precedence import Settled
    from fp8cfg.planning.fit_search import Fit, Line
    from fp8cfg.schema.recipe import Recipe

SHORT = {"-cd": "--config-dir"}
"""Hydra's short names of options that every verb with the long one takes."""
RECIPE_FILES = (".yaml", ".yml", ".json")
"""How the names of recipe files end."""
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


@dataclass
class Arguments:
    """What stands on a command line beside the verb."""

    words: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)

    def one(self, option: str) -> str | None:
        """The value of an option that is given once, or None. Raises ConfigError where it is given more often."""
        values = self.options.get(option, [])
        if len(values) > 1:
            raise ConfigError(f"{option}: given {len(values)} times")
        return values[0] if values else None


def split(argv: list[str], known: tuple[str, ...], flags: tuple[str, ...] = ()) -> Arguments:
    """Options of `known` with their values, `flags` without, words with a '=' (or marked by + or ~), and the rest; after `--` no
    word is an option. Raises ConfigError for every other option and every option without a value, and then for the words that are
    wrong too."""
    out, problems, ended = Arguments(), list[str](), False
    left = list(argv)
    while left:
        arg = left.pop(0)
        if arg == "--" and not ended:
            ended = True
        elif arg.startswith("-") and arg != "-" and not ended:
            name, eq, value = arg.partition("=")
            name = SHORT.get(name, name)
            if name in flags and not eq:
                out.flags.add(name)
            elif name not in known:
                wrong = "takes no value" if name in flags else "no such option"
                problems.append(
                    f"{name}: {wrong}" + _hint(name, [*known, *flags, "--help", "--version"])
                )
            elif not (value := value if eq else left.pop(0) if left else ""):
                problems.append(f"{name}: needs a value")
            else:
                out.options.setdefault(name, []).append(value)
        elif "=" in arg or arg[:1] in "+~":
            out.words.append(arg)
        else:
            out.plain.append(arg)
    if problems:
        refuse_if(problems + wrong_words(out))
    return out


def before_end(argv: list[str]) -> list[str]:
    """What stands before the end of options, where there may be some."""
    return argv[: argv.index("--")] if "--" in argv else argv


def _hint(name: str, options: list[str]) -> str:
    """As `suggest`; the dashes, which all have, make no two options alike. Keys and choices are words without dashes here."""
    from fp8cfg.composition.config_groups import GROUPS
    from fp8cfg.schema.recipe import short_keys

    if any(c.isspace() for c in name):
        return "; what is none stands after --"
    if (key := name.lstrip("-")) in {*GROUPS, *short_keys()}:
        return f"; write it without dashes: {key}={'NAME' if key in GROUPS else 'VALUE'}"
    if key in ("dry-run", "dry_run", "dryrun"):
        return "; did you mean 'fp8cfg plan'?"
    bare = {option.lstrip("-"): option for option in options}
    near = nearest(name.lstrip("-"), bare)
    return f"; did you mean {bare[near]!r}?" if near else f"; choose from {', '.join(options)}"


def wrong_words(arguments: Arguments) -> list[str]:
    """The lines of the words that are wrong by themselves, for an error that has other lines already."""
    from fp8cfg.composition.config_groups import Library
    from fp8cfg.composition.sweep_overrides import read

    folder = arguments.options.get("--config-dir")
    try:
        read(
            [w for w in arguments.words if not is_hydra(w)],
            Library(Path(folder[0]) if folder else None),
        )
    except ConfigError as e:
        return e.problems
    return []


def changed_words(arguments: Arguments, changes: Sequence[str]) -> list[str]:
    """The words of `arguments` with `changes`, which stand in the place of those for the same keys."""
    from fp8cfg.composition.overrides import parsed
    from fp8cfg.schema.keys import full

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


def is_hydra(word: str) -> bool:
    """Whether `word` is a setting of Hydra itself: hydra.sweep.dir=x, hydra/launcher=x, +hydra.x=1."""
    return word.lstrip("+~").startswith(("hydra.", "hydra/"))


def is_recipe_file(arg: str) -> bool:
    """Whether `arg` stands for a recipe file, `-` for standard input."""
    return arg == "-" or arg.endswith(RECIPE_FILES)


def recipe_path(arg: str) -> Path:
    """The path of the recipe file that `arg` stands for."""
    from fp8cfg.schema.safe_files import STDIN

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
    verb = _THEIRS.get(arg) or nearest(arg, verbs)
    if verb:
        return f"{arg}: no such command; did you mean {verb!r}?"
    if os.path.isdir(arg):
        return f"{arg}: is a folder; that of a run is for fp8cfg resume, rerun and diff"
    if os.path.isfile(arg):
        read = f"; write: fp8cfg import megatron {arg}" if arg.endswith(".sh") else ""
        return f"{arg}: is no recipe file; the name of one ends in .yaml or .json{read}"
    from fp8cfg.composition.overrides import malformed

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
) -> Settled:
    """As `composed`, or as a job of a `sweep`, with what gave way, and nothing said or refused."""
    from fp8cfg.composition import precedence
    from fp8cfg.composition.config_groups import Library

    return precedence.composed(
        words, Library(Path(config_dir) if config_dir else None), file, base, sweep
    )


def settled_on_ranks(
    words: Sequence[str],
    config_dir: str | None = None,
    file: Path | None = None,
    base: Recipe | None = None,
) -> Settled:
    """As `settled`; of a layout that the recipe's own machines do not have, with those on which a launcher has started ranks."""
    from fp8cfg.composition import precedence
    from fp8cfg.composition.config_groups import Library

    return precedence.composed_ranks(
        words, Library(Path(config_dir) if config_dir else None), file, base
    )


def idle_folder(words: Sequence[str], config_dir: str | None) -> list[str]:
    """A line where nothing of `config_dir` is read beside the recipe of a run: none of `words`, which are right, names it."""
    from fp8cfg.composition.config_groups import Library
    from fp8cfg.composition.overrides import parse

    if config_dir is None:
        return []
    library = Library(Path(config_dir))
    chosen = parse(words, library, has_recipe=True)[0].items()
    files = [library.file(group, library.stem(group, name)) for group, name in chosen]
    if any(file.is_relative_to(Path(config_dir).resolve()) for file in files if file):
        return []
    return [
        f"note: --config-dir {config_dir}: changes nothing, no word chooses what it has; the recipe"
        " is the run's own"
    ]


def say(notes: Iterable[str]) -> None:
    """Print notes once, whatever the ranks."""
    for line in notes if os.environ.get("RANK", "0") == "0" else ():
        print(printable(line), file=sys.stderr)


Settle = Callable[[Sequence[str]], "Settled"]
"""What a verb makes of words."""
_TIMES = 4
"""A line is settled at most: as it was found, with the machine, with the batch that comes out otherwise on it, and once more."""


def whole_lines(arguments: Arguments, settle: Settle, *verb: str) -> Line:
    """Makes the line of `arguments` and a fit, by `verb` and its options or training; an empty one where it would be refused, or
    settle to another recipe than that of the fit."""

    def line(fit: Fit) -> str:
        words = [*fit.words]
        for _ in range(_TIMES):
            typed = settle([word for word in changed_words(arguments, words) if not is_hydra(word)])
            if not (apart := _apart(typed, fit)):
                return "" if typed.problems else command_line(arguments, words, *verb)
            words += apart
        return ""

    return line


def _apart(typed: Settled, fit: Fit) -> tuple[str, ...]:
    """The words that make what was `typed` into the recipe of `fit`; none of a smoke run, whose size is cut once it is started."""
    from fp8cfg.planning.fit_search import differences

    return () if fit.recipe.trainer.smoke else differences(typed.recipe, fit.recipe)
