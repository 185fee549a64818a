"""Layouts proved without a cluster: bytes of weights, masters, gradients and moments of ranks as built, beside those of `plan`.

    python tools/prove_layouts.py                        # every large recipe, at most 16,384 ranks
    python tools/prove_layouts.py llama_70b --ranks 1024 --sent model.recompute_granularity=full

Each rank is built and steps, with torch's fake process group and without memory (tools/layout_proof). Exit code 1 where a rank holds
other bytes than planned, or sends others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.tables import size
from tools.layout_proof import cells
from tools.layout_proof.comparison import KINDS, Compared, compare, wrong_axes

HEADER = f"{'recipe':<17} {'precision':<16} {'ranks':>6}  {'layout':<27} {'rank':<12}"
WIDTH = 12


def row(found: Compared) -> str:
    """A line of the table: of each kind what is built, with a planned one beside it that is not equal."""
    cell, kinds = found.cell, []
    for kind in KINDS:
        text = size(found.built[kind])
        kinds.append(
            text
            if found.built[kind] == found.planned[kind]
            else f"{found.built[kind]} != {found.planned[kind]}"
        )
    columns = " ".join(f"{text:>{WIDTH}}" for text in kinds)
    said = "equal" if found.equal else "NOT EQUAL"
    return (
        f"{cell.recipe:<17} {cell.precision:<16} {cell.ranks:>6}  {found.layout:<27} {found.place:<6} {found.rank:>5} {columns}"
        f"  {said} ({found.seconds:.0f} CPU s)"
    )


def sent_lines(found: Compared) -> list[str]:
    """A line for each axis: the bytes that the rank sends in a step."""
    if found.sent is None or found.planned_sent is None:
        return []
    wrong = wrong_axes(found.sent, found.planned_sent)
    lines = []
    for axis in dict.fromkeys([*found.planned_sent, *found.sent]):
        planned = found.planned_sent.get(axis, 0)
        verdict = "NOT AS PLANNED" if axis in wrong else "as planned"
        lines.append(
            f"    {axis:<27} {found.sent.get(axis, 0):>16} B  planned {planned} B, {verdict}"
        )
    return lines


def chosen(
    names: Iterable[str],
    words: Iterable[str],
    ranks: int | None,
    precision: str | None,
    accumulate: int,
) -> list[cells.Cell]:
    """The cells of those recipes, of all by default, on as many ranks and in that precision where these are given; with `words`,
    and steps of `accumulate` times the fewest microbatches."""
    every = [
        cell
        for cell in cells.every(names)
        if ranks in (None, cell.ranks) and precision in (None, cell.precision)
    ]
    return [replace(cell, words=(*cell.words, *words), accumulate=accumulate) for cell in every]


def prove(every: Iterable[cells.Cell], places: Sequence[str], sent: bool) -> int:
    """Print a line for each rank; the number of ranks that are not as planned."""
    wrong = 0
    print(HEADER, " ".join(f"{kind:>{WIDTH}}" for kind in KINDS), " built and planned", flush=True)
    for cell in every:
        for place, rank in cell.places.items():
            if place not in places:
                continue
            try:
                found = compare(cell, place, rank, sent)
            except ConfigError as e:
                print(
                    f"{cell.recipe:<17} {cell.precision:<16} {cell.ranks:>6}  refused: {e}",
                    flush=True,
                )
                wrong += 1
                break
            print("\n".join([row(found), *sent_lines(found)]), flush=True)
            wrong += not found.equal
    return wrong


def main() -> int:
    """Print the table; 1 where a rank is not as planned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words",
        nargs="*",
        help="names of recipes, by default all that are meant for more than one GPU; key=value",
    )
    parser.add_argument("--ranks", type=int, help="on so many GPUs alone, where the table has that")
    parser.add_argument(
        "--precision", choices=[*cells.PRECISIONS, *(name for name, _ in cells.SPLIT_SCALES)]
    )
    parser.add_argument("--places", default="first,middle,last", help="ranks to look at")
    parser.add_argument(
        "--sent",
        action="store_true",
        help="count the bytes that a second step sends too",
    )
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="steps of N times the fewest microbatches of the layout",
    )
    arguments = parser.parse_intermixed_args()
    names, words = ([w for w in arguments.words if ("=" in w) == value] for value in (False, True))
    every = chosen(names, words, arguments.ranks, arguments.precision, arguments.accumulate)
    if not every:
        parser.error("no such cell of the table")
    wrong = prove(every, arguments.places.split(","), arguments.sent)
    print(f"{wrong} ranks are not as planned" if wrong else "every rank is as planned")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
