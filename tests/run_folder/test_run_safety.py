"""What a run must not lose: other people's files, its folder, what its checkpoints hold."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.checkpoint import job_state
from fp8cfg.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.run_folder.files import RunFiles, StrangeFile
from fp8cfg.run_folder.metrics_file import read_metrics
from fp8cfg.run_folder.run_folder import RunFolder, RunFolderDeleted
from fp8cfg.schema.errors import printable
from fp8cfg.training.data import run_data
from tests.support import whole_checkpoints
from tests.support.short_runs import fit, saved


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps with checkpoints of steps 2 and 4, to copy."""
    return fit(tmp_path_factory.mktemp("whole")).path


@pytest.fixture
def mine(whole: Path, tmp_path: Path) -> Path:
    """A copy, in a folder whose name no terminal should see as it is."""
    return Path(shutil.copytree(whole, tmp_path / "a\x1b[31m\nb" / "run"))


# links


@pytest.mark.parametrize(
    "name",
    [
        "run.lock",
        "recipe.yaml",
        "metrics.jsonl",
        "fp8_stats.jsonl",
        "checkpoints",
        "checkpoints/step-00000004",
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_a_run_folder_is_refused_and_leads_nowhere(
    name: str, there: bool, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    folder = name.startswith("checkpoints")
    if there:
        shutil.move(mine / name, victim) if folder else victim.write_text("export A=1\n")
    before = (
        sorted(victim.rglob("*")) if folder and there else victim.read_text() if there else None
    )
    if (mine / name).exists():
        shutil.rmtree(mine / name) if folder else (mine / name).unlink()
    (mine / name).symlink_to(victim)
    if name.endswith("4"):  # the checkpoint before it is used, and that is reported
        assert main(["resume", str(mine), "trainer.max_steps=5"]) == 0
        out, err = capsys.readouterr()
        assert (
            f"skipped damaged checkpoint {printable(str(mine / name))}: is no file or folder but a link"
            in out + err
        )
        assert "from step-00000002" in out
        assert victim.exists() == there
        return
    assert main(["resume", str(mine), "trainer.max_steps=5"]) == 2
    out, err = capsys.readouterr()
    assert (
        f"{name}: is no file or folder but a link" in err
        and err.count("\n") == 1
        and "\x1b" not in out + err
    )
    assert (
        sorted(victim.rglob("*")) if folder and there else victim.read_text() if there else None
    ) == before
    assert victim.exists() == there


def test_what_a_run_replaces_is_replaced_and_not_followed(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names that were predictable, the file that is written after the first step, and second names of one file."""
    victims = {
        name: tmp_path / f"victim {name}"
        for name in ("metrics.jsonl.tmp", "coverage.json", "metrics.jsonl")
    }
    for name, victim in victims.items():
        victim.write_bytes(
            (mine / name).read_bytes() if (mine / name).exists() else b"export A=1\n"
        )
        (mine / name).unlink(missing_ok=True)
        os.link(victim, mine / name) if name == "metrics.jsonl" else (mine / name).symlink_to(
            victim
        )
    before = {name: victim.read_bytes() for name, victim in victims.items()}
    assert main(["resume", str(mine), "trainer.max_steps=5"]) == 0
    assert {name: victim.read_bytes() for name, victim in victims.items()} == before
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "resuming " in out and "a\\x1b[31m\\nb/run" in out
    assert [line["step"] for line in read_metrics(mine / "metrics.jsonl")] == [
        1,
        2,
        2,
        3,
        4,
        4,
        5,
        5,
    ]
    assert saved(mine) == ["step-00000004", "step-00000005"]


def test_a_lock_with_a_second_name_is_refused(mine: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("export A=1\n")
    (mine / "run.lock").unlink()
    os.link(tmp_path / "victim", mine / "run.lock")
    with pytest.raises(StrangeFile, match="a second name"):
        RunFolder.open(mine)
    assert (tmp_path / "victim").read_text() == "export A=1\n"


def test_files_are_opened_part_by_part_and_never_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_text("x")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "in" / "deep")
    os.mkfifo(tmp_path / "in" / "pipe")
    files = RunFiles.at(tmp_path / "in")
    assert files.read("deep/file") == b"x" and files.names() == ["deep", "link", "pipe"]
    assert [files.kind(n) for n in ("deep", "deep/file", "link", "pipe", "none")] == [
        "folder",
        "file",
        "strange",
        "strange",
        "",
    ]
    assert [files.kind(n) for n in ("link/file", "deep/file/x")] == ["strange", ""]
    for name in ("link/file", "link", "pipe"):
        with pytest.raises(StrangeFile, match=f"{tmp_path}/in/{name}: "):
            files.read(name)
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/in/deep/none"):
        files.open("deep/none")
    with pytest.raises(OSError, match="longer than 0 bytes"):
        files.read("deep/file", 0)
    (tmp_path / "in").rename(tmp_path / "out")
    files.replace("new", b"1")
    assert (
        files.path == tmp_path / "out"
        and (tmp_path / "out" / "new").read_bytes() == b"1"
        and files.exists
    )
    shutil.rmtree(tmp_path / "out")
    assert not files.exists
    with pytest.raises(FileNotFoundError):
        files.replace("new", b"1")
    with pytest.raises(FileNotFoundError):
        files.folder("sub", make=True)


# the folder


def test_a_run_follows_its_folder_where_it_is_renamed(tmp_path: Path) -> None:
    def say(text: str) -> None:
        if text.startswith("step 2: validation"):
            next((tmp_path / "runs").iterdir()).rename(tmp_path / "moved")

    folder = fit(tmp_path / "runs", say=say)
    assert folder.path == tmp_path / "moved" and not list((tmp_path / "runs").iterdir())
    assert saved(tmp_path / "moved") == ["step-00000002", "step-00000004"]
    assert [line["step"] for line in read_metrics(tmp_path / "moved" / "metrics.jsonl")] == [
        1,
        2,
        2,
        3,
        4,
        4,
    ]


@pytest.mark.parametrize("part", ["", "recipe.yaml"])
def test_a_run_whose_folder_is_deleted_ends_and_makes_none(part: str, tmp_path: Path) -> None:
    def say(text: str) -> None:
        if text.startswith("step 2: validation"):
            gone = next(tmp_path.iterdir()) / part
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()

    with pytest.raises(RunFolderDeleted, match="was deleted while") as e:
        fit(tmp_path, say=say)
    assert e.value.exit_code == 5
    assert (not part and not list(tmp_path.iterdir())) or (
        part and saved(next(tmp_path.iterdir())) == []
    )


# contents


STATES: list[Callable[[dict[str, Any]], Any]] = [
    *(
        lambda s, k=key: s.pop(k)
        for key in ("step", "data", "optimizer", "rng", "recipe", "compiled")
    ),
    *(
        lambda s, k=key: s.update({k: None})
        for key in ("step", "data", "optimizer", "rng", "recipe", "compiled")
    ),
    lambda s: s.clear(),
    lambda s: s.update(step=-1),
    lambda s: s.update(step=1.5),
    lambda s: s.update(step=10**400),
    lambda s: s.update(compiled="yes"),
    lambda s: s.update(backend=1),
    lambda s: s["data"].update(samples_seen="x"),
    lambda s: s["data"].pop("corpus_sha256"),
    lambda s: s["data"].update(samples_seen=3),
    lambda s: s["rng"].pop("python"),
    lambda s: s["rng"].update(python=[]),
    lambda s: s["rng"]["numpy"].update(bit_generator="x"),
    lambda s: s["rng"]["python"].update(version=9),
    lambda s: s["rng"]["numpy"].pop("state"),
    lambda s: s["recipe"]["model"].update(num_layers="many"),
    lambda s: s["recipe"].update(unknown=1),
    lambda s: s["recipe"].update(trainer=[]),
    lambda s: s["optimizer"].clear(),
    lambda s: s["optimizer"].update(steps="x"),
    lambda s: s["optimizer"].update(steps=10**400),
    lambda s: s["optimizer"].update(state=None),
    lambda s: s["optimizer"].update(state={}),
    lambda s: s["optimizer"].update(optimizer="SGD"),
    lambda s: s["optimizer"]["state"].update({k: None for k in s["optimizer"]["state"]}),
    lambda s: next(iter(s["optimizer"]["state"].values())).pop("tensors"),
    lambda s: next(iter(s["optimizer"]["state"].values())).update(step="x"),
]


@pytest.fixture(scope="module")
def job(whole: Path) -> fp8cfg.Job:
    return fp8cfg.build(fp8cfg.from_yaml(whole / "recipe.yaml"))


@pytest.mark.parametrize("number", range(len(STATES)))
def test_a_state_of_other_contents_is_a_damaged_checkpoint(
    number: int, whole: Path, job: fp8cfg.Job
) -> None:
    tensors, state = whole_checkpoints.load(whole / "checkpoints" / "step-00000004")
    STATES[number](state)
    with pytest.raises(DamagedCheckpoint) as e:
        job_state.restore(job, tensors, state, run_data(job.recipe)[0])
    assert "\n" not in str(e.value) and e.value.exit_code == 4


def test_a_torn_group_names_the_tensor(whole: Path, job: fp8cfg.Job) -> None:
    tensors, state = whole_checkpoints.load(whole / "checkpoints" / "step-00000004")
    name = next(iter(tensors["model"]))
    kept = tensors["model"].pop(name)
    with pytest.raises(DamagedCheckpoint, match=f"Missing key.*{name}"):
        job_state.restore(job, tensors, state, run_data(job.recipe)[0])
    tensors["model"][name] = kept[:1]
    with pytest.raises(DamagedCheckpoint, match=f"size mismatch for {name}"):
        job_state.restore(job, tensors, state, run_data(job.recipe)[0])


def test_older_checkpoints_are_tried_where_contents_are_wrong(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = mine / "checkpoints" / "step-00000004"
    shutil.copytree(newest, mine / "checkpoints" / "step-00000004.2")
    (newest / "model.safetensors").write_bytes(
        b"\x08\0\0\0\0\0\0\0{}      "
    )  # whole, and without a tensor
    whole_checkpoints.describe(newest, 4)
    again = mine / "checkpoints" / "step-00000004.2"
    (again / "model.safetensors").write_bytes(b"no safetensors")
    whole_checkpoints.describe(again, 4)
    assert main(["resume", str(mine), "trainer.max_steps=5"]) == 0
    out = capsys.readouterr().out
    passed = [line for line in out.splitlines() if "skipped damaged" in line]
    assert (
        len(passed) == 2
        and "step-00000004.2: model.safetensors: cannot be read" in passed[0]
        and "step-00000004: " in passed[1]
    )
    assert "from step-00000002" in out and saved(mine) == ["step-00000004.3", "step-00000005"]
    for name in saved(mine):
        file = mine / "checkpoints" / name / "state.json"
        file.write_text(json.dumps({"step": int(name[5:13])}))
        whole_checkpoints.describe(file.parent, int(name[5:13]))
    assert main(["resume", str(mine), "trainer.max_steps=6"]) == 4
    err = capsys.readouterr().err
    assert "none of 2 checkpoints" in err and err.count("\n") == 1
