#!/usr/bin/env python3
"""Signatures of Transformer Engine's compiled part, read from the source of its Python binding, as a stub file for tests.

    pip download --no-deps --no-binary :all: transformer_engine_torch==2.20.2    # or the file from the package index; unpack it
    python tools/make_te_signatures.py transformer_engine_torch-2.20.2 > tests/support/te_extension.pyi

Names, order and defaults are those of csrc/extensions/pybind.cpp. Functions that it binds without names of arguments take them by
position alone: theirs are the C++ ones, of csrc/extensions.h.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path

DEFAULTS = {
    "py::none()": "None",
    "std::nullopt": "None",
    "nullptr": "None",
    "true": "True",
    "false": "False",
    "at::kByte": "...",
}


def split(text: str) -> list[str]:
    """The arguments of a call or a declaration: commas outside of brackets and strings."""
    found, depth, quoted, start = [], 0, False, 0
    for i, c in enumerate(text):
        quoted ^= c == '"' and text[i - 1] != "\\"
        depth += 0 if quoted else (c in "(<{[") - (c in ")>}]")
        if c == "," and depth == 0 and not quoted:
            found.append(text[start:i].strip())
            start = i + 1
    return [*found, text[start:].strip()] if text.strip() else []


def balanced(text: str, start: int) -> str:
    """What stands in the bracket that opens at `start`."""
    depth, quoted = 0, False
    for i in range(start, len(text)):
        quoted ^= text[i] == '"' and text[i - 1] != "\\"
        depth += 0 if quoted else (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return text[start + 1 : i]
    raise ValueError("a bracket that does not close")


def default(text: str) -> str:
    """A default of C++ as one of Python; ... for what has no literal."""
    text = text.strip()
    if text in DEFAULTS:
        return DEFAULTS[text]
    number = re.fullmatch(r"(-?\d+(?:\.\d*)?)f?", text)
    return number[1] if number else "..."


def declared(function: str, headers: str) -> str:
    """The names of the parameters in the declaration of a C++ function, by position alone."""
    found = re.search(rf"\b{re.escape(function)}\(", headers)
    if found is None:
        return "*args"
    words = [
        re.findall(r"\w+", parameter.partition("=")[0])
        for parameter in split(balanced(headers, found.end() - 1))
    ]
    names = [each[-1] if len(each) > 1 else f"arg{i}" for i, each in enumerate(words)]
    return (
        ", ".join([*(f"{name}_" if keyword.iskeyword(name) else name for name in names), "/"])
        if names
        else ""
    )


def in_order(parameters: list[str]) -> str:
    """Python has no parameter without a default after one with; where C++ binds such, it gets `...` for one."""
    first = next((i for i, parameter in enumerate(parameters) if "=" in parameter), len(parameters))
    return ", ".join(p if i < first or "=" in p else f"{p}=..." for i, p in enumerate(parameters))


def signatures(folder: Path) -> dict[str, str]:
    """The parameters of each bound function, as Python writes them."""
    bindings = "\n".join(
        p.read_text(encoding="utf-8") for p in sorted((folder / "csrc").rglob("*.cpp"))
    )
    headers = "\n".join(
        p.read_text(encoding="utf-8")
        for p in [folder / "csrc/extensions.h", *sorted((folder / "common_headers").rglob("*.h"))]
    )
    headers = re.sub(r"/\*.*?\*/|//[^\n]*", "", headers, flags=re.DOTALL)
    found = {}
    for at in re.finditer(r"\bm\.def\(", bindings):
        name, function, *rest = split(balanced(bindings, at.end() - 1))
        named = []
        for text in rest:
            if argument := re.match(r'py::arg\("(\w+)"\)(?:\s*=\s*(.*))?$', text, re.DOTALL):
                named.append(
                    argument[1] if argument[2] is None else f"{argument[1]}={default(argument[2])}"
                )
        found[name.strip('"')] = (
            in_order(named) if named else declared(function.lstrip("&").split("::")[-1], headers)
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked source of transformer_engine_torch")
    folder = parser.parse_args().folder
    try:
        version = re.search(
            r"^Version: (\S+)", (folder / "PKG-INFO").read_text(encoding="utf-8"), re.MULTILINE
        )
        found = signatures(folder)
    except OSError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(
        f"# Written by tools/make_te_signatures.py from csrc/extensions/pybind.cpp of transformer_engine_torch {version[1] if version else ''}"
    )
    print("\n".join(f"def {name}({parameters}): ..." for name, parameters in sorted(found.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
