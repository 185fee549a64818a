"""Command-line arguments: where options end."""

from __future__ import annotations

import pytest

from fp8cfg.__main__ import main
from fp8cfg.cli.argv import split


def test_after_two_dashes_nothing_is_an_option() -> None:
    found = split(["a", "--json", "--", "--json", "-x", "k=v", "--", "-"], (), ("--json",))
    assert (found.flags, found.plain, found.words) == (
        {"--json"},
        ["a", "--json", "-x", "--", "-"],
        ["k=v"],
    )


def test_words_stand_on_either_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "recipe=llama_tiny", "--", "trainer.max_steps=50"]) == 0
    assert main(["check", "recipe=llama_tiny", "--", "--json"]) == 2
    assert capsys.readouterr().err.startswith("error: --json: no")
