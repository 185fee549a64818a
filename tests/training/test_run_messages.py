"""Messages of a run: levels, the logger `fp8cfg`, and the header with and without tables."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.schema import messages
from tests.support.small import small, small_words

WORDS = [
    "precision=bf16_fp8",
    "trainer.max_steps=2",
    "optim.warmup_steps=1",
    "trainer.val_check_interval=0",
    "trainer.compile=off",
]


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("fp8cfg")
    yield logger
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()


def train(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> list[str]:
    assert main(["train", *small_words(*WORDS), *words, f"log.folder={folder}"]) == 0
    return capsys.readouterr().out.splitlines()


def test_verbose_prints_the_planned_and_the_observed_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train(capsys, tmp_path / "plain")
    assert plain[0] == f"run folder: {tmp_path / 'plain'}"
    assert next(n for n, line in enumerate(plain) if line.startswith("FP8: ")) <= 15
    verbose = train(capsys, tmp_path / "verbose", "--verbose")
    text = "\n".join(verbose)
    tables = ("planned coverage", "memory per rank", "coverage, observed in the first step")
    assert all(table in text for table in tables)
    assert not any(table in "\n".join(plain) for table in tables)
    run = fp8cfg.RunFolder.open(tmp_path / "verbose", lock=False)
    assert run.read_recipe().log.level == "debug"


def test_levels_hide_the_messages_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(capsys, tmp_path / "error", "log.level=error") == []
    said: list[str] = []
    recipe = small(*WORDS, "log.level=warning", f"log.folder={tmp_path / 'python'}")
    fp8cfg.fit(fp8cfg.build(recipe), say=said.append)
    assert all(text.startswith("warning: ") for text in said)


def test_a_configured_logger_gets_the_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logger: logging.Logger
) -> None:
    """Python's own logging is the other side: its formatter and its levels."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    recipe = small(*WORDS, f"log.folder={tmp_path / 'run'}")
    fp8cfg.fit(fp8cfg.build(recipe))
    assert capsys.readouterr().out == ""
    lines = stream.getvalue().splitlines()
    assert f"INFO run folder: {tmp_path / 'run'}" in lines
    assert any(line.startswith("INFO step 2/2  loss ") for line in lines)


def test_a_level_of_the_logger_is_enough(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    logger: logging.Logger,
) -> None:
    messages.say("step 1")
    assert capsys.readouterr().out == "step 1\n"
    logger.setLevel(logging.WARNING)
    messages.say("step 2")
    messages.say("warning: step 3")
    assert capsys.readouterr().out == ""
    assert caplog.messages == ["warning: step 3"]


def test_a_terminal_has_colors_and_NO_COLOR_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = "run folder: runs/a\nwarning: step 5: " + "word " * 40
    colored = messages.colored(text, Terminal())
    assert "\x1b[1mrun folder:\x1b[0m runs/a\n\x1b[33mwarning:\x1b[0m" in colored
    assert colored.endswith("word " * 40), "not wrapped or cut again"
    assert messages.colored(text, io.StringIO()) == text
    monkeypatch.setenv("NO_COLOR", "1")
    assert messages.colored(text, Terminal()) == text
