"""Hydra's own flags on our config tree."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.composition.recipe_yaml import listed
from tests.support.hydra_plugins import offered

FP8 = ["recipe=llama_8b", "precision=bf16_fp8", "fp8.margin=1"]


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    before = list(logging.root.handlers), logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = before


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_cfg_job_is_the_composed_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    want = listed(fp8cfg.compose(FP8))
    for flags in (
        ["--cfg", "job"],
        ["--cfg=job"],
        ["-c", "job"],
        ["--cfg", "job", "--resolve"],
        ["--cfg", "job", "-p", "_global_"],
    ):
        assert yaml.safe_load(printed(capsys, *FP8, *flags)) == want
    assert printed(capsys, "train", "--cfg", "job", *FP8) == printed(capsys, *FP8, "--cfg", "job")


def test_cfg_has_what_gave_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainer.max_steps=5", "--cfg", "job", "-p", "optim.warmup_steps"]) == 0
    out = capsys.readouterr()
    assert (out.out.strip(), out.err) == (
        "5",
        "note: optim.warmup_steps 20 -> 5: the recipe's value is changed to fit trainer.max_steps=5\n",
    )


def test_a_package_is_named_as_keys_are(capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("fp8", "precision.fp8", "trainer.plugins.fp8"):
        text = printed(capsys, *FP8, "--cfg", "job", "--package", key)
        assert (
            text.startswith("# @package trainer.plugins.fp8\n")
            and yaml.safe_load(text)["margin"] == 1
        )
    assert printed(capsys, *FP8, "--cfg", "job", "-p", "fp8.margin") == "1\n"


def test_cfg_hydra_takes_hydra_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert yaml.safe_load(printed(capsys, "--cfg", "hydra", "-p", "hydra.sweep")) == {
        "dir": "runs/sweep-${now:%Y%m%d-%H%M%S}",
        "subdir": "${hydra.job.num}",
    }
    assert (
        yaml.safe_load(
            printed(
                capsys, "--cfg", "hydra", "-p", "hydra.sweep", "hydra.sweep.dir=there", "log.dir=x"
            )
        )["dir"]
        == "there"
    )
    both = yaml.safe_load(printed(capsys, "--cfg", "all", "--resolve", "log.dir=x"))
    assert both["log"]["dir"] == "x" and both["hydra"]["run"]["dir"].startswith("x/llama_tiny-2")


@pytest.mark.parametrize(
    ("info", "parts"),
    [
        (
            "defaults",
            [
                "Defaults List",
                "| recipe/llama_8b",
                "| precision/bf16_fp8          | trainer.plugins     | False  | fp8cfg_config |",
            ],
        ),
        (
            "defaults-tree",
            ["Defaults Tree", "    recipe: llama_8b", "    precision: bf16_fp8", "    data: null"],
        ),
        ("searchpath", ["Config search path", "| hydra    | pkg://hydra.conf |"]),
        ("plugins", ["Installed Hydra Plugins", "BasicSweeper", "BasicLauncher"]),
        (
            "config",
            ["Config search path", "Defaults List", "\nname: llama_8b\n", "    margin: 1\n"],
        ),
    ],
)
def test_info(info: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *FP8, "--info", info)
    for part in parts:
        assert part.strip("\n") in out, part


@pytest.mark.parametrize("argv", [["--info"], ["-i", *FP8], ["--info", "all"]])
def test_info_alone_is_all(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *argv)
    assert "Hydra 1.3" in out and "Installed Hydra Plugins" in out and "Defaults List" in out


def test_hydra_help_names_the_flags_that_work_here() -> None:
    """In a process of its own, since Hydra sets up logging for it, over pytest's."""
    done = subprocess.run(
        [sys.executable, "-m", "fp8cfg", "--hydra-help", *FP8],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    out = done.stdout
    assert "--cfg,-c : " in out and "hydra/launcher: basic" in out and "--config-path" not in out


def test_a_recipe_file_and_a_folder_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "mine.yaml").write_text(
        "compute: bf16\nfp8: {enabled: true, margin: 3}\n"
    )
    (tmp_path / "my.yaml").write_text("recipe: llama_1b\nname: my\n")
    argv = [str(tmp_path / "my.yaml"), "--config-dir", str(tmp_path), "precision=mine"]
    job = yaml.safe_load(printed(capsys, *argv, "--cfg", "job"))
    assert job["name"] == "my" and job["trainer"]["plugins"]["fp8"]["margin"] == 3
    assert "precision: mine" in printed(capsys, *argv, "-i", "defaults-tree")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--cfg jb", "--cfg jb: not an option; did you mean 'job'?"),
        ("--info defalts", "--info defalts: not an option; did you mean 'defaults'?"),
        ("--cfg job --info", "--cfg and --info: one at a time"),
        ("-m --cfg job", "--multirun and --cfg: one at a time"),
        ("--cfg job --cfg all", "--cfg: given 2 times"),
        ("--resolve", "--resolve: does nothing without --cfg"),
        ("-p fp8", "--package: does nothing without --cfg"),
        ("--cfg job -p fp9", "--package fp9: no such key; did you mean 'fp8'?"),
        (
            "--cfg job fp8.margin=0,1",
            "fp8.margin=0,1: several values are a sweep, but a run takes one; run fp8cfg sweep fp8.margin=0,1",
        ),
        (
            "--cfg job fp8.margin=1",
            "fp8.margin=1: has no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true",
        ),
        ("--cfg job hydra.nothing=1", "Could not override 'hydra.nothing'."),
        (
            "--cfg job hydra/launcher=nothing",
            f"In 'hydra/config': Could not find 'hydra/launcher/nothing'; choose from {offered('hydra/launcher')}",
        ),
        (
            "--cfg job hydra/sweeper=ax",
            f"In 'hydra/config': Could not find 'hydra/sweeper/ax'; choose from {offered('hydra/sweeper')}; pip install hydra-ax-sweeper",
        ),
        (
            "--info hydra.searchpath=[/tmp]",
            "hydra.searchpath=[/tmp]: not accepted; pass your presets as --config-dir FOLDER",
        ),
    ],
)
def test_mistakes(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {line}"]


def test_other_ranks_print_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert printed(capsys, "--cfg", "job") == ""
