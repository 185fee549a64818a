"""What each backend does with each key of precision: applied, and where that is read back, or refused, and with which line.

    python tests/support/backend_table.py               # a line for each key, then every cell
    python tests/support/backend_table.py --markdown    # the same for a page

tests/backends/test_backend_table.py holds every cell; those of Transformer Engine's own objects stand in te_table.py, and test_te_keys.py
holds them. MS-AMP's are read from a stand-in of its public API. None of it has run on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from fp8cfg.backends.te import rules
from fp8cfg.schema.node import Node
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.tables import table, wrapped
from tests.support import te_table
from tests.support.backend_cells import ALL, B200, H200, Applied, Refused, refusal

BACKENDS = ("native", "te", "torchao", "msamp")
Line = tuple[str, str]
"""applied or refused, and where or why."""


def leaves(cls: type[Node], at: str) -> Iterator[str]:
    """The keys of a node of the schema, those of nodes inside of it among them."""
    for name, field in cls.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Node):
            yield from leaves(field.annotation, f"{at}{name}.")
        else:
            yield at + name


def keys() -> list[str]:
    """Every key that the table has: those of `fp8` and of `storage`, opt_level and precision.compute."""
    plugin = Precision()
    return [
        "precision.compute",
        *leaves(type(plugin.fp8), "fp8."),
        *leaves(type(plugin.storage), "storage."),
        "opt_level",
    ]


def te_refusal(row: te_table.Refused) -> str:
    """The line with which a row of te_table.py is refused, as the rules give it."""
    fp8 = te_table.node(row.given)
    hardware = B200 if fp8.scaling == "nvfp4" else H200
    found = rules.refusals(Precision(fp8=fp8, compute=row.compute), hardware)
    lines = [str(violation) for violation in found]
    return next(line for line in lines if line.startswith(f"{row.key}=") and row.line in line)


def lines(key: str, backend: str) -> list[Line]:
    """What `backend` does with `key`, each thing once; what is applied is said with the scalings that it was read back under."""
    cells = [c for c in ALL if (c.key, c.backend) == (key, backend)]
    rows = [r for r in (*te_table.APPLIED, *te_table.REFUSED) if (r.key, "te") == (key, backend)]
    where: dict[str, dict[str, None]] = {}
    for c in (c for c in cells if isinstance(c, Applied)):
        where.setdefault(c.where, {})[c.scaling] = None
    for r in (r for r in rows if isinstance(r, te_table.Applied)):
        where.setdefault(r.where, {})[r.given.get("scaling", "delayed")] = None
    why = [refusal(c) for c in cells if isinstance(c, Refused)] + [
        te_refusal(r) for r in rows if isinstance(r, te_table.Refused)
    ]
    applied = [
        (f"{text} ({', '.join(scalings)})" if key.startswith("fp8.") else text)
        for text, scalings in where.items()
    ]
    return [("applied", text) for text in applied] + [
        ("refused", line) for line in dict.fromkeys(line.partition("; ")[0] for line in why)
    ]


def summary(key: str, backend: str) -> str:
    """yes, no, or both: it depends on the value or on what stands beside it."""
    return " ".join(
        dict.fromkeys({"applied": "yes", "refused": "no"}[what] for what, _ in lines(key, backend))
    )


def text() -> str:
    """The table at 80 columns: a line for each key, then its cells."""
    out = [
        table(
            ["applied or refused", *BACKENDS],
            [[key, *(summary(key, b) for b in BACKENDS)] for key in keys()],
        )
    ]
    for key in keys():
        out.append(f"\n{key}")
        out += [
            wrapped(said, f"  {backend:8} {what:8} ", " " * 20)
            for backend in BACKENDS
            for what, said in lines(key, backend)
        ]
    return "\n".join(out)


def markdown() -> str:
    """The table for a page: a row for each key, a column for each backend."""

    def cell(key: str, backend: str) -> str:
        return "<br>".join(
            f"{what}: {said}".replace("|", "\\|") for what, said in lines(key, backend)
        )

    rows = [f"| `{key}` | {' | '.join(cell(key, b) for b in BACKENDS)} |" for key in keys()]
    return "\n".join(
        [f"| key | {' | '.join(BACKENDS)} |", "| --- " * (len(BACKENDS) + 1) + "|", *rows]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true", help="for a page")
    print(markdown() if parser.parse_args().markdown else text())


if __name__ == "__main__":
    main()
