"""Command-line arguments: split into options, key=value words and the rest. Loads no schema unless an argument is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fp8cfg.schema.errors import ConfigError, nearest, refuse_if

OPTIONS_OF_OTHERS = {
    "--nodes": "trainer.num_nodes=N",
    "--nnodes": "trainer.num_nodes=N",
    "--nproc-per-node": "trainer.devices=N",
    "--temp": "--temperature T",
    "--config": "the file alone: fp8cfg FILE.yaml",
    "--factory": "recipe=NAME",
    "--log-level": "log.level=debug, info, warning or error",
    "--verbose": "log.level=debug",
}
"""Options of torchrun, NeMo-Run, axolotl and others, and how to write them here."""
VERBOSE = "--verbose"
"""Option of verbs that train."""
SHORT = {"-cd": "--config-dir"}
"""Hydra's short names of options that every verb with the long one takes."""
RECIPE_FILES = (".yaml", ".yml", ".json")
"""How the names of recipe files end."""


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
                given = value if eq else next(iter(left), "")
                hint = _hint(name, [*known, *flags, "--help", "--version"], given)
                problems.append(f"{name}: {wrong}{hint}")
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


def add_verbose(arguments: Arguments) -> None:
    """Adds the override that --verbose is short for."""
    if VERBOSE in arguments.flags:
        arguments.words.append("log.level=debug")


def before_end(argv: list[str]) -> list[str]:
    """What stands before the end of options, where there may be some."""
    return argv[: argv.index("--")] if "--" in argv else argv


def _hint(name: str, options: list[str], value: str) -> str:
    """As `suggest`; the dashes, which all have, make no two options alike. Keys and choices are words without dashes here."""
    from fp8cfg.composition.config_groups import GROUPS
    from fp8cfg.schema.recipe import short_keys

    if any(c.isspace() for c in name):
        return "; what is none stands after --"
    if name in OPTIONS_OF_OTHERS:
        return f"; write {OPTIONS_OF_OTHERS[name]}"
    if (key := name.lstrip("-")) in {*GROUPS, *short_keys()}:
        return f"; write it without dashes: {key}={'NAME' if key in GROUPS else 'VALUE'}"
    if key in ("dry-run", "dry_run", "dryrun"):
        return "; did you mean 'fp8cfg plan'?"
    bare = {option.lstrip("-"): option for option in options}
    near = nearest(key, bare, 0.85)
    if not near:
        theirs = _hint_on_flag(name, value)
        if theirs:
            return theirs
        near = nearest(key, bare)
    return f"; did you mean {bare[near]!r}?" if near else f"; choose from {', '.join(options)}"


def _hint_on_flag(name: str, value: str) -> str:
    """What to write in place of another project's flag; empty for a name that no table has."""
    from fp8cfg.interop.projects import DOORS
    from fp8cfg.schema import foreign_names
    from fp8cfg.schema.keys import full
    from fp8cfg.schema.recipe import fields, short_keys
    from fp8cfg.schema.value_errors import options

    key = name.lstrip("-").replace("-", "_")
    known = short_keys()
    home = foreign_names.home_of(key, known)
    same_leaf = [other for other in known if other.endswith("." + key.rpartition(".")[2])]
    if not home and len(same_leaf) == 1:
        home = same_leaf[0]
    if not home:
        absent = foreign_names.absence(key)
        return f"; {absent}" if absent else ""
    hint = f"; write {home}"
    if full(home) in fields():
        is_option = value in options(fields()[full(home)].annotation)
        hint += "=" + (foreign_names.meant(home, value) or (value if is_option else "VALUE"))
    elif "=" not in home:
        hint = f"; it belongs to {home}"
    if name.startswith("--") and "-" in name[2:] and DOORS["megatron"].dialect.knows(name):
        hint += ", or for flags of Megatron-LM: fp8cfg import megatron -- FLAGS"
    return hint


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


def is_hydra(word: str) -> bool:
    """Whether `word` is a setting of Hydra itself: hydra.sweep.dir=x, hydra/launcher=x, +hydra.x=1."""
    return word.lstrip("+~").startswith(("hydra.", "hydra/"))


def is_recipe_file(arg: str) -> bool:
    """Whether `arg` stands for a recipe file, `-` for standard input."""
    return arg == "-" or arg.endswith(RECIPE_FILES)
