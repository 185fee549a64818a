"""Malformed words: the line for one that Hydra's grammar does not take, with what is wrong where that is plain."""

from __future__ import annotations

import re
import shlex

from fp8cfg.composition.config_groups import GROUPS
from fp8cfg.composition.flatten import is_node
from fp8cfg.composition.quoted_words import quoted, takes_text
from fp8cfg.config.errors import nearest
from fp8cfg.config.key_names import full
from fp8cfg.config.recipe import fields, short_keys
from fp8cfg.config.validation_errors import example

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
    if value[:2] == "~/":
        return f"no shell replaces '~' there; write {key}=$HOME{value[1:]}"
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
