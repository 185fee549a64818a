"""Value parsers for the tables of other projects: booleans, numbers and options in the spellings that they are found in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8cfg.config.errors import refuse_if, suggest
from fp8cfg.interop.key_table import SILENT, Entry, Values, always

_TRUTH = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1", "enabled"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0", "disabled"), False),
}


def boolean(value: Any) -> bool:
    """A truth value, also as the words that Python's and Accelerate's parsers take."""
    found = value if isinstance(value, bool) else _TRUTH.get(str(value).strip().lower())
    if found is None:
        raise ValueError("expected true or false")
    return found


def is_on(value: Any) -> bool:
    """Whether a value is one that `boolean` takes for true."""
    return _TRUTH.get(str(value).strip().lower(), False)


def integer(value: Any) -> int:
    """A whole number, also as text."""
    made = number(value, "an integer")
    if not made.is_integer():
        raise ValueError("expected an integer")
    return int(made)


def number(value: Any, what: str = "a number") -> float:
    """A number, also as text."""
    try:
        if isinstance(value, bool):
            raise ValueError
        made = float(str(value).strip())
        if made - made != 0:
            raise ValueError
    except ValueError:
        raise ValueError(f"expected {what}") from None
    return made


def numbers(value: Any) -> tuple[float, ...]:
    """Several numbers."""
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a list of numbers")
    return tuple(map(number, value))


def one_of(value: Any, known: Mapping[str, Any]) -> Any:
    """What `known` has for `value`, whose case does not matter."""
    word = str(value).strip().lower()
    if word not in known:
        raise ValueError("not an option" + suggest(word, known))
    return known[word]


def same(
    theirs: str, ours: str, kind: Callable[[Any], Any], when: Callable[[Values], bool] = always
) -> Entry:
    """A key whose values are ours."""
    return Entry(theirs, lambda value: {ours: kind(value)}, lambda values: values[ours], when)


def inverse(theirs: str, ours: str, when: Callable[[Values], bool] = always) -> Entry:
    """A switch that is on where ours is off."""
    return Entry(
        theirs, lambda value: {ours: not boolean(value)}, lambda values: not values[ours], when
    )


def option(
    theirs: str, ours: str, words: Mapping[str, Any], when: Callable[[Values], bool] = always
) -> Entry:
    """A key whose options have other names: their words, in lower case, with ours. Of several with one meaning the first is
    written; what has none is left out."""
    back = {meaning: word for word, meaning in reversed([*words.items()])}
    return Entry(
        theirs,
        lambda value: {ours: one_of(value, words)},
        lambda values: back.get(values[ours], SILENT),
        when,
    )


def read_only(theirs: str, read: Callable[[Any], dict[str, Any]]) -> Entry:
    """A key that is understood, and that another one writes."""
    return Entry(theirs, read, lambda _: SILENT)


def write_only(
    theirs: str, write: Callable[[Values], Any], when: Callable[[Values], bool] = always
) -> Entry:
    """A key that must be there, and that follows from others."""
    return Entry(theirs, lambda _: {}, write, when)


def flattened(data: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Nested mappings as a table by dotted keys; an empty one is no key. Raises ConfigError for one that is given nested and
    dotted."""
    out: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{at}{name}"
        more = flattened(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
        twice = (key for key in more if key in out)
        refuse_if(
            [
                f"{printable(key)}: stands twice, in its section and dotted; drop one of the two"
                for key in twice
            ]
        )
        out |= more
    return out


def shown(key: str, value: Any) -> str:
    """`key=value`, short enough for a line; a flag without a value alone."""
    if value is True and key.startswith("--"):
        return key
    text = printable(str(value))
    return f"{key}={text if len(text) <= 40 else text[:37] + '...'}"


def printable(text: str) -> str:
    """`text` as it is, or with whatever is no sign of a line escaped."""
    return text if text.isprintable() else repr(text)


def switch(theirs: str, ours: str, value: Any) -> Entry:
    """A key that, where it is on, gives ours that value."""
    return Entry(
        theirs,
        lambda on: {ours: value} if boolean(on) else {},
        lambda values: values[ours] == value or SILENT,
    )
