"""Quotes around the texts of override words: Hydra's grammar has letters of ASCII alone outside of quotes."""

from __future__ import annotations

import unicodedata

from fp8cfg.config.key_names import full
from fp8cfg.config.recipe import fields

_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
_TEXT = (str, str | None)
_PLAIN = frozenset(" _/-+.%*@?|")
"""Signs beside letters and digits that a text without quotes may have; '$' is left to be refused as a variable."""


def in_quotes(word: str) -> str:
    """`word` with quotes around a text that has letters of other scripts and nothing else that wants them."""
    key, _, value = word.partition("=")
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
