"""Command-line overrides, checked against the schema before anything is composed; all problems are reported at once."""

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
from fp8cfg.composition.recipe_yaml import is_node, settings
from fp8cfg.schema import foreign_names
from fp8cfg.schema.errors import ConfigError, nearest, refuse_if
from fp8cfg.schema.keys import PLUGIN, full, short, spelled
from fp8cfg.schema.node import THOUSANDS, Node, example
from fp8cfg.schema.recipe import Recipe, fields, short_keys
from fp8cfg.schema.safe_files import plain

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override as HydraOverride

_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_TEXT = (str, str | None)
_PLAIN = frozenset(" _/-+.%*@?|")
"""Signs beside letters and digits that a text without quotes may have; '$' is left to be refused as a variable."""


def in_quotes(word: str) -> str:
    """Returns `word` with quotes around a text that only Hydra wants in quotes.

    These are a path below `~`, and a text with letters of other scripts and nothing else that needs quotes.
    """
    key, _, value = word.partition("=")
    if value.startswith("~/"):
        return f'{key}="{value}"'
    if value.isascii():
        return word
    if value[:1] == "[" and value[-1:] == "]" and _takes_texts(key):
        return f"{key}=[{','.join(map(_in_quotes, value[1:-1].split(',')))}]"
    return f"{key}={_in_quotes(value)}" if takes_text(key) else word


def _in_quotes(text: str) -> str:
    plain = all(_plain_sign(sign) for sign in text)
    return quoted(text.strip()) if plain and not text.isascii() else text


def _plain_sign(sign: str) -> bool:
    return sign in _PLAIN or (
        sign.isalnum() if sign.isascii() else unicodedata.category(sign)[0] in "LM"
    )


def takes_text(key: str) -> bool:
    """Whether any text is a value of `key`: a name, or a path."""
    name = full(key.lstrip("+"))
    return name in _FOLDERS or (name in fields() and fields()[name].annotation in _TEXT)


def _takes_texts(key: str) -> bool:
    """Whether `key` takes a list of any texts."""
    name = full(key.lstrip("+"))
    return name in fields() and fields()[name].annotation == tuple[str, ...]


def quoted(text: str) -> str:
    """`text` in double quotes, as Hydra's grammar has them."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double).with_quotes()


_EQUALS = re.compile(r"(?<=[{,])(\w+)=")
_FUNCTIONS = ("choice", "range", "interval", "glob", "shuffle", "sort")
_QUOTES = frozenset("'\"\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb")
_SHELL = "is a variable, which no shell has replaced; write its value"


def malformed(word: str) -> str:
    """The line for a word that Hydra's grammar does not take."""
    if "=" in word and (hint := _mistake(word)):
        return f"{word}: {hint}"
    if "=" in word:
        return (
            f"{word}: not of the form key=value; quote a value with special signs, as in 'name=\"a"
            " b\"'"
        )
    if word in short_keys() or word in GROUPS:
        return f"{word}: needs a value, as in {word}={'NAME' if word in GROUPS else 'VALUE'}"
    if (key := word.partition(":")[0].strip()) in {*short_keys(), *GROUPS} and ":" in word:
        return f"{word}: not of the form key=value; write {key}={word.partition(':')[2].strip()}"
    if word.startswith("$"):
        return f"{word}: {_SHELL}"
    near = nearest(word, [*short_keys(), *GROUPS], 0.75)
    return f"{word or repr(word)}: not of the form key=value" + (
        f"; did you mean {near!r}?" if near else ""
    )


def _mistake(word: str) -> str:
    """What is wrong with a word with a `=` that is no override, where that is plain; else nothing."""
    key, _, value = word.partition("=")
    if word == "=":
        return "stands alone; key=value has no spaces"
    text = takes_text(key) and value.isprintable() and not set(word) & _QUOTES
    if not text and (
        strange := next((sign for sign in word if not sign.isascii() and sign.isprintable()), "")
    ):
        return (
            f"{strange!r} is not a sign of a key or a number; type it anew, or quote a text as in"
            " 'name=\"a b\"'"
        )
    if word[:1] in "'\"":
        return "quoted twice; leave the inner quotes out"
    if " " in word and all("=" in part for part in word.split()):
        return f"several words in one; write {' '.join(word.split())} without quotes"
    if value.startswith("(") and is_node(full(key)):
        node = fields()[full(key)].annotation
        values = [each.strip() for each in value.strip("()").split(",")]
        return f"expected keys{example(full(key), node, values)}"
    if value.startswith("(") and not text:
        return f"a list is written {key}=[{value.strip('()')}]"
    if key != key.strip() or value != value.strip():
        return f"spaces around '='; write {key.strip()}={value.strip()}"
    if value[:1] == "=":
        return f"two signs '='; write {key}={value.lstrip('=')}"
    if value.endswith(","):
        return f"ends in a comma; write {key}={value.rstrip(',')}"
    if len(parts := re.split(r",\s*(?=[\w.]+=)", word)) > 1 and not set(word) & set("[]{}'\""):
        return f"several words in one; write {' '.join(parts)}"
    if value[:1] in "[{" and "{" in value and (mapped := _EQUALS.sub(r"\1: ", value)) != value:
        return f"inside of braces stands a colon and a space, as in '{key}={mapped}'"
    if text:
        return (
            f"a text with special signs wants quotes; write {shlex.quote(f'{key}={quoted(value)}')}"
        )
    called = value.partition("(")[0] if value.endswith(")") else ""
    if called and (near := nearest(called, _FUNCTIONS)):
        return f"no such function {called!r}; did you mean {near!r}?"
    for opening, closing in ("[]", "{}"):
        if value.count(opening) > value.count(closing):
            return f"{opening!r} without its {closing!r}; quote the word where it has spaces"
    return ""


def parsed(word: str) -> tuple[str, Any, str]:
    """Key, value and the value's text. Raises ConfigError as `override` does, and for a sweep."""
    word = in_quotes(word)
    said = override(word)
    if said.is_sweep_override():
        key = full(said.key_or_group)
        listed = key in fields() and "tuple" in str(fields()[key].annotation)
        text = word.partition("=")[2]
        if not listed and THOUSANDS.fullmatch(text):
            raise ConfigError(
                f"{word}: several values are a sweep; a number is written without commas: "
                f"{said.key_or_group}={text.replace(',', '')}"
            )
        write = f"{said.key_or_group}=[{text}]" if listed else "[a,b]"
        raise ConfigError(
            f"{word}: several values are a sweep, and a run takes one; a list is written {write}"
        )
    value = _plain(said.value())
    if _sweeps(value):
        raise ConfigError(
            f"{word}: a sweep inside of braces; write it as a word of its own, as in"
            f" {said.key_or_group}.KEY=a,b"
        )
    return said.key_or_group, value, word.partition("=")[2]


def override(word: str) -> HydraOverride:
    """`word` as Hydra parses it, its key dotted. Raises ConfigError for what Hydra's grammar or our closed schema does not
    take."""
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    if "${" in word:
        raise ConfigError(f"{word}: interpolation is not accepted; write the value")
    try:
        parsed = _parsed_by_hydra(in_quotes(word))
    except HydraException:
        raise ConfigError(malformed(word)) from None
    except RecursionError:
        raise ConfigError(f"{word[:40]}...: nested too deeply") from None
    except ValueError:  # Python's own limit (sys.set_int_max_str_digits)
        raise ConfigError(f"{word[:40]}...: a number of more digits than any key takes") from None
    key = parsed.key_or_group.replace("/", ".")
    if not key:
        raise ConfigError(malformed(word))
    if key == "hydra" or key.startswith("hydra."):
        raise ConfigError(f"{word}: settings of Hydra itself are not part of a recipe")
    if parsed.type is OverrideType.DEL:
        raise ConfigError(
            f"{word}: keys cannot be removed; set {key.partition('=')[0]} to its default instead"
        )
    if parsed.type is not OverrideType.CHANGE and key.rpartition(".")[2] in foreign_names.CODE_KEYS:
        raise ConfigError(foreign_names.unknown(key, ()))
    if (
        parsed.type is not OverrideType.CHANGE
        and full(key) in {*fields(), *GROUPS}
        and (key in GROUPS or not is_node(full(key)))
    ):
        raise ConfigError(key_exists(word))
    if parsed.package:
        raise ConfigError(f"{word}: packages are fixed; write {key}={word.partition('=')[2]}")
    return replace(parsed, key_or_group=key)


def key_exists(word: str) -> str:
    """The line for a word that adds a key, of which there are no others than those of the schema."""
    return f"{word}: every key exists already; write {word.lstrip('+')}"


def hydra_word(word: str) -> str:
    """`word`, a setting of Hydra itself, as its grammar takes it. Raises ConfigError where it cannot."""
    from hydra.errors import HydraException

    try:
        _parsed_by_hydra(in_quotes(word))
    except HydraException:
        raise ConfigError(malformed(word)) from None
    return in_quotes(word)


@functools.cache
def parser() -> OverridesParser:
    """Hydra's parser of override words, which inspects the signatures of its functions when it is made."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


@functools.lru_cache(maxsize=256)
def _parsed_by_hydra(word: str) -> HydraOverride:
    """The result is shared and must not be changed. ANTLR takes a millisecond for each argument."""
    return parser().parse_override(word)


def _plain(value: Any) -> Any:
    """Hydra's parsed value as plain data: quoted strings unwrapped."""
    if isinstance(value, dict):
        return {str(_plain(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value.text if hasattr(value, "text") else value


def _sweeps(value: Any) -> bool:
    """Whether a sweep stands inside of `value`, which Hydra leaves there."""
    from hydra.core.override_parser.types import Glob, Sweep

    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, (Sweep, Glob)) or any(map(_sweeps, inner))


@dataclass(frozen=True)
class Override:
    """One argument: the choice `name` of a `group`, or `values` by full key.

    Attributes:
        location: The argument, or the file that makes the choice. None for a default choice.
        group: Group of the choice, else empty.
        name: Name of the choice, as its file or its function is named. Empty for `precision=null`,
            which keeps what the recipe says.
        values: Value by full key, as the schema holds it.
    """

    location: Location | None
    group: str = ""
    name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Overrides:
    """The arguments of a command line, parsed and checked.

    Attributes:
        choices: The last choice of each group. Choices act before settings.
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
            has_recipe: Whether a file or a recipe is given, so that `recipe=` is an error.

        Raises:
            ConfigError: With a line for each argument that is no override, names nothing that
                exists, or has a value of the wrong type or out of bounds.
        """
        choices: dict[str, Override] = {}
        values: list[Override] = []
        problems: list[str] = []
        for argument in arguments:
            try:
                override = parse_argument(argument, library)
                if override.group == "recipe" and has_recipe:
                    raise ConfigError(
                        f"{argument}: the recipe is given already; drop one of the two"
                    )
            except ConfigError as e:
                problems += e.problems
                continue
            if override.name:
                choices[override.group] = override
            elif override.values:
                values.append(override)
        refuse_if(problems)
        return cls(choices, values)

    @property
    def keys(self) -> frozenset[str]:
        """Full keys of all settings."""
        return frozenset(key for override in self.settings for key in override.values)

    def value(self, key: str) -> Any:
        """The last value of the full `key`; None if no argument sets it."""
        for override in reversed(self.settings):
            if key in override.values:
                return override.values[key]
        return None


def parse_argument(argument: str, library: Library) -> Override:
    """Parses and checks one argument. Raises ConfigError as `Overrides.parse` does."""
    try:
        return _parse_argument(argument, library)
    except ConfigError as e:
        if e.problems == [key_exists(argument)]:
            _parse_argument(argument.lstrip("+"), library)  # that line's advice must be valid
        raise


def _parse_argument(argument: str, library: Library) -> Override:
    key, value, text = parsed(argument)
    location = Location(argument)
    folder_group = library.own(key)
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
    if key in GROUPS and not isinstance(value, dict):
        similar = foreign_names.meant(key, value)
        hint = f"; did you mean {similar!r}?" if similar else ""
        raise ConfigError(f"{argument}: expected the name of a preset{hint}")
    if isinstance(value, str) and is_node(full(key)):
        _check_misplaced_choice(argument, key, value, library)
    _check_text(key, value, text)
    _check_value(key, value)
    return Override(location, values=settings({full(key): value}))


def _choice(location: Location, group: str, name: str, library: Library) -> Override:
    problem = library.problem(group, name)
    if problem:
        raise ConfigError(problem)
    return Override(location, group, library.stem(group, name))


def _check_misplaced_choice(argument: str, key: str, value: str, library: Library) -> None:
    """Raises ConfigError if `value`, which is set to a node, is the name of a choice."""
    for group in GROUPS:
        if value in library.choices(group):
            node = short(full(key))
            raise ConfigError(
                f"{argument}: expected keys of {node}; did you mean '{group}={value}'?"
            )


def _check_text(key: str, value: Any, text: str) -> None:
    """Raise ConfigError where `text` is another one than `value` is written, and a line about `value` would not have it."""
    if takes_text(key) and isinstance(value, (bool, int, float)):
        raise ConfigError(
            f"{key}={text}: expected a string, got {type(value).__name__}; write '{key}=\"{text}\"'"
        )
    if (
        full(key) in fields()
        and isinstance(value, float)
        and math.isinf(value)
        and "inf" not in text.lower()
    ):
        raise ConfigError(
            f"{key}={text}: more than any number here can be; expected a finite number"
        )


def _check_value(key: str, value: Any) -> None:
    """Raise ConfigError unless `key` exists and takes `value`; a mapping is checked key by key."""
    plain({key: value}, "command line")
    if full(key) not in fields():
        raise ConfigError(
            foreign_names.unknown(short(full(key)), short_keys() | set(GROUPS), value)
        )
    node = fields()[full(key)].annotation
    if isinstance(node, type) and issubclass(node, Node):
        if not isinstance(value, dict):
            raise ConfigError(
                f"{key}={spelled(value)}: expected keys of"
                f" {short(full(key))}{example(full(key), node, value)}"
            )
        problems: list[str] = []
        for k, v in value.items():
            try:
                if "." in k and full(f"{key}.{k}") in fields():
                    raise ConfigError(
                        f"{key}.{k}: no key in braces has a dot; write"
                        f" {short(full(f'{key}.{k}'))}={spelled(v)}"
                    )
                _check_value(f"{key}.{k}", v)
            except ConfigError as e:
                problems += e.problems
        return refuse_if(problems)
    parent, _, leaf = full(key).rpartition(".")
    owner = fields()[parent].annotation if parent else Recipe
    owner(
        **{leaf: value}
    )  # every field has a default, so that a node with this one value checks this one value
