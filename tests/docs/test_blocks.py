"""Every block of code in README.md, CONTRIBUTING.md and docs/ is executed: see CONTRIBUTING.md, Tests, for what each kind is put through."""

from __future__ import annotations

import copy
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

import fp8cfg
from fp8cfg.__main__ import main
from tests.support.doc_blocks import (
    INFOS,
    OWN_TESTS,
    PAGES,
    RUN,
    Block,
    Command,
    blocks,
    commands,
    matches,
    run,
    short_runs,
)
from tests.support.verbs import ROOT

SLOW = {"docs/guides/sweeps.md", "docs/guides/executors.md"}
"""Pages whose blocks train several times over, or start processes of their own."""


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of llama_tiny in FP8, two steps long."""
    folder = tmp_path_factory.mktemp("runs")
    with short_runs():
        assert main(["recipe=llama_tiny", "precision=bf16_fp8", f"log.dir={folder}"]) == 0
    return next(folder.iterdir())


def pages() -> list[Any]:
    names = [(page, str(page.relative_to(ROOT))) for page in PAGES if blocks(page)]
    return [
        pytest.param(page, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for page, name in names
        if name not in OWN_TESTS
    ]


@pytest.mark.parametrize("page", pages())
@pytest.mark.filterwarnings("ignore:this process .* is multi-threaded:DeprecationWarning")
def test_blocks_of_a_page_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    Plugins.instance()  # stores Hydra's own once in a process: not into what is undone
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))  # a page stores its own
    scope: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if (
            RUN in block.text
        ):  # each time anew: a process that goes on after a refusal has the old one locked
            shutil.rmtree(tmp_path / RUN, ignore_errors=True)
            shutil.copytree(request.getfixturevalue("a_run"), tmp_path / RUN)
        if block.info == "python":
            with short_runs():
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), scope)
        elif block.info == "yaml":
            compose_yaml(block)
        elif block.info == "console":
            for command in commands(block):
                check_command(block, command, capsys)
        elif block.info == "text":
            check_words_of_text(block, capsys)


def compose_yaml(block: Block) -> None:
    """Write the recipe to the file that its first line names, and compose it."""
    named = re.match(r"# (\S+\.yaml)\n", block.text)
    assert named, f"{block}: its first line names no file"
    file = Path(named[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(block.text, encoding="utf-8")
    fp8cfg.from_yaml(file)


def check_command(block: Block, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = command.words
    if program == "fp8cfg":
        code, printed = run(words, capsys, command.shown)
        assert code == (2 if re.search(r"^error: ", command.shown, re.MULTILINE) else 0), (
            f"{block}: {printed}"
        )
        assert not command.shown or matches(command.shown, printed), (
            f"{block}: {' '.join(words)} prints\n{printed}"
        )
    elif program == "torchrun":
        checked(block, words[words.index("fp8cfg") + 1 :], capsys)
    elif program == "make":
        assert re.search(
            rf"^{words[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        ), f"{block}: make {words[0]}"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        assert words[0] == "install" and (
            words[1] == "." or words[1].removeprefix(".[").removesuffix("]") in extras
        ), str(block)
    elif program == "python":
        assert (ROOT / words[0]).is_file(), str(block)
    else:
        raise AssertionError(f"{block}: {program} is no program that this test knows")


def check_words_of_text(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Words of the commands in a block that is not run, those for Hydra aside; of several values the first."""
    if block.page.name == "cli.md":
        return  # help texts, held by test_reference.py
    for line in re.findall(r"^fp8cfg (.*)$", block.text, re.MULTILINE):
        words = [word for word in shlex.split(line) if not word.startswith(("-m", "hydra"))]
        if words[0] == "parity":  # its options are not those of `check`
            words = [word for word in words if re.match(r"[\w.]+=", word)]
        checked(
            block,
            [re.sub(r"^([\w.]+=)(?:interval\()?([\w.-]+),.*", r"\1\2", word) for word in words],
            capsys,
        )


def checked(block: Block, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = run(["check", *words], capsys)
    assert code == 0, f"{block}: {printed}"


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        if str(page.relative_to(ROOT)) in OWN_TESTS:
            continue
        for block in blocks(page):
            assert block.info in INFOS, (
                f"{block}: info string {block.info!r}, not one of {', '.join(INFOS)}"
            )
        assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page)), (
            f"{page}: a fence that is not closed, or indented"
        )


def test_a_page_with_a_test_of_its_own_is_read_by_it() -> None:
    for page, test in OWN_TESTS.items():
        if (ROOT / page).is_file():
            assert page.rpartition("/")[2] in (ROOT / test).read_text(encoding="utf-8"), (
                f"{test} does not read {page}"
            )


def test_what_is_shown_is_compared() -> None:
    assert (
        matches("a\n...\nd ... f\n", "a\nb\nc\nd e f\n")
        and matches("a\n...\nd\n", "a\nd\n")
        and matches("a  \n", "a\n")
    )
    assert (
        not matches("a\nd\n", "a\nb\nd\n")
        and not matches("a\n...\nd\n", "a\nb\n")
        and not matches("", "a\n")
    )
