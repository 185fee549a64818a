"""The helpers of the tests themselves: pairs of parameters, and what slow.toml leaves to `make test-all`."""

from __future__ import annotations

import tomllib
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.support.pairs import pairwise


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (5, 3, 2, 2), (3, 3, 3, 3), (2,) * 7], ids=str)
def test_every_pair_of_values_is_in_a_case(sizes: tuple[int, ...]) -> None:
    cases = pairwise(*map(range, sizes))
    assert len(cases) == len(set(cases)) <= max(15, len(list(product(*map(range, sizes)))) / 4)
    for (i, first), (j, second) in combinations(enumerate(sizes), 2):
        assert {(case[i], case[j]) for case in cases} == set(product(range(first), range(second)))


def test_slow_tests_are_listed_by_files_that_there_are() -> None:
    listed = tomllib.loads(Path(__file__).with_name("slow.toml").read_text(encoding="utf-8"))
    assert listed and [*listed] == sorted(listed)
    for file, tests in listed.items():
        text = (
            Path(__file__)
            .with_name(file.split("/")[0])
            .joinpath(*file.split("/")[1:])
            .read_text(encoding="utf-8")
        )
        assert [name for name in tests if f"def {name}(" not in text] == []
