"""Each key has an example with a valid value other than the default."""

from __future__ import annotations

import pytest

import fp8cfg
from fp8cfg.composition.recipe_yaml import is_node
from fp8cfg.report.key_examples import VALUES, example
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.recipe import fields, short

KEYS = [key for key in fields() if not is_node(key)]


@pytest.mark.parametrize("key", KEYS)
def test_the_command_line_takes_the_example(key: str) -> None:
    word = example(key)
    assert word is not None, "add a value to VALUES in fp8cfg/report/key_examples.py"
    assert word.startswith(f"{short(key)}=")
    try:
        recipe = fp8cfg.compose([word])
    except ConfigError as error:
        # Alone, many keys have no effect or need another key. The value itself must be valid.
        wrong = ("expected", "no such", "at least", "at most", "choose from")
        assert not any(word in line for word in wrong for line in error.problems), error
    else:
        assert recipe != fp8cfg.compose([]), "the example is the default"


def test_no_example_is_left_over() -> None:
    assert set(VALUES) <= {short(key) for key in KEYS}
