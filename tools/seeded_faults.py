"""Seeded faults: whether the tests find small changes of behaviour.

One run of the tests under coverage says which tests reach which lines. Then each fault of tools/seeded_faults.toml is put into a copy
of the tree, and the tests that reach its lines run there, quick ones first, to the first that fails. Prints for each fault the test
that found it and the seconds that took, and at the end how many were found and the branch coverage of fp8cfg/.

    python tools/seeded_faults.py --quick                      # by the tests of `make test` alone
    python tools/seeded_faults.py --fault files-not-synced tests/checkpoint/test_manifest.py
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGES = (20, 200, 500)
"""Tests of a fault that one pytest process runs; it imports only their files."""
RC = """\
[run]
branch = true
source_pkgs = fp8cfg
parallel = true
data_file = {folder}/coverage
context = ${{COVERAGE_TEST-}}
sigterm = true
patch = _exit
disable_warnings = no-data-collected,module-not-measured,module-not-imported,already-imported,no-sysmon,couldnt-parse,include-ignored,dynamic-conflict
"""


class Mistake(Exception):
    """What is wrong with the command line, the list of faults or the measured run: one line, exit code 2."""


@dataclass(frozen=True)
class Fault:
    """`replace` in the place of `find`, which stands once in `file`."""

    name: str
    room: str
    what: str
    file: str
    find: str
    replace: str

    def seeded(self, text: str) -> str:
        """The text of the file with the fault."""
        if (times := text.count(self.find)) != 1:
            raise Mistake(
                f"{self.name}: what it replaces stands {times} times in {self.file}, expected once"
            )
        return text.replace(self.find, self.replace)

    def lines(self, text: str) -> set[int]:
        """The lines that it changes, with the whole of each simple statement; empty where any is outside of functions, and so runs
        when the file is imported."""
        changed = difflib.SequenceMatcher(
            None, text.splitlines(), self.seeded(text).splitlines(), autojunk=False
        ).get_opcodes()
        touched = {
            line + 1
            for kind, a, b, _, _ in changed
            if kind != "equal"
            for line in range(a, max(b, a + 1))
        }
        nodes = list(ast.walk(ast.parse(text)))
        inside = {
            line
            for node in nodes
            if isinstance(node, ast.FunctionDef)
            for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
        }
        for node in nodes:
            if (
                isinstance(node, ast.stmt)
                and not hasattr(node, "body")
                and touched & (span := set(range(node.lineno, (node.end_lineno or 0) + 1)))
            ):
                touched |= span
        return touched if touched <= inside else set()


@dataclass(frozen=True)
class Measured:
    """A run of the tests under coverage: CPU seconds and contexts of each test that passed, and the contexts of each line."""

    seconds: dict[str, float]
    contexts: dict[str, set[str]]
    by_line: dict[str, dict[int, list[str]]]
    branch_coverage: float

    def reaching(self, fault: Fault, text: str) -> list[str]:
        """The tests that run the lines of `fault`, quick ones first."""
        lines, by_line = fault.lines(text), self.by_line.get(fault.file, {})
        found = {context for line in (lines or by_line) for context in by_line.get(line, ())} - {""}
        return sorted(
            (t for t, c in self.contexts.items() if t in self.seconds and c & found),
            key=lambda t: self.seconds[t],
        )


def read_faults(path: Path) -> list[Fault]:
    try:
        return [
            Fault(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
        ]
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as e:
        raise Mistake(f"{path}: is no list of faults ({e})") from None


def measure(folder: Path, tests: list[str], quick: bool, workers: int) -> None:
    """Run the tests under coverage, into `folder`."""
    (folder / "start").mkdir(parents=True, exist_ok=True)
    (folder / "start/sitecustomize.py").write_text(
        "import coverage\n\ncoverage.process_startup()\n", encoding="utf-8"
    )
    (folder / "coveragerc").write_text(RC.format(folder=folder), encoding="utf-8")
    env = environment(quick, folder / "start", ROOT) | {
        "COVERAGE_TESTS_FOLDER": str(folder),
        "COVERAGE_TEST": "",
        "COVERAGE_PROCESS_START": str(folder / "coveragerc"),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.support.coverage_contexts",
        "-n",
        str(workers),
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        *tests,
    ]
    done = subprocess.run([*command, *(["-m", "not slow"] if quick else [])], cwd=ROOT, env=env)
    if done.returncode not in (0, 1):
        raise Mistake(f"pytest ended with exit code {done.returncode}")
    combine(folder)


def combine(folder: Path) -> None:
    import coverage

    data = coverage.Coverage(
        data_file=str(folder / "coverage"), config_file=str(folder / "coveragerc")
    )
    data.combine(keep=False)
    data.save()


def read_measured(folder: Path) -> Measured:
    import coverage

    if not (folder / "coverage").exists():
        raise Mistake(f"{folder}: holds no measured run")
    cover = coverage.Coverage(
        data_file=str(folder / "coverage"), config_file=str(folder / "coveragerc")
    )
    cover.load()
    data = cover.get_data()
    package = str(ROOT / "fp8cfg")  # tests make copies of it elsewhere
    by_line = {
        os.path.relpath(name, ROOT): data.contexts_by_lineno(name)
        for name in data.measured_files()
        if name.startswith(package)
    }
    contexts = {
        test: set(named)
        for file in folder.glob("tests-*.json")
        for test, named in json.loads(file.read_text()).items()
    }
    failed = {
        line for file in folder.glob("failed-*.txt") for line in file.read_text().splitlines()
    }
    rows = [
        line.split("\t", 1)
        for file in folder.glob("seconds-*.tsv")
        for line in file.read_text().splitlines()
    ]
    if failed:
        print(f"left out, failing without a fault: {', '.join(sorted(failed))}")
    return Measured(
        {test: float(s) for s, test in rows if test not in failed},
        contexts,
        by_line,
        cover.report(include=[f"{package}/*"], file=io.StringIO()),
    )


def environment(quick: bool, *path: Path) -> dict[str, str]:
    """Of pytest: `path` before what is installed, the same examples in every run, all of them but for `quick`."""
    here = {"PYTHONPATH": os.pathsep.join(map(str, path)), "CI": "1"} | (
        {} if quick else {"FP8CFG_ALL_EXAMPLES": "1"}
    )
    return {k: v for k, v in os.environ.items() if k != "FP8CFG_ALL_EXAMPLES"} | here


def copy_tree(to: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split("\0"):
        if name and ((ROOT / name).is_symlink() or (ROOT / name).is_file()):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(
        f"{file.stem}.*.pyc"
    ):  # of the same second and size it would be taken for new
        compiled.unlink()


def find(fault: Fault, tests: list[str], tree: Path, quick: bool, limit: float) -> str:
    """The line about `fault`, whose `tests` run in `tree`."""
    file, began = tree / fault.file, time.monotonic()
    text = file.read_text(encoding="utf-8")
    write(file, fault.seeded(text))
    try:
        found = first_failure(tests, tree, quick, limit)
    finally:
        write(file, text)
    seconds = time.monotonic() - began
    said = (
        f"found by {found}"
        if found
        else f"NOT FOUND by {len(tests)} tests that reach it"
        if tests
        else "NOT FOUND, no test reaches it"
    )
    return f"{fault.room:12}{fault.name:30}{seconds:7.1f} s  {said}"


def first_failure(tests: list[str], tree: Path, quick: bool, limit: float) -> str:
    """The first of `tests` that fails, or an empty string."""
    left, ends = list(tests), time.monotonic() + limit
    while left:
        size = next((n for n in STAGES if len(tests) - len(left) < n), STAGES[-1])
        stage, left = left[:size], left[size:]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-rfE",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            *stage,
        ]
        try:
            done = subprocess.run(
                command,
                cwd=tree,
                env=environment(quick, tree),
                capture_output=True,
                text=True,
                timeout=ends - time.monotonic(),
            )
        except (subprocess.TimeoutExpired, ValueError):
            return ""
        if done.returncode:
            said = [
                line.partition(" ")[2]
                for line in done.stdout.splitlines()
                if line.startswith(("FAILED ", "ERROR "))
            ]
            return next(
                (
                    test
                    for line in said
                    for test in sorted(stage, key=len, reverse=True)
                    if line.startswith(test)
                ),
                said[0] if said else f"exit code {done.returncode}",
            )
    return ""


def chosen(args: argparse.Namespace) -> list[Fault]:
    faults = read_faults(args.faults)
    for what, given, known in (
        ("fault", args.fault, {f.name for f in faults}),
        ("room", args.room, {f.room for f in faults}),
    ):
        if wrong := set(given) - known:
            near = difflib.get_close_matches(min(wrong), known, 1)
            raise Mistake(
                f"--{what} {min(wrong)}: no such {what}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    return [
        f
        for f in faults
        if (not args.fault or f.name in args.fault) and (not args.room or f.room in args.room)
    ]


def run(args: argparse.Namespace) -> int:
    faults = chosen(args)
    for path in args.tests:
        if not (ROOT / path.partition("::")[0]).exists():
            raise Mistake(f"{path}: no such file or folder of tests")
    try:
        texts = {f.name: (ROOT / f.file).read_text(encoding="utf-8") for f in faults}
    except OSError as e:
        raise Mistake(f"{args.faults}: {e.filename}: {e.strerror}") from None
    for f in faults:
        f.seeded(texts[f.name])
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.measured.resolve() if args.measured else Path(temporary, "measured")
        if not (folder / "coverage").exists():
            measure(folder, args.tests, args.quick, args.workers)
        measured = read_measured(folder)
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(args.workers):
            copy_tree(Path(temporary, f"tree{number}"))
            trees.put(Path(temporary, f"tree{number}"))

        def one(fault: Fault) -> str:
            tree = trees.get()
            try:
                return find(
                    fault, measured.reaching(fault, texts[fault.name]), tree, args.quick, args.limit
                )
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(args.workers) as pool:
            lines = []
            for line in pool.map(one, faults):
                print(line, flush=True)
                lines.append(line)
    found = sum("NOT FOUND" not in line for line in lines)
    print(
        f"found {found} of {len(faults)} faults; branch coverage of fp8cfg/ {measured.branch_coverage:.2f} %"
    )
    return 0 if found == len(faults) else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", help="files or folders of tests, by default all")
    parser.add_argument("--quick", action="store_true", help="only the tests of `make test`")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME",
        help="only this fault; may be repeated",
    )
    parser.add_argument(
        "--room",
        action="append",
        default=[],
        metavar="NAME",
        help="only the faults of this room; may be repeated",
    )
    parser.add_argument(
        "--faults",
        type=Path,
        default=ROOT / "tools/seeded_faults.toml",
        metavar="FILE",
        help="another list of faults",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FOLDER",
        help="keep the measured run here, or take the one that is here",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=1800,
        metavar="SECONDS",
        help="for the tests of one fault, by default 1800",
    )
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="processes at a time, by default 2"
    )
    try:
        return run(parser.parse_args(argv))
    except Mistake as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
