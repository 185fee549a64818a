"""`launch`: the command line's door to the executors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.execution import executor as runs
from fp8cfg.planning import smoke
from fp8cfg.planning.layout import layout_violations


@pytest.mark.parametrize(
    ("options", "executor"),
    [
        (["--local", "2"], fp8cfg.TorchrunExecutor(2)),
        (
            ["--slurm", "partition=gpu,time=240"],
            fp8cfg.SlurmExecutor({"partition": "gpu", "time": 240}),
        ),
        (
            ["--slurm=nodelist=node1,node2", "--wait"],
            fp8cfg.SlurmExecutor({"nodelist": "node1,node2"}, wait=True),
        ),
    ],
)
def test_words_go_to_an_executor(
    options: list[str],
    executor: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[Any] = []

    def run(recipe: fp8cfg.Recipe, chosen: Any) -> fp8cfg.Execution:
        seen.append((recipe, chosen))
        return fp8cfg.Execution(tmp_path, None)

    monkeypatch.setattr(runs, "run", run)
    words = [
        "precision=bf16_fp8",
        "fp8.margin=1",
        "trainer.micro_batch_size=8",
        "trainer.accelerator=cpu",
    ]
    assert main(["launch", *options, *words]) == 0
    ranks = (
        [f"trainer.devices={executor.ranks}"]
        if isinstance(executor, fp8cfg.TorchrunExecutor)
        else []
    )
    assert seen == [(fp8cfg.compose([*words, *ranks]), executor)]
    assert capsys.readouterr().out == f"run folder: {tmp_path}\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "launch: needs one of --local N and --slurm KEY=VALUE,..."),
        (
            ["--local", "2", "--slurm", "a=b"],
            "launch: needs one of --local N and --slurm KEY=VALUE,...",
        ),
        (["--local", "two"], "--local two: expected a number of processes, as in --local 2"),
        (["--local", "0"], "--local 0: expected a number of processes, as in --local 2"),
        (
            ["--local", "9" * 5000],
            f"--local {'9' * 40}: expected a number of processes, as in --local 2",
        ),
        (
            ["--slurm", "gpu"],
            "--slurm gpu: not of the form key=value, as in --slurm partition=gpu,time=240",
        ),
        (
            ["--slurm", "a=b,,c=d"],
            "--slurm 'a=b,,c=d': not of the form key=value, as in --slurm partition=gpu,time=240",
        ),
        (
            ["--slurm", "partition=gpu,exclusive"],
            "--slurm exclusive: not of the form key=value, as in --slurm partition=gpu,time=240",
        ),
        (["--slurm", "time=1,time=2"], "--slurm time: given 2 times"),
        (
            ["--slurm", "nodes=4"],
            "--slurm nodes=4: follows trainer.num_nodes; set trainer.num_nodes=4",
        ),
        (
            ["--slurm", "partiton=gpu,time=5"],
            "--slurm partiton=gpu: no option of sbatch; did you mean 'partition'?",
        ),
        (
            ["--slurm", "timeout_min=5"],
            "--slurm timeout_min=5: no option of sbatch; did you mean 'time'?",
        ),
        (
            ["--slurm", "signal=USR1"],
            "--slurm signal=USR1: submitit sends its own signal; set signal_delay_s=SECONDS",
        ),
        (
            ["--local", "2", "--wait"],
            "--wait: for --slurm only; --local always waits; remove --wait",
        ),
        (["--local", "2", "fp8.margn=1"], "fp8.margn: no such key; did you mean 'fp8.margin'?"),
        (
            ["--local", "3", "trainer.accelerator=cpu", "trainer.global_batch_size=16"],
            "trainer.global_batch_size=16: not a multiple of trainer.micro_batch_size x data-parallel size = 48; "
            "nearest is 48",
        ),
        (
            ["--local", "2", "trainer.devices=4"],
            "--local 2: trainer.devices=4 is another number of processes; drop it, or write --local 4",
        ),
        (
            [
                "--local",
                "2",
                "data=text",
                "data.path=/gone/x",
                "trainer.accelerator=cpu",
                "trainer.micro_batch_size=8",
            ],
            "data=text: /gone/x: no such file or folder; the nearest folder that exists is /",
        ),
    ],
)
def test_mistakes(
    argv: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *argv, *([f"log.dir={tmp_path}"] if argv else [])]) == 2
    assert capsys.readouterr().err == f"error: {line.replace('{folder}', str(tmp_path))}\n"
    assert not list(tmp_path.iterdir())


def test_the_exit_code_of_the_run_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fp8cfg.execution.executor._run_python", lambda argv: 3)
    assert main(["launch", "--local", "2", "trainer.accelerator=cpu", f"log.dir={tmp_path}"]) == 3
    assert "the run ended with exit code 3" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["log.dir", "log.folder"])
def test_a_folder_that_cannot_be_made_is_one_line(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert (
        main(
            [
                "launch",
                "--local",
                "2",
                "trainer.accelerator=cpu",
                "trainer.micro_batch_size=8",
                f"{key}={tmp_path}/file/new",
            ]
        )
        == 5
    )
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path}/file/new: cannot be written (Not a directory)\n"
    )


def test_a_smoke_run_of_a_recipe_of_several_machines_takes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under torchrun, whose ranks get the recipe that is asserted here."""
    ran: list[list[str]] = []
    monkeypatch.setattr("fp8cfg.execution.executor._run_python", lambda argv: ran.append(argv) or 0)
    assert (
        main(
            [
                "launch",
                "--local",
                "4",
                "recipe=qwen25_72b",
                "trainer.smoke=true",
                "trainer.devices=8",
                "trainer.accelerator=cpu",
                f"log.dir={tmp_path}",
            ]
        )
        == 0
    )
    ((*torchrun, ranks, request, _, _),) = ran
    assert (torchrun, ranks) == (["-m", "fp8cfg.execution.executor"], "4")
    small = smoke.cut_recipe(fp8cfg.from_yaml(Path(request)), 4)
    assert small.trainer.strategy.size == 4 and layout_violations(small, 4) == []
