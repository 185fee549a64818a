"""What used to be a traceback, a hang or raw bytes on a terminal is one line."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.building import builder
from fp8cfg.cli import launch_run
from fp8cfg.schema import recipe_registry
from fp8cfg.schema.errors import ConfigError, report_error
from tests.support.small import SMALL, small

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nframe #0"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        SystemError("<function f at 0x7f79520b1f80> returned NULL without setting an exception"),
        SystemError("error return without exception set"),
    ],
    ids=str,
)
def test_no_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> int:
        raise error

    monkeypatch.setattr(launch_run, "launch", fails)
    assert main([*SMALL]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory") and err.count("\n") == 1 and "frame" not in err


def test_other_errors_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> int:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(launch_run, "launch", fails)
    with pytest.raises(RuntimeError, match="shapes"):
        main([*SMALL])


def test_a_bug_of_a_library_is_not_taken_for_it() -> None:
    text = "<built-in function f> returned NULL without setting an exception"
    assert report_error(SystemError(text)) is None


@pytest.mark.slow
def test_a_limit_on_memory_is_one_line(tmp_path: Path) -> None:
    # Address space: the libraries take about 1.3 GiB of it. The first weight of the MLP takes 2 GiB,
    # so its allocation fails while enough memory is left for the message.
    limit = 5 * 2**29  # 2.5 GiB
    words = [
        *SMALL,
        "precision=fp32",
        "model.num_layers=1",
        "model.hidden_size=4096",
        "model.ffn_hidden_size=65536",
        "data.tokenizer=bytes",
        f"log.dir={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "fp8cfg", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert (
        done.returncode == 1
        and done.stderr.splitlines()[-1].startswith("error: out of memory")
        and "Traceback" not in done.stderr
    )


def test_a_pipe_in_a_folder_of_presets_is_no_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for group in ("recipe", "precision", "data"):
        (tmp_path / group).mkdir()
        os.mkfifo(tmp_path / group / "pipe.yaml")
    (tmp_path / "recipe" / "mine.yaml").write_text("# of mine\nrecipe: llama_tiny\n")
    assert main(["list", "--config-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "  mine" in out and "  pipe" not in out
    assert main(["check", "precision=pipe", "--config-dir", str(tmp_path)]) == 2
    os.mkfifo(tmp_path / "given.yaml")
    assert main(["check", str(tmp_path / "given.yaml")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert (
        "precision=pipe: no such precision preset" in first
        and "given.yaml: is no file; expected a file" in second
    )


@pytest.mark.parametrize(
    "word",
    [
        "trainer.max_steps={}",
        "optim.lr={}",
        "name={}",
        "trainer={{max_steps: {}}}",
        "fp8.exclude=[{}]",
    ],
)
def test_a_number_of_many_digits_is_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", word.format("9" * 5000)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 200


class Broken:
    name, group, value, dist = (
        "theirs",
        "fp8cfg.recipes",
        "other.package:recipes",
        SimpleNamespace(name="other-package"),
    )

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def load(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", ""),
        ("WORLD_SIZE", "two"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("RANK", "-1"),
        ("LOCAL_RANK", "²"),
    ],
)
def test_a_variable_of_torchrun_that_is_no_number_is_one_line(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["check"]) == 2
    says = f"{name}={value}: torchrun sets this environment variable to a number of ranks, or of one; unset it"
    assert capsys.readouterr().err.endswith(f"error: {says}\n")
    monkeypatch.setenv(name, "1")
    assert main(["check"]) == 0


@pytest.mark.filterwarnings("always::fp8cfg.schema.errors.PackageWarning")
@pytest.mark.parametrize(
    "error", [ImportError("No module named 'gone'\nmore"), SystemExit(3), RuntimeError()], ids=repr
)
def test_a_broken_entry_point_of_another_package_breaks_nothing(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **of: (Broken(error),) if of == {"group": "fp8cfg.recipes"} else real(**of),
    )
    recipe_registry._import_recipes.cache_clear()
    try:
        assert main(["list", "recipe"]) == 0
        out, err = capsys.readouterr()
        assert (
            "llama_8b" in out
            and err.startswith(
                "warning: package other-package: its entry point theirs of fp8cfg.recipes cannot be loaded ("
            )
            and err.count("\n") == 1
        )
        assert main(["check", "recipe=llama_tiny"]) == 0
        assert main(["check", "recipe=theirs"]) == 2
        assert "no such recipe" in capsys.readouterr().err
    finally:
        recipe_registry._import_recipes.cache_clear()


def test_a_folder_for_runs_is_printed_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its run; and where a stranger's recipe has it and it differs from mine."""
    from fp8cfg.training import loop, runs

    monkeypatch.setattr(runs, "train_job", lambda *_, **__: loop.Result(1, None, None))
    hostile = f"{tmp_path}/\x1b]0;owned\x07\nrm"
    recipe = small(f"log.dir={tmp_path}")
    recipe.log.dir = hostile
    assert launch_run.launch(recipe, lambda: _folder(recipe), None) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "\x07" not in out + err and "\\x1b]0;owned\\x07\\nrm" in out
    (run,) = Path(hostile).iterdir()
    assert main(["rerun", str(run), f"log.dir={tmp_path}"]) == 0
    out, err = capsys.readouterr()
    assert "changed: log.dir: " in " ".join(out.split()) and "owned" in out
    assert "\x1b" not in out + err


def _folder(recipe: fp8cfg.Recipe) -> Any:
    from datetime import datetime

    from fp8cfg.composition import to_yaml
    from fp8cfg.run_folder.run_folder import RunFolder

    return RunFolder.create(Path(recipe.log.dir), recipe.name, datetime.now(), to_yaml(recipe))


@pytest.mark.parametrize("verb", ["train", "check"])
def test_a_working_directory_that_is_gone_is_one_line(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main([verb, "recipe=llama_tiny"]) == 2
    assert (
        capsys.readouterr().err
        == "error: the working directory was deleted; cd to another folder\n"
    )


def test_a_cache_that_cannot_be_made_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/x")
    assert report_error(FileNotFoundError(2, "No such file or directory", "/proc/x")) == 2
    assert report_error(FileNotFoundError(2, "No such file or directory", "/proc/y")) is None
    assert capsys.readouterr().err.startswith(
        "error: TORCHINDUCTOR_CACHE_DIR=/proc/x: cannot be created (No such file"
    )


def test_python_without_docstrings_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=2))
    with pytest.raises(
        ConfigError, match=r"^PYTHONOPTIMIZE=2 \(python -OO\): it removes the docstrings"
    ):
        builder.import_graph()


def test_a_path_without_permission_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """In any verb, such as an unreadable page at --output of report."""
    assert report_error(PermissionError(13, "Permission denied", "locked/page.html")) == 2
    assert capsys.readouterr().err == "error: locked/page.html: Permission denied\n"
    assert report_error(PermissionError(1, "Operation not permitted")) is None
