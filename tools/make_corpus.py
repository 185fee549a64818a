"""Writes the corpus that is shipped with the package: `python tools/make_corpus.py [file]`.

The text is made here, from word lists and a small grammar, so nobody else's rights are on it. It is meant to teach a
model of bytes something at every scale: letters and words, sentences, people who keep their trade and town from one
document to the next, sums that are right, brackets that close, rows that must be copied, programs with their output.

Randomness comes from sha256 of a counter, so the bytes are equal under every Python. A change here changes every loss
that a test remembers.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

DEFAULT = Path(__file__).resolve().parents[1] / "fp8cfg" / "data" / "tiny.txt"
SIZE = 240_000  # bytes, at least

words = str.split

NAMES = words(
    "Abel Brina Corin Dala Edmer Fenna Goran Hilde Ivo Jora Kelim Mira Lowen Orla Nestor Petra"
)
TOWNS = words("Ashford Brackwater Colden Dunmere Eastmill Farrow")
TRADES = {
    "baker": ("bread", "oven"),
    "smith": ("nails", "forge"),
    "weaver": ("cloth", "loom"),
    "potter": ("bowls", "wheel"),
    "miller": ("flour", "mill"),
    "fisher": ("trout", "boat"),
    "carver": ("spoons", "bench"),
    "gardener": ("apples", "garden"),
}
ANIMALS = words("dog cat goat horse hen goose mule sheep")
COLOURS = words("black white brown grey red")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
WEATHER = {"rain": "wet", "snow": "cold", "sun": "warm", "fog": "grey", "wind": "loud"}
THINGS = words(
    "pan rope lamp chair wagon bell barrel ladder candle mirror hammer needle bucket saddle window blanket kettle "
    "drum fiddle clock feather button coin key"
)
DRINKS = words("milk water cider tea soup")
SINGLES = words("zero one two three four five six seven eight nine ten eleven twelve")
BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">"}


class Draw:
    """Numbers from sha256 of a label and a counter."""

    def __init__(self, label: str) -> None:
        self.label, self.count = label, 0

    def below(self, n: int) -> int:
        self.count += 1
        digest = hashlib.sha256(f"{self.label} {self.count}".encode()).digest()
        return int.from_bytes(digest[:8], "little") % n

    def one(self, options: Sequence[str]) -> str:
        return options[self.below(len(options))]


class Person:
    """What is true of one person throughout the text."""

    def __init__(self, index: int) -> None:
        draw = Draw(f"person {index}")
        self.name = NAMES[index]
        self.town, self.trade = draw.one(TOWNS), draw.one(list(TRADES))
        self.goods, self.place = TRADES[self.trade]
        self.animal, self.colour = draw.one(ANIMALS), draw.one(COLOURS)
        self.friend = NAMES[(index + 1 + draw.below(len(NAMES) - 1)) % len(NAMES)]
        self.age = 20 + draw.below(50)
        self.they, self.their = ("He", "his") if index % 2 == 0 else ("She", "her")


PEOPLE = [Person(index) for index in range(len(NAMES))]


def story(draw: Draw) -> str:
    who = PEOPLE[draw.below(len(PEOPLE))]
    day, sky = draw.below(7), draw.one(list(WEATHER))
    lines = [
        f"{who.name} is a {who.trade} and lives in {who.town} with a {who.colour} {who.animal}.",
        f"On {DAYS[day]} there was {sky} over {who.town}, and the road was {WEATHER[sky]}.",
    ]
    happened = events(draw, who)
    for _ in range(2 + draw.below(4)):
        lines.append(happened.pop(draw.below(len(happened))))
    lines.append(
        f"The next day was {DAYS[(day + 1) % 7]}, and {who.name} went back to the {who.place}."
    )
    return " ".join(lines)


def events(draw: Draw, who: Person) -> list[str]:
    had, sold = 4 + draw.below(9), 1 + draw.below(3)
    friend = PEOPLE[NAMES.index(who.friend)]
    way = f"from {who.town} to {friend.town}" if who.town != friend.town else f"across {who.town}"
    older = who if who.age > friend.age else friend
    return [
        f"{who.they} had {SINGLES[had]} baskets of {who.goods}, sold {SINGLES[sold]}, and kept {SINGLES[had - sold]}.",
        f"In the morning {who.name} went to the {who.place} and called {who.their} {who.animal}.",
        f'"Good morning," said {friend.name} the {friend.trade}. "Have you any {who.goods} today?"',
        f"{who.they} walked {way} to see {friend.name}, who makes {friend.goods}.",
        f"The {who.colour} {who.animal} slept near the {who.place} until the evening.",
        f"When the work was done, {who.name} gave {SINGLES[sold + 1]} of the {who.goods} to {friend.name}.",
        f"{who.they} found an old {draw.one(THINGS)} and a {draw.one(COLOURS)} {draw.one(THINGS)} behind the {who.place}.",
        f"Somebody had left a {draw.one(THINGS)} on the road, and the {who.animal} would not pass it.",
        f'"That {draw.one(THINGS)} is not mine," said {who.name}. "Ask {draw.one(NAMES)} about it."',
        f"{older.name} is older than {(friend if older is who else who).name}, and knows the road to {draw.one(TOWNS)}.",
        f"They drank {draw.one(DRINKS)} and spoke about {draw.one(NAMES)} and the {draw.one(THINGS)}.",
    ]


def market(draw: Draw) -> str:
    counts = [1 + draw.below(9) for _ in range(2 + draw.below(3))]
    rows = "\n".join(f"- {count} {draw.one(THINGS)}{'s' if count > 1 else ''}" for count in counts)
    return f"Market of {draw.one(TOWNS)}, {draw.one(DAYS)}:\n{rows}\nIn all {sum(counts)} things."


def questions(draw: Draw) -> str:
    lines = []
    for _ in range(4 + draw.below(4)):
        who = PEOPLE[draw.below(len(PEOPLE))]
        question, answer = (
            (f"Where does {who.name} live?", f"In {who.town}."),
            (f"What does {who.name} make?", f"{who.name} makes {who.goods}."),
            (f"How old is {who.name}?", f"{who.name} is {who.age} years old."),
            (f"Who is the friend of {who.name}?", f"{who.friend}."),
            (f"Which animal does {who.name} keep?", f"A {who.colour} {who.animal}."),
        )[draw.below(5)]
        lines.append(f"Q: {question}\nA: {answer}")
    return "\n".join(lines)


def table(draw: Draw) -> str:
    k, start = 2 + draw.below(11), 1 + draw.below(9)
    if draw.below(2):
        return "\n".join(f"{a} + {k} = {a + k}" for a in range(start, start + 10))
    return "\n".join(f"{a} x {k} = {a * k}" for a in range(start, start + 10))


def sums(draw: Draw) -> str:
    lines = []
    for _ in range(8):
        a, b = 1 + draw.below(20), 1 + draw.below(20)
        lines.append(f"{a} + {b} = {a + b}" if draw.below(2) else f"{a + b} - {a} = {b}")
    return "\n".join(lines)


def brackets(draw: Draw) -> str:
    return "\n".join(nested(draw, 3 + draw.below(5)) for _ in range(6))


def nested(draw: Draw, pairs: int) -> str:
    if pairs == 0:
        return ""
    inside = draw.below(pairs)
    left = draw.one(list(BRACKETS))
    return left + nested(draw, inside) + BRACKETS[left] + nested(draw, pairs - 1 - inside)


def record(draw: Draw) -> str:
    who = PEOPLE[draw.below(len(PEOPLE))]
    return (
        f'{{"name": "{who.name}", "age": {who.age}, "town": "{who.town}", "trade": "{who.trade}",\n'
        f' "animal": {{"kind": "{who.animal}", "colour": "{who.colour}"}}, "friends": ["{who.friend}"]}}'
    )


def copies(draw: Draw) -> str:
    lines = []
    for _ in range(6):
        row = [draw.one("abcdefghijklmnopqrstuvwxyz") for _ in range(4 + draw.below(4))]
        for verb, result in (("copy", row), ("turn", row[::-1]), ("sort", sorted(row))):
            lines.append(f"{verb}: {' '.join(row)} -> {' '.join(result)}")
    return "\n".join(lines)


def program(draw: Draw) -> str:
    k, x = 1 + draw.below(12), 1 + draw.below(12)
    if draw.below(2):
        return f"def add_{k}(x):\n    return x + {k}\n\nprint(add_{k}({x}))  # {x + k}"
    n = 2 + draw.below(6)
    shown = " ".join(str(i * k) for i in range(n))
    return f"for i in range({n}):\n    print(i * {k}, end=' ')\n# {shown}"


# Stories are the body of the text; the rest appears often enough to be learnt in a few hundred steps.
KINDS = (
    [story] * 6
    + [questions] * 3
    + [market] * 2
    + [table, sums, brackets, record, record, copies, program, program]
)


def make() -> bytes:
    """The corpus, ASCII; documents are separated by two empty lines and hold none themselves."""
    draw, documents, size = Draw("tiny"), [], 0
    while size < SIZE:
        documents.append(KINDS[draw.below(len(KINDS))](draw))
        size += len(documents[-1]) + 3
    return ("\n\n\n".join(documents) + "\n").encode("ascii")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT)
    target = parser.parse_args().file
    target.write_bytes(make())
    print(f"{target}: {target.stat().st_size} bytes")
