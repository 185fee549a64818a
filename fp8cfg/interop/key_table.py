"""Key table of another project: each of its precision keys with the values of ours that it means, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fp8cfg.schema.errors import ConfigError, nearest, refuse_if, suggest
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS

Values = Mapping[str, Any]
"""Our values by short keys, or theirs by their keys."""
TYPO = 0.8
"""How alike two names are of which one is a typing error of the other."""
SILENT = object()
"""What an entry writes where its key is left out."""


FORMATS = {name: name for name in ("hybrid", "e4m3")}
AMAX_COMPUTE_ALGOS = {name: name for name in ("max", "most_recent")}


def always(ours: Values) -> bool:
    """Of every recipe."""
    return True


def runs_fp8(ours: Values) -> bool:
    """Of recipes that run FP8."""
    return bool(ours["fp8.enabled"])


def delayed(ours: Values) -> bool:
    """Of recipes that run FP8 under delayed scaling."""
    return runs_fp8(ours) and SCALINGS[ours["fp8.scaling"]].history


@dataclass(frozen=True)
class Entry:
    """One key of theirs. `read` gives the values of ours, by short keys, that a value of it means; it raises ValueError, saying
    what was expected, for what no value can be. `write` gives its value under ours, or SILENT; it is asked `when` that holds.
    """

    theirs: str
    read: Callable[[Any], dict[str, Any]]
    write: Callable[[Values], Any]
    when: Callable[[Values], bool] = always


class Unsaid(NamedTuple):
    """Why a key of theirs has no counterpart here, and its usual values, which need no remark."""

    why: str
    usual: tuple[Any, ...] = ()


def nothing_more(theirs: dict[str, Any]) -> list[str]:
    """For projects whose keys mean each for itself what they mean."""
    return []


def nothing_differs(ours: Values) -> list[str]:
    """For projects that carry out what is written."""
    return []


def no_place(key: str) -> str | None:
    """For projects whose keys have one name each."""
    return None


def nothing_refused(ours: Values) -> list[str]:
    """For projects that can write every recipe, as far as they can say it."""
    return []


@dataclass(frozen=True)
class Dialect:
    """Another project's table. Keys are lower case with underscores; nested ones have dots; those in capitals are no keys of
    theirs but what `prepare` makes of several.

    `spellings` are other names of its keys. `defaults` are values in force where nothing is said, as far as they differ from
    ours. `unsaid` are keys, and with a dot at the end prefixes of keys, without a counterpart here. `prepare` changes a table of
    theirs, before it is read, to what its keys mean together, and gives remarks; ConfigError where they cannot stand together.
    `refuse` says which recipes it cannot write at all. `why` says of keys of ours (of a whole node, with a dot at the end) why it has none for them,
    `doubts` of keys that it has what comes of them when they are not our default, and `beyond` names those outside of precision
    that it has. `differs` has a line for each value that it can say and that is not quite the same there. `place` gives the name
    of a key that stands in a section of a job.
    """

    name: str
    entries: tuple[Entry, ...]
    spellings: Mapping[str, str] = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)
    unsaid: Mapping[str, Unsaid] = field(default_factory=dict)
    prepare: Callable[[dict[str, Any]], list[str]] = nothing_more
    refuse: Callable[[Values], list[str]] = nothing_refused
    why: Mapping[str, str] = field(default_factory=dict)
    doubts: Mapping[str, str] = field(default_factory=dict)
    beyond: tuple[str, ...] = ()
    differs: Callable[[Values], list[str]] = nothing_differs
    place: Callable[[str], str | None] = no_place

    def named(self, key: str) -> str:
        """The table's name of a key that may be spelled otherwise."""
        spelled = key.strip().lower().removeprefix("--").replace("-", "_")
        return self.spellings.get(spelled) or self.place(spelled) or spelled

    def knows(self, key: str) -> bool:
        """Whether `key` is one that means something here, under any of its names."""
        return self.named(key) in {entry.theirs for entry in self.entries}

    def within(self, section: str) -> str | None:
        """The first key of a section; None where it is no section."""
        return next((e.theirs for e in self.entries if e.theirs.startswith(f"{section}.")), None)

    def near(self, key: str) -> str | None:
        """The key that an unknown one is meant for: very like it, of the same name in another section, or merely like it."""
        leaf = key.rpartition(".")[2]
        elsewhere = (name for name in self._names() if name.endswith(f".{leaf}"))
        return self.like(key, TYPO) or next(elsewhere, None) or self.like(key, 0.6)

    def like(self, key: str, cutoff: float) -> str | None:
        """The key most like an unknown one: of its own section, or of the section most like that."""
        leaves: dict[str, list[str]] = {}
        for name in self._names():
            at, _, last = name.rpartition(".")
            leaves.setdefault(at, []).append(last)
        section, _, leaf = key.rpartition(".")
        home = section if section in leaves else nearest(section, leaves, cutoff)
        if home is None:
            return None
        found = nearest(leaf, leaves[home], cutoff)
        if not found and home != section and self.lacks(f"{home}.{leaf}"):
            found = leaf
        return f"{home}.{found}".lstrip(".") if found else None

    def _names(self) -> tuple[str, ...]:
        return (
            *(e.theirs for e in self.entries if not e.theirs.isupper()),
            *self.spellings,
            *self.unsaid,
        )

    def lacks(self, key: str) -> Unsaid | None:
        """Why `key`, by its name in the table, has no counterpart; None where it is no such key."""
        heads = ["".join(key[: i + 1]) for i, sign in enumerate(key) if sign == "."]
        return next((self.unsaid[k] for k in (key, *reversed(heads)) if k in self.unsaid), None)


class Read(NamedTuple):
    """A recipe from elsewhere. `lost` has a line for each thing that it says and a recipe does not; `unknown` a line for each
    key that the other project does not have."""

    recipe: Recipe
    lost: tuple[str, ...]
    unknown: tuple[str, ...]


class Written(NamedTuple):
    """A recipe in another project's terms. `lost` has a line for each key of ours that these cannot say."""

    value: Any
    lost: tuple[str, ...]


class NotHere(ConfigError):
    """The other project's library, whose object is wanted, cannot be imported here. Exit code 2."""


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


def not_read(names: Sequence[str]) -> list[str]:
    """The line on what a source has and no importer reads; none if it reads everything."""
    return [f"{', '.join(map(printable, names))}: not read"] if names else []


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
