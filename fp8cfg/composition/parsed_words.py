"""Parsed words: overrides by Hydra's grammar, of the kinds that a closed schema takes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8cfg.composition.config_groups import GROUPS
from fp8cfg.composition.flatten import is_node
from fp8cfg.composition.malformed_words import malformed
from fp8cfg.composition.quoted_words import in_quotes
from fp8cfg.config import foreign_names
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.key_names import full
from fp8cfg.config.recipe import fields
from fp8cfg.config.validation_errors import THOUSANDS

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override


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


def override(word: str) -> Override:
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
def _parsed_by_hydra(word: str) -> Override:
    """Not to be changed. Kept, since one composition asks for each word several times, and ANTLR takes a millisecond."""
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
