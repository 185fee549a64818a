"""Overrides of the command line: parsed once by Hydra's grammar, and checked against the schema.

All problems are reported at once, before the recipe is composed.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fp8cfg.composition.config_groups import GROUPS, Library
from fp8cfg.composition.layers import Location
from fp8cfg.composition.recipe_yaml import is_node, owner, settings
from fp8cfg.schema import foreign_names
from fp8cfg.schema.errors import ConfigError, did_you_mean, nearest, refuse_if
from fp8cfg.schema.keys import PLUGIN, full, short, spelled
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import fields, short_keys
from fp8cfg.schema.safe_files import plain
from fp8cfg.schema.value_errors import THOUSANDS, example, several_files

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override as HydraOverride

_HYDRA_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_TEXT_TYPES = (str, str | None)
# Characters allowed without quotes, in addition to letters and digits. '$' marks a variable.
_PLAIN_CHARACTERS = frozenset(" _/-+.%*@?|")


def in_quotes(argument: str) -> str:
    """Adds quotes to the value of an argument if only Hydra's grammar needs them.

    Values with quotes added are paths below `~`, and text with non-ASCII letters and no special
    characters.
    """
    key, _, value = argument.partition("=")
    if value.startswith("~/"):
        return f'{key}="{value}"'
    if value.isascii():
        return argument
    # Each text in a list needs quotes.
    if value[:1] == "[" and value[-1:] == "]" and _takes_texts(key):
        items = [_quoted_if_plain(item) for item in value[1:-1].split(",")]
        return f"{key}=[{','.join(items)}]"
    if takes_text(key):
        return f"{key}={_quoted_if_plain(value)}"
    return argument


def _quoted_if_plain(text: str) -> str:
    """Returns `text` in quotes if it has non-ASCII letters and no special characters."""
    if text.isascii() or not all(_is_plain(character) for character in text):
        return text
    return quoted(text.strip())


def _is_plain(character: str) -> bool:
    """Returns whether a character is allowed in a text without quotes."""
    if character in _PLAIN_CHARACTERS:
        return True
    if character.isascii():
        return character.isalnum()
    return unicodedata.category(character)[0] in "LM"  # a letter or an accent


def takes_text(key: str) -> bool:
    """Returns whether `key` accepts any text, such as a name or a path."""
    name = full(key.lstrip("+"))
    return name in _HYDRA_FOLDERS or (name in fields() and fields()[name].annotation in _TEXT_TYPES)


def _takes_texts(key: str) -> bool:
    """Returns whether `key` accepts a list of any texts."""
    name = full(key.lstrip("+"))
    return name in fields() and fields()[name].annotation == tuple[str, ...]


def quoted(text: str) -> str:
    """Returns `text` in double quotes, escaped for Hydra's grammar."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double).with_quotes()


# Common mistakes: {key=value}, and "key=1, other=2" as one argument.
_KEY_IN_BRACES = re.compile(r"(?<=[{,])(\s*\w+)=")
_SEVERAL_ARGUMENTS = re.compile(r",\s*(?=[\w.]+=)")
_FUNCTIONS = ("choice", "range", "interval", "glob", "shuffle", "sort")
# Straight quotes, and typographic quotes from editors and web pages.
_QUOTES = frozenset("'\"\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb")


def malformed(argument: str) -> str:
    """Returns the error line for an argument that Hydra's grammar rejects."""
    key, equals, value = argument.partition("=")
    # Hydra's own error names a token of its grammar. The cases here are common mistakes.
    if equals:
        hint = _mistake(argument, key, value)
        if not hint:
            hint = "not of the form key=value; quote a value with special characters, as in 'log.dir=\"a b\"'"
        return f"{argument}: {hint}"
    if argument in short_keys() or argument in GROUPS:
        example_value = "NAME" if argument in GROUPS else "VALUE"
        return f"{argument}: needs a value, as in {argument}={example_value}"
    key, colon, value = argument.partition(":")
    key = key.strip()
    if colon and (key in short_keys() or key in GROUPS):
        return f"{argument}: not of the form key=value; write {key}={value.strip()}"
    if argument.startswith("$"):
        return f"{argument}: the shell did not replace this variable; write its value"
    hint = did_you_mean(nearest(argument, [*short_keys(), *GROUPS], 0.75))
    return f"{argument or repr(argument)}: not of the form key=value{hint}"


def _mistake(argument: str, key: str, value: str) -> str:
    """Returns the problem of an invalid `key=value`, or "" if it is not a known mistake."""
    if argument == "=":
        return "remove the spaces around it, as in key=value"
    # The order matters: a later case would also match many arguments of an earlier one.
    is_text = takes_text(key) and value.isprintable() and not set(argument) & _QUOTES
    if not is_text:
        for character in argument:
            if not character.isascii() and character.isprintable():
                return (
                    f"{character!r} cannot be part of a key or a number; retype it, or quote a"
                    " text as in 'log.dir=\"a b\"'"
                )
    if argument[:1] in "'\"":
        return "quoted twice; remove the inner quotes"
    words = [word.rstrip(",") for word in argument.split()]
    if len(words) > 1 and value[:1] not in ("[", "{") and all("=" in word for word in words):
        return f"several overrides in one; write {' '.join(words)} without quotes"
    if value.startswith("(") and is_node(full(key)):
        node = fields()[full(key)].annotation
        values = [item.strip() for item in value.strip("()").split(",")]
        return f"expected keys{example(full(key), node, values)}"
    if value.startswith("(") and not is_text:
        return f"a list is written {key}=[{value.strip('()')}]"
    if key != key.strip() or value != value.strip():
        return f"spaces around '='; write {key.strip()}={value.strip()}"
    if value[:1] == "=":
        return f"two '=' signs; write {key}={value.lstrip('=')}"
    if value.endswith(","):
        return f"ends in a comma; write {key}={value.rstrip(',')}"
    arguments = _SEVERAL_ARGUMENTS.split(argument)
    if len(arguments) > 1 and not set(argument) & set("[]{}'\""):
        return f"several overrides in one; write {' '.join(arguments)}"
    with_colons = _KEY_IN_BRACES.sub(r"\1: ", value)
    if value[:1] in "[{" and "{" in value and with_colons != value:
        return f"use a colon and a space inside braces, as in '{key}={with_colons}'"
    if is_text:
        correct = shlex.quote(f"{key}={quoted(value)}")
        return f"a text with special characters needs quotes; write {correct}"
    function, parenthesis, _ = value.partition("(")
    if function and parenthesis and value.endswith(")"):
        suggestion = nearest(function, _FUNCTIONS)
        if suggestion:
            return f"no such function {function!r}{did_you_mean(suggestion)}"
    for opening, closing in ("[]", "{}"):
        if value.count(opening) > value.count(closing):
            return f"{opening!r} without {closing!r}; quote the override if it has spaces"
    return ""


def parsed(argument: str) -> tuple[str, Any, str]:
    """Parses one argument of a single run.

    Returns:
        The key with dots, the value as plain data, and the value's text.

    Raises:
        ConfigError: See `override`. Also for several values, because they are a sweep.
    """
    argument = in_quotes(argument)
    parse = override(argument)
    key, text = parse.key_or_group, argument.partition("=")[2]
    if parse.is_sweep_override():
        raise ConfigError(f"{argument}: {_sweep_hint(key, text, argument)}")
    value = _without_quotes(parse.value())
    # Hydra reports a sweep only at the top of a value, not inside of {key: choice(a, b)}.
    if _has_sweep(value):
        raise ConfigError(
            f"{argument}: a sweep cannot be inside braces; write a separate override, as in"
            f" {key}.KEY=a,b"
        )
    return key, value, text


def _sweep_hint(key: str, text: str, argument: str) -> str:
    """Returns the error and its fix for several values in a single run."""
    if key == "log.dir":  # a sweep has one folder, too
        return f"takes one folder; quote a name with a comma, as in '{key}=\"a,b\"'"
    is_list = full(key) in fields() and "tuple" in str(fields()[full(key)].annotation)
    if is_list:
        return f"several values are a sweep, but a run takes one; write a list as {key}=[{text}]"
    # 1,000 has two values for Hydra.
    if THOUSANDS.fullmatch(text):
        number = text.replace(",", "")
        return f"several values are a sweep; write a number without commas: {key}={number}"
    if full(key) == "data.path":
        return f"takes one path{several_files(text.split(','))}"
    command = f"fp8cfg sweep {shlex.quote(argument)}"
    return f"several values are a sweep, but a run takes one; run {command}"


def override(argument: str) -> HydraOverride:
    """Parses an argument with Hydra's grammar.

    Returns:
        Hydra's result, with dots in its key.

    Raises:
        ConfigError: The grammar or the schema rejects the argument.
    """
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    # An interpolation could read the environment, and a recipe must be the same everywhere.
    if "${" in argument:
        raise ConfigError(f"{argument}: interpolation is not accepted; write the value")
    try:
        parse = _parsed_by_hydra(in_quotes(argument))
    except HydraException:
        raise ConfigError(malformed(argument)) from None
    except RecursionError:
        raise ConfigError(f"{argument[:40]}...: nested too deeply") from None
    except ValueError:  # Python's limit (sys.set_int_max_str_digits)
        raise ConfigError(f"{argument[:40]}...: the number has too many digits") from None
    key = parse.key_or_group.replace("/", ".")
    if not key:
        raise ConfigError(malformed(argument))
    if key == "hydra" or key.startswith("hydra."):
        raise ConfigError(f"{argument}: Hydra's own settings are not part of a recipe")
    if parse.type is OverrideType.DEL:
        name = key.partition("=")[0]
        if name not in GROUPS and full(name) not in fields():
            raise ConfigError(foreign_names.unknown(name, short_keys() | set(GROUPS)))
        raise ConfigError(f"{argument}: keys cannot be removed; set {name} to its default instead")
    # A plus adds a key in Hydra. Here the key exists already, or no key of that name can be added.
    if parse.type is not OverrideType.CHANGE:
        # _target_ and the like would run code.
        if key.rpartition(".")[2] in foreign_names.CODE_KEYS:
            raise ConfigError(foreign_names.unknown(key, ()))
        if key in GROUPS or (full(key) in fields() and not is_node(full(key))):
            raise ConfigError(key_exists(argument))
    if parse.package:
        value = argument.partition("=")[2]
        raise ConfigError(f"{argument}: packages are fixed; write {key}={value}")
    return replace(parse, key_or_group=key)


def key_exists(argument: str) -> str:
    """Returns the error line for `+key=value`. The schema is closed, so no key can be added."""
    override = argument.lstrip("+")
    key = override.partition("=")[0]
    return f"{argument}: {key} already exists; remove the +: {override}"


def hydra_word(argument: str) -> str:
    """Returns a setting of Hydra itself, in quotes if necessary. Raises ConfigError."""
    from hydra.errors import HydraException

    quoted_argument = in_quotes(argument)
    try:
        _parsed_by_hydra(quoted_argument)
    except HydraException:
        raise ConfigError(malformed(argument)) from None
    return quoted_argument


@functools.cache  # a new parser inspects the signatures of its functions
def parser() -> OverridesParser:
    """Returns Hydra's parser of overrides."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


@functools.lru_cache(maxsize=256)  # ANTLR takes a millisecond for each argument
def _parsed_by_hydra(argument: str) -> HydraOverride:
    """Parses an argument. The result is cached: do not change it."""
    return parser().parse_override(argument)


def _without_quotes(value: Any) -> Any:
    """Returns Hydra's parsed value as plain data, with quoted strings as str."""
    if isinstance(value, dict):
        return {str(_without_quotes(key)): _without_quotes(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_quotes(inner) for inner in value]
    # A QuotedString.
    if hasattr(value, "text"):
        return value.text
    return value


def _has_sweep(value: Any) -> bool:
    """Returns whether a sweep is nested in `value`. Hydra does not expand it there."""
    from hydra.core.override_parser.types import Glob, Sweep

    if isinstance(value, dict):
        return any(_has_sweep(inner) for inner in value.values())
    if isinstance(value, list):
        return any(_has_sweep(inner) for inner in value)
    return isinstance(value, (Sweep, Glob))


@dataclass(frozen=True)
class Override:
    """One argument: the choice `name` of a `group`, or `values` by full key.

    Attributes:
        location: The argument, or the file that makes the choice. None for a default choice.
        group: Group of the choice, otherwise empty.
        name: Name of the choice. Empty for `precision=null`, which keeps the recipe's preset.
        values: Value by full key, in the schema's types.
    """

    location: Location | None
    group: str = ""
    name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Overrides:
    """The arguments of a command line, parsed and checked.

    Attributes:
        choices: The last choice of each group, maybe without a name. Choices act before settings.
        settings: Arguments that set values, in order. The last one of a key wins.
    """

    choices: Mapping[str, Override]
    settings: Sequence[Override]

    @classmethod
    def parse(
        cls, arguments: Iterable[str], library: Library, has_recipe: bool = False
    ) -> Overrides:
        """Parses each argument once.

        Args:
            arguments: Such as `recipe=llama_8b` or `fp8.margin=1`.
            library: The choices of each group.
            has_recipe: Whether the recipe comes from a file or an object. `recipe=` is then an
                error.

        Raises:
            ConfigError: One line for each invalid argument, unknown name, and value of a wrong type
                or out of bounds.
        """
        choices: dict[str, Override] = {}
        values: list[Override] = []
        problems: list[str] = []
        for argument in arguments:
            try:
                override = parse_argument(argument, library)
                if override.group == "recipe" and has_recipe:
                    raise ConfigError(f"{argument}: a recipe is already set; remove one of them")
            except ConfigError as error:
                # Report the problems of all arguments at once.
                problems += error.problems
                continue
            if override.group:
                choices[override.group] = override
            else:
                values.append(override)
        refuse_if(problems)
        return cls(choices, values)

    @property
    def keys(self) -> frozenset[str]:
        """Full keys of all settings."""
        return frozenset(key for override in self.settings for key in override.values)

    def value(self, key: str) -> Any:
        """Returns the last value of the full `key`, None if no argument sets it."""
        for override in reversed(self.settings):
            if key in override.values:
                return override.values[key]
        return None


def parse_argument(argument: str, library: Library) -> Override:
    """Parses and checks one argument. Raises ConfigError, see `Overrides.parse`."""
    try:
        return _parse_argument(argument, library)
    except ConfigError as error:
        if error.problems == [key_exists(argument)]:
            _parse_argument(argument.lstrip("+"), library)  # that line's advice must be valid
        raise


def _parse_argument(argument: str, library: Library) -> Override:
    """Implements `parse_argument`."""
    key, value, text = parsed(argument)
    location = Location(argument)
    # A key can be both: precision=NAME is a choice, precision={...} and precision.compute=bf16 are
    # values. The type of the value decides. A group of the user's own folder comes first.
    folder_group = library.merging_group(key)
    if value is None and (key in GROUPS or folder_group):
        return Override(location, group=folder_group or key)
    if isinstance(value, str) and folder_group:
        return _choice(location, folder_group, value, library)
    if argument.startswith("+") and is_node(full(key)):
        raise ConfigError(key_exists(argument))
    if isinstance(value, str) and key in ("precision", PLUGIN):
        return _choice(location, "precision", value, library)
    if isinstance(value, str) and key in GROUPS:
        return _choice(location, key, value, library)
    if key in GROUPS and not (isinstance(value, dict) and is_node(full(key))):
        hint = did_you_mean(foreign_names.meant(key, value))
        raise ConfigError(f"{argument}: expected the name of a preset{hint}")
    # A node takes no text. It may be the name of a choice in another group.
    if isinstance(value, str) and is_node(full(key)):
        _check_misplaced_choice(argument, key, value, library)
    _check_text(key, value, text)
    _check_value(key, value)
    return Override(location, values=settings({full(key): value}))


def _choice(location: Location, group: str, name: str, library: Library) -> Override:
    """Returns a choice. Raises ConfigError if the group does not have it."""
    problem = library.problem(group, name)
    if problem:
        raise ConfigError(problem)
    return Override(location, group, library.canonical_name(group, name))


def _check_misplaced_choice(argument: str, key: str, value: str, library: Library) -> None:
    """Raises ConfigError if `value`, assigned to a node, is the name of a choice."""
    for group in GROUPS:
        if value in library.choices(group):
            node = short(full(key))
            raise ConfigError(
                f"{argument}: expected keys of {node}; did you mean '{group}={value}'?"
            )


def _check_text(key: str, value: Any, text: str) -> None:
    """Rejects a value that changes the typed text, such as `name=007` or `lr=1e999`."""
    if takes_text(key) and isinstance(value, (bool, int, float)):
        raise ConfigError(
            f"{key}={text}: expected a string, got {type(value).__name__}; write '{key}=\"{text}\"'"
        )
    # Python reads 1e999 as infinity.
    is_infinite = isinstance(value, float) and math.isinf(value)
    if full(key) in fields() and is_infinite and "inf" not in text.lower():
        raise ConfigError(f"{key}={text}: too large; expected a finite number")


def _check_value(key: str, value: Any) -> None:
    """Raises ConfigError unless `key` exists and accepts `value`. Checks mappings by key."""
    plain({key: value}, "command line")
    if full(key) not in fields():
        known = short_keys() | set(GROUPS)
        raise ConfigError(foreign_names.unknown_lines(short(full(key)), known, value))
    annotation = fields()[full(key)].annotation
    if isinstance(annotation, type) and issubclass(annotation, Node):
        _check_mapping(key, value, annotation)
        return
    node, leaf = owner(key=full(key))
    node(**{leaf: value})  # every field has a default, so this checks this one value


def _check_mapping(key: str, value: Any, node: type[Node]) -> None:
    """Raises ConfigError with every problem of a mapping assigned to a node."""
    if not isinstance(value, dict):
        hint = example(full(key), node, value)
        raise ConfigError(f"{key}={spelled(value)}: expected keys of {short(full(key))}{hint}")
    problems: list[str] = []
    for name, inner in value.items():
        inner_key = f"{key}.{name}"
        # Hydra keeps a dotted key in braces as one name.
        if "." in name and full(inner_key) in fields():
            problems.append(
                f"{inner_key}: a key in braces cannot have a dot; write"
                f" {short(full(inner_key))}={spelled(inner)}"
            )
            continue
        try:
            _check_value(inner_key, inner)
        except ConfigError as error:
            problems += error.problems
    refuse_if(problems)
