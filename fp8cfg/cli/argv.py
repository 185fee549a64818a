"""Command-line arguments: splits them into options, overrides and the rest.

The schema takes a tenth of a second to load, so it is only imported if an argument is wrong.
"""

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
"""Options of torchrun, NeMo-Run, axolotl and others, with the equivalent here."""
VERBOSE = "--verbose"
"""Option of verbs that train."""
SHORT = {"-cd": "--config-dir"}
"""Short names of options, as in Hydra. They work for all verbs with the long option."""
RECIPE_FILES = (".yaml", ".yml", ".json")
"""Endings of recipe files."""


@dataclass
class Arguments:
    """Arguments of a command without the verb.

    Attributes:
        words: Overrides, such as "fp8.margin=1".
        plain: Other arguments, such as files and folders.
        options: Values of each option.
        flags: Options without a value.
    """

    words: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)

    def one(self, option: str) -> str | None:
        """Returns the value of an option, None without it. Raises ConfigError for two values."""
        values = self.options.get(option, [])
        if len(values) > 1:
            raise ConfigError(f"{option}: given {len(values)} times")
        if not values:
            return None
        return values[0]


def split(argv: list[str], known: tuple[str, ...], flags: tuple[str, ...] = ()) -> Arguments:
    """Splits arguments. After `--`, arguments with a dash are no options.

    Args:
        argv: Arguments after the verb.
        known: Options with a value.
        flags: Options without a value.

    Raises:
        ConfigError: An option is unknown or has no value. Wrong overrides are reported too.
    """
    arguments = Arguments()
    problems: list[str] = []
    options_ended = False
    position = 0
    while position < len(argv):
        arg = argv[position]
        next_arg = argv[position + 1] if position + 1 < len(argv) else ""
        position += 1
        if not arg:  # such as an unset variable in quotes
            problems.append("'': not of the form key=value, nor a path; remove it")
        elif arg == "--" and not options_ended:
            options_ended = True
        # "-" is standard input as recipe file.
        elif arg.startswith("-") and arg != "-" and not options_ended:
            name, equals, value = arg.partition("=")
            name = SHORT.get(name, name)
            if name in flags and not equals:
                arguments.flags.add(name)
                continue
            if name not in known:
                problem = "takes no value" if name in flags else "no such option"
                hint = _hint(
                    name, [*known, *flags, "--help", "--version"], value if equals else next_arg
                )
                problems.append(f"{name}: {problem}{hint}")
                continue
            if not equals:
                value = next_arg
                position += 1
            if value:
                arguments.options.setdefault(name, []).append(value)
            else:
                problems.append(f"{name}: needs a value")
        # Hydra's +key=value and ~key are overrides too.
        elif "=" in arg or arg[:1] in "+~":
            arguments.words.append(arg)
        else:
            arguments.plain.append(arg)
    if problems:
        refuse_if(problems + wrong_words(arguments))
    return arguments


def add_verbose(arguments: Arguments) -> None:
    """Adds log.level=debug to the overrides if --verbose is set."""
    if VERBOSE in arguments.flags:
        arguments.words.append("log.level=debug")


def before_end(argv: list[str]) -> list[str]:
    """Returns the arguments before `--`, or all."""
    if "--" not in argv:
        return argv
    return argv[: argv.index("--")]


def _hint(name: str, options: list[str], value: str) -> str:
    """Returns advice on an unknown option: another spelling, an override or a tool's flag."""
    from fp8cfg.composition.config_groups import GROUPS
    from fp8cfg.schema.recipe import short_keys

    if any(character.isspace() for character in name):
        return "; put text that is no option after --"
    if name in OPTIONS_OF_OTHERS:
        return f"; write {OPTIONS_OF_OTHERS[name]}"
    key = name.lstrip("-")
    if key in GROUPS:
        return f"; write it without dashes: {key}=NAME"
    if key in short_keys():
        return f"; write it without dashes: {key}=VALUE"
    if key in ("dry-run", "dry_run", "dryrun"):
        return "; did you mean 'fp8cfg plan'?"
    # Compare without dashes. Equal dashes would make any two options similar.
    options_by_name = {option.lstrip("-"): option for option in options}
    similar = nearest(key, options_by_name, 0.85)
    if not similar:
        flag_hint = _hint_on_flag(name, value)
        if flag_hint:
            return flag_hint
        similar = nearest(key, options_by_name)
    if similar:
        return f"; did you mean {options_by_name[similar]!r}?"
    return f"; choose from {', '.join(options)}"


def _hint_on_flag(name: str, value: str) -> str:
    """Returns the equivalent of another project's flag, such as Megatron's. "" if it is unknown."""
    from fp8cfg.interop.projects import PROJECTS
    from fp8cfg.schema import foreign_names
    from fp8cfg.schema.keys import full
    from fp8cfg.schema.recipe import fields, short_keys
    from fp8cfg.schema.value_errors import options

    key = name.lstrip("-").replace("-", "_")
    known = short_keys()
    home = foreign_names.home_of(key, known)
    leaf = key.rpartition(".")[2]
    same_leaf = [candidate for candidate in known if candidate.endswith(f".{leaf}")]
    # One key ends with this name: --margin can only be fp8.margin.
    if not home and len(same_leaf) == 1:
        home = same_leaf[0]
    if not home:
        reason = foreign_names.absence(key)
        return f"; {reason}" if reason else ""
    hint = f"; write {home}"
    if full(home) in fields():
        our_value = foreign_names.meant(home, value)
        if not our_value and value in options(fields()[full(home)].annotation):
            our_value = value
        hint += f"={our_value or 'VALUE'}"
    elif "=" not in home:
        hint = f"; it belongs to {home}"
    if name.startswith("--") and "-" in name[2:] and PROJECTS["megatron"].key_table.has_entry(name):
        hint += ", or for flags of Megatron-LM: fp8cfg import megatron -- FLAGS"
    return hint


def wrong_words(arguments: Arguments) -> list[str]:
    """Returns the problems of the overrides, to report them together with other problems.

    Args:
        arguments: Arguments of the command.
    """
    from fp8cfg.composition.config_groups import Library
    from fp8cfg.composition.sweep_overrides import read

    folders = arguments.options.get("--config-dir")
    library = Library(Path(folders[0]) if folders else None)
    try:
        read([word for word in arguments.words if not is_hydra(word)], library)
    except ConfigError as error:
        return error.problems
    return []


def is_hydra(word: str) -> bool:
    """Returns whether an override is one of Hydra's own, such as hydra.sweep.dir=x."""
    return word.lstrip("+~").startswith(("hydra.", "hydra/"))


def is_recipe_file(arg: str) -> bool:
    """Returns whether an argument is a recipe file. "-" is standard input."""
    return arg == "-" or arg.endswith(RECIPE_FILES)
