"""Coverage contexts: pytest plugin of tools/seeded_faults.py for coverage by test, subprocesses and ranks included, and CPU time.

A test's context is its id; what a fixture of wider scope runs has a context of its own, and counts for all tests that use the fixture.
Processes that a test starts take its context from COVERAGE_TEST. COVERAGE_TESTS_FOLDER receives tests-*.json (the contexts of each
test), seconds-*.tsv and failed-*.txt.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER, TEST = "COVERAGE_TESTS_FOLDER", "COVERAGE_TEST"


def _switch(context: str) -> None:
    import coverage

    if (measuring := coverage.Coverage.current()) is not None:
        measuring.switch_context(context)
    os.environ[TEST] = context


def _context(fixture: Any) -> str:
    return f"fixture {fixture.argname} of {fixture.baseid}"


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def pytest_collection_finish(session: pytest.Session) -> None:
    rows = {}
    for item in session.items:
        fixtures = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        rows[item.nodeid] = [
            item.nodeid,
            *(_context(f) for found in fixtures.values() for f in found if f.scope != "function"),
        ]
    Path(os.environ[FOLDER], f"tests-{os.getpid()}.json").write_text(
        json.dumps(rows), encoding="utf-8"
    )


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    before = os.environ.get(TEST, "")
    _switch(_context(fixturedef))
    try:
        return (yield)
    finally:
        _switch(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _switch(item.nodeid)
    began = _cpu_seconds()
    try:
        return (yield)
    finally:
        with Path(os.environ[FOLDER], f"seconds-{os.getpid()}.tsv").open(
            "a", encoding="utf-8"
        ) as file:
            file.write(f"{_cpu_seconds() - began:.3f}\t{item.nodeid}\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        with Path(os.environ[FOLDER], f"failed-{os.getpid()}.txt").open(
            "a", encoding="utf-8"
        ) as file:
            file.write(f"{report.nodeid}\n")
