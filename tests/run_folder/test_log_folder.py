"""log.folder and log.resume: one command line, or one fit, that starts a run and goes on with it."""

from __future__ import annotations

import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.run_folder import metrics_file
from tests.cli.test_hydra_habits import TINY

SAVES = [
    *(word for word in TINY if not word.startswith("checkpoint.")),
    "checkpoint.every_n_steps=1",
    "trainer.compile=off",
]


def steps(folder: Path) -> list[int]:
    return [
        row["step"] for row in metrics_file.read_metrics(folder / "metrics.jsonl") if "loss" in row
    ]


def test_one_line_starts_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = ["log.folder=here/mine", "log.resume=auto"]
    assert main([*SAVES, *mine]) == 0 and steps(tmp_path / "here/mine") == [1, 2]
    capsys.readouterr()
    assert main([*SAVES, *mine]) == 0
    assert (
        "nothing left to do: 2 steps of trainer.max_steps=2 are done"
        in (out := capsys.readouterr().out)
        and "from step-" in out
    )
    assert main(["rerun", "here/mine", "log.dir=again"]) == 0
    assert (
        "equal bit for bit" in (out := capsys.readouterr().out) and "changed: log.folder" not in out
    )
    (run,) = (tmp_path / "again").iterdir()
    log = fp8cfg.RunFolder.open(run, lock=False).read_recipe().log
    assert (log.folder, log.resume) == (None, "never")
    assert main([*SAVES, *mine, "trainer.max_steps=3"]) == 0 and steps(tmp_path / "here/mine") == [
        1,
        2,
        3,
    ]
    capsys.readouterr()
    assert main([*SAVES, *mine, "fp8.margin=1"]) == 2
    line = "fp8cfg resume here/mine optim.warmup_steps=2 fp8.margin=1 --allow fp8.margin"
    assert capsys.readouterr().err.endswith(
        f"error: fp8.margin=1: the checkpoint of step 3 has fp8.margin=0; run {line}\n"
    )
    assert main(line.split()[1:]) == 0
    assert main([*SAVES, mine[0]]) == 2 and "already contains a run" in capsys.readouterr().err


def test_fit_does_so_too(tmp_path: Path) -> None:
    def trained(*words: str) -> fp8cfg.Result:
        recipe = fp8cfg.compose([*SAVES, f"log.folder={tmp_path}/mine", "log.resume=auto", *words])
        return fp8cfg.fit(fp8cfg.build(recipe), say=lambda _: None)

    assert trained().folder == tmp_path / "mine"
    whole = fp8cfg.fit(
        fp8cfg.build(fp8cfg.compose([*SAVES, f"log.dir={tmp_path}", "trainer.max_steps=3"])),
        say=lambda _: None,
    )
    again = trained("trainer.max_steps=3")
    assert steps(tmp_path / "mine") == [1, 2, 3]
    assert again.steps == whole.steps == 3 and again.loss is not None
    with pytest.raises(fp8cfg.ConfigError, match=r"optim\.betas"):
        trained("optim.betas=[0.8,0.9]")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["log.resume=auto"],
            "log.resume=auto: needs log.folder, the run folder to start or continue; set log.folder=runs/llama_tiny",
        ),
        (
            ["log.folder=a", "hydra.run.dir=b"],
            "hydra.run.dir=b: log.folder=a is the run folder; drop one",
        ),
        (
            ["sweep", "log.folder=a", "optim.lr=1e-3,1e-4"],
            "log.folder=a: for a single run only; write hydra.sweep.dir=FOLDER",
        ),
        (["export", "slurm", "--slurm", "gpu"], "--slurm gpu: not of the form key=value"),
        (
            ["export", "--slurm", "a=b"],
            "--slurm: has no effect on export of a recipe, it is for export slurm",
        ),
    ],
)
def test_what_is_refused(
    words: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2 and line in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_taken_is_said_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fp8cfg.building.builder.build", None)
    (tmp_path / "recipe.yaml").write_text("")
    assert main([*SAVES, f"log.folder={tmp_path}"]) == 2
    assert capsys.readouterr().err.endswith(
        f"error: {tmp_path}: already contains a run; continue it with fp8cfg resume {tmp_path}, or set another log.folder\n"
    )


@pytest.mark.parametrize("key", ["log.folder", "log.dir"])
def test_a_folder_that_cannot_be_made_is_said_by_its_key(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*SAVES, f"{key}={tmp_path}/file"]) == 5
    assert capsys.readouterr().err.endswith(
        f"error: {key}={tmp_path}/file: cannot be written (it is no folder)\n"
    )
    assert main(["check", f"{key}={tmp_path}/{'a' * 300}"]) == 2
    assert (
        capsys.readouterr().err.startswith(f"error: {key}={str(tmp_path)[:40]}")
        and not (tmp_path / "file").is_dir()
    )


def test_damaged_metrics_are_said_before_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main([*SAVES, f"log.folder={folder}"]) == 0
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("junk\n")
    capsys.readouterr()
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 2
    said = capsys.readouterr()
    assert (
        not said.out
        and said.err.startswith(f"error: {folder}/metrics.jsonl:")
        and "delete that line" in said.err
    )


COMMANDS = {  # which stand for Slurm's: two tasks on this machine, and a queue
    "srun": 'for r in 0 1; do SLURM_PROCID=$r SLURM_LOCALID=$r "$@" & pids="$pids $!"; done\nfor p in $pids; do wait $p || code=$?; done; exit ${code:-0}',
    "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$QUEUE"; fi',
}


@pytest.mark.slow
def test_a_batch_script_goes_back_into_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks run, with commands in the place of Slurm's; a rank that is asked to stop ends both with exit code 75."""
    words = [
        *SAVES,
        "trainer.devices=2",
        "trainer.micro_batch_size=1",
        f"log.dir={tmp_path}",
        "trainer.max_steps=100000",
        "checkpoint.every_n_steps=0",
    ]
    assert (
        main(
            ["export", "slurm", *words, "--slurm", "time=10", "--output", str(tmp_path / "job.sh")]
        )
        == 0
    )
    for name, text in {**COMMANDS, "python": f'exec {shlex.quote(sys.executable)} "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environ = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "123",
        "SLURM_JOB_NODELIST": "localhost",
        "QUEUE": str(tmp_path / "queue"),
        "OMP_NUM_THREADS": "1",
    }
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    run = tmp_path / "llama_tiny"
    codes = []
    for _ in range(2):  # started, and started again
        seen = len(steps(run)) if run.exists() else 0
        job = subprocess.Popen(
            ["bash", str(tmp_path / "job.sh")],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.DEVNULL,
        )
        while job.poll() is None and not (
            (run / "metrics.jsonl").exists() and len(steps(run)) > seen + 1
        ):
            time.sleep(0.1)
        subprocess.run(
            ["pkill", "-TERM", "-f", f"^[^ ]*python[^ ]* -m fp8cfg .*{tmp_path}"], check=True
        )  # as Slurm does to each task
        codes.append(job.wait(300))
    assert codes == [75, 75] and (tmp_path / "queue").read_text() == "requeue 123\n" * 2
    assert steps(run) == list(range(1, len(steps(run)) + 1))
