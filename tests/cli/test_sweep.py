"""A sweep: its words checked before anything runs, its runs, its table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra.types import RunMode

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.cli import multirun
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.hydra_application import NAME, application
from fp8cfg.composition.precedence import composed
from fp8cfg.composition.sweep_overrides import MAX_JOBS, read, refused
from fp8cfg.recipes import llama_tiny
from fp8cfg.run_folder import metrics_file
from fp8cfg.schema.errors import refuse_if
from tests.support.hydra_plugins import offered
from tests.support.ranks import launch
from tests.support.small import SMALL

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "overrides", "jobs"),
    [
        ([], [], [[]]),
        (
            ["fp8.margin=0,1"],
            ["trainer.plugins.fp8.margin=0,1"],
            [["fp8.margin=0"], ["fp8.margin=1"]],
        ),
        (
            ["fp8.margin=choice(0,1)", "precision=bf16_fp8"],
            ["trainer.plugins.fp8.margin=choice(0,1)", "precision=bf16_fp8"],
            [["fp8.margin=0", "precision=bf16_fp8"], ["fp8.margin=1", "precision=bf16_fp8"]],
        ),
        (
            ["fp8.margin=range(0,3)"],
            ["trainer.plugins.fp8.margin=range(0,3)"],
            [["fp8.margin=0"], ["fp8.margin=1"], ["fp8.margin=2"]],
        ),
        (["recipe=glob(llama_t*)"], ["recipe=llama_tiny"], [["recipe=llama_tiny"]]),
        (
            ["precision=null,bf16-mixed"],
            ["precision='null',bf16"],
            [["precision=null"], ["precision=bf16-mixed"]],
        ),
        (
            ["trainer.plugins=bf16,fp16_mixed"],
            ["precision=bf16,fp16"],
            [["trainer.plugins=bf16"], ["trainer.plugins=fp16_mixed"]],
        ),
        (
            ["fp8={margin:1},{margin:2}"],
            ["trainer.plugins.fp8={margin:1},{margin:2}"],
            [["fp8={margin:1}"], ["fp8={margin:2}"]],
        ),
        (
            ["optim.betas=[0.9,0.95],[0.8,0.9]"],
            ["optim.betas=[0.9,0.95],[0.8,0.9]"],
            [["optim.betas=[0.9,0.95]"], ["optim.betas=[0.8,0.9]"]],
        ),
        (
            ["fp8.margin=0,1", "trainer.plugins.fp8.margin=2"],
            ["trainer.plugins.fp8.margin=2"],
            [["trainer.plugins.fp8.margin=2"]],
        ),
        (
            ["optim.lr=interval(1e-5,1e-3)"],
            ["optim.lr=interval(1e-5,1e-3)"],
            [["optim.lr=1e-05"], ["optim.lr=0.001"]],
        ),
        (["recipe=null"], ["recipe=llama_tiny"], [["recipe=null"]]),
        (["data={name: tiny}"], ["data={name: tiny}"], [["data={name: tiny}"]]),
        (["precision=bf16", "precision=fp16"], ["precision=fp16"], [["precision=fp16"]]),
    ],
)
def test_words_for_hydra_and_for_each_job(
    words: list[str], overrides: list[str], jobs: list[list[str]]
) -> None:
    plan = read(words, Library())
    assert (plan.overrides, plan.combinations) == (overrides, jobs)


def test_what_can_be_chosen_is_there_for_hydra() -> None:
    nodes = read(["precision=null,fp16,bf16", "data=tiny"], Library()).nodes
    assert {group: list(of) for group, of in nodes.items()} == {
        "precision": ["null", "fp16", "bf16"],
        "data": ["tiny"],
        "recipe": ["llama_tiny"],
    }
    plan = read(["fp8.margin=0,1"], Library(), llama_tiny())
    assert plan.overrides[0] == "recipe=given_file" and list(plan.nodes["recipe"]) == ["given_file"]


def test_null_is_a_choice_for_hydra() -> None:
    plan = read(["precision=null", "task=null,lora"], Library())
    with application(plan.nodes) as hydra:
        overrides = [plan.overrides[0], "task='null'"]
        config = hydra.compose_config(NAME, overrides, RunMode.RUN, with_log_configuration=False)
    assert config.trainer.plugins.compute == "bf16" and not config.lora.enabled


REFUSED = [
    (
        "fp8.margin=0,99,x",
        ["fp8.margin=99: must be at most 16", "fp8.margin=x: expected an integer, got str"],
    ),
    (
        "fp8.margn=0,1 precision=bf16_fp8,bf16_pf8",
        [
            "fp8.margn: no such key; did you mean 'fp8.margin'?",
            "precision=bf16_pf8: no such precision preset; did you mean 'bf16_fp8'?",
        ],
    ),
    ("recipe=glob(x*)", ["recipe=glob(x*): no recipe matches; see fp8cfg list recipe"]),
    (
        "fp8.margin=rnge(0,3)",
        ["fp8.margin=rnge(0,3): no such function 'rnge'; did you mean 'range'?"],
    ),
    (
        "fp8.margin=glob(*)",
        ["fp8.margin=glob(*): glob() matches presets, but fp8.margin is not a group of presets"],
    ),
    ("fp8.margin=range(1,5,0)", ["fp8.margin=range(1,5,0): the range has no end"]),
    ("trainer.seed=range(0,1000000000)", [f"more than {MAX_JOBS} jobs in one sweep"]),
    (
        "trainer.seed=range(0,100) fp8.margin=range(0,17)",
        [f"more than {MAX_JOBS} jobs in one sweep"],
    ),
    (
        "precision=bf16,{compute:fp16}",
        ["precision=bf16,{compute:fp16}: expected only names of presets"],
    ),
    ("log.dir=a,b", ["log.dir=a,b: a sweep has one folder; set hydra.sweep.dir=FOLDER"]),
    (
        "name=${oc.env:HOME},b",
        ["name=${oc.env:HOME},b: interpolation is not accepted; write the value"],
    ),
    (
        "+fp8.margin=0,1",
        ["+fp8.margin=0,1: fp8.margin already exists; remove the +: fp8.margin=0,1"],
    ),
    # a value that no combination can have is as wrong as a typo
    (
        "model.num_attention_heads=4,3 fp8.margin=0,1 precision=bf16_fp8",
        [
            "model.hidden_size=256: not a multiple of model.num_attention_heads=3; nearest is 255, or set model.kv_channels"
        ],
    ),
    (
        "fp8.margin=1,2",
        [
            "fp8.margin=1: has no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true",
            "fp8.margin=2: has no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true",
        ],
    ),
    (
        "hydra.searchpath=[/tmp]",
        ["hydra.searchpath=[/tmp]: not accepted; pass your presets as --config-dir FOLDER"],
    ),
    ("hydra.nothing=1", ["Could not override 'hydra.nothing'."]),
    (
        "hydra.sweep.dri=x",
        ["Could not override 'hydra.sweep.dri'; did you mean 'hydra.sweep.dir'?"],
    ),
    (
        "hydra.sweeper.max_batch_sze=2",
        [
            "Could not override 'hydra.sweeper.max_batch_sze'; did you mean 'hydra.sweeper.max_batch_size'?"
        ],
    ),
    (
        "optim.lr=interval(1e-2,1e-4)",
        [
            "optim.lr=interval(1e-2,1e-4): starts above its end; write optim.lr=interval(0.0001,0.01)"
        ],
    ),
    (
        "hydra.sweeper.max_batch_size=x",
        [
            "Error merging override hydra.sweeper.max_batch_size=x: Value 'x' of type 'str' could not be converted to Integer"
        ],
    ),
    (
        "hydra.verbose=true,false",
        ["Sweeping over Hydra's configuration is not supported : 'hydra.verbose=true,false'"],
    ),
    (
        "hydra/sweeper=ax",
        [
            f"In 'hydra/config': Could not find 'hydra/sweeper/ax'; choose from {offered('hydra/sweeper')}; pip install hydra-ax-sweeper"
        ],
    ),
    (
        "hydra.sweep.subdir=x trainer.seed=1,2",
        [
            "hydra.sweep.subdir=x: gives all 2 runs one folder; put the run into the name, as in 'hydra.sweep.subdir=${hydra.job.num}'"
        ],
    ),
    ("hydra/launcher=joblb", ["hydra/launcher=joblb: no such choice; did you mean 'joblib'?"]),
    (
        "hydra/sweeper=nothing",
        [
            f"In 'hydra/config': Could not find 'hydra/sweeper/nothing'; choose from {offered('hydra/sweeper')}"
        ],
    ),
]


def test_a_setting_of_another_launcher_is_said_to_be_its(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    assert main(["-m", "trainer.seed=1,2", "hydra.launcher.partition=gpu"]) == 2
    assert (
        capsys.readouterr().err
        == "error: Could not override 'hydra.launcher.partition'; it belongs to hydra/launcher=submitit_slurm\n"
    )


@pytest.mark.parametrize(("words", "lines"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_wrong_word_is_refused_before_the_first_job(
    words: str,
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *words.split()]) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {line}" for line in lines]
    assert not list(tmp_path.rglob("recipe.yaml"))


def test_a_combination_that_cannot_be_is_a_hole_and_a_word_without_any_is_an_error() -> None:
    def build(words: Sequence[str]) -> None:
        refuse_if(composed(words, Library(), sweep=True).problems)

    plan = read(["fp8.margin=0,1", "precision=bf16_fp8,bf16_fp8_current"], Library())
    ((number, lines),) = refused(plan.combinations, build).items()
    assert (
        plan.combinations[number] == ["fp8.margin=1", "precision=bf16_fp8_current"]
        and "has no effect" in lines[0]
    )
    with pytest.raises(fp8cfg.ConfigError, match="has no effect"):
        refused(
            read(["fp8.margin=0,1", "precision=bf16_fp8_current,bf16"], Library()).combinations,
            fp8cfg.compose,
        )
    with pytest.raises(fp8cfg.ConfigError, match=r"fp8\.margin=0: has no effect"):
        fp8cfg.compose(plan.combinations[1])  # alone


def test_several_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["-m", "fp8.margin=0,1"]) == 2
    assert (
        capsys.readouterr().err
        == "error: -m: a sweep starts its own runs, each on one rank; start it without torchrun\n"
    )


@pytest.mark.parametrize(
    ("word", "code", "line"),
    [
        ("hydra.job.env_copy=[NOPE_NOT_SET]", 1, "the sweep failed: KeyError: 'NOPE_NOT_SET'"),
        ("hydra.sweeper.max_batch_size=0", 1, "the sweep failed: AssertionError: no reason given"),
        (
            "optim.lr=interval(1e-5,1e-3)",
            2,
            "BasicSweeper does not support sweep type : INTERVAL_SWEEP; one that searches does: hydra/sweeper=optuna",
        ),
    ],
)
def test_what_a_launcher_or_sweeper_throws_is_one_line(
    word: str, code: int, line: str, tmp_path: Path
) -> None:
    """In a process of its own, since Hydra sets up logging, over pytest's."""
    done = process("-m", word, f"log.dir={tmp_path}")
    assert (done.returncode, done.stderr) == (code, f"error: {line}\n")
    assert not list(tmp_path.iterdir())


process = partial(launch, 1)


def test_composing_inside_a_sweep() -> None:
    from fp8cfg.composition.hydra_application import application

    plan = read(["precision=bf16,fp16"], Library())
    with application(plan.nodes) as hydra:
        assert fp8cfg.compose(["precision=bf16_fp8"]).fp8.enabled
        assert hydra.config_loader.get_group_options("precision") == ["bf16", "fp16"]


def test_a_folder_that_is_taken_or_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["-m", f"hydra.sweep.dir={tmp_path}"]) == 2
    assert (
        capsys.readouterr().err
        == f"error: hydra.sweep.dir={tmp_path}: is not empty; set a new folder\n"
    )
    assert main(["-m", f"log.dir={tmp_path / 'file'}"]) == 5
    assert "cannot be written" in capsys.readouterr().err


def result(number: int, code: int = 0, **overrides: str) -> dict[str, Any]:
    return {
        "job": number,
        "overrides": overrides,
        "exit_code": code,
        "error": None if code == 0 else "why: because\nand: so",
        "training_loss": 4.25,
        "validation_loss": "nan" if code else 4.5,
        "tokens_per_second": 12345.6,
        "fp8_share": 0.905,
        "run_folder": f"/s/{number}",
    }


def test_the_table() -> None:
    jobs = [
        result(0, a="1", same="x", **{"fp8.margin": "0"}),
        result(1, 3, a="1", same="x", **{"fp8.margin": "16"}),
    ]
    assert multirun._table(Path("/s"), jobs) == (
        "folder  fp8.margin    loss  val loss  tokens/s    FP8  exit\n"
        "0       0           4.2500    4.5000    12,346  90.5%     0\n"
        "1       16          4.2500       nan    12,346  90.5%     3"
    )
    wide = multirun._table(
        Path("/s"),
        [
            result(n, **{"x" * 20: "y" * 20, "name": str(n), "z" * 40: "v" * (n + 9)})
            for n in (0, 1)
        ],
    )
    assert wide.splitlines()[0] == "folder    loss  val loss  tokens/s    FP8  exit"
    assert wide.splitlines()[3:] == [
        f"0: name=0 {'z' * 40}={'v' * 9}",
        f"1: name=1 {'z' * 40}={'v' * 10}",
    ]


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 3, 2], 3), ([7, 1, 75], 1), ([7, 75], 75)]
)
def test_the_exit_code_is_1_before_the_largest(
    codes: list[int], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, exit_code in enumerate(codes):
        multirun.write_result(
            tmp_path, number, [f"trainer.seed={number}"], exit_code, "", has_run_folder=False
        )
    assert multirun.report(tmp_path, "") == code


def test_a_job_that_did_not_run_does_not_have_the_results_of_the_one_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 4.0}\n')
    first = multirun.write_result(tmp_path, 0, ["trainer.seed=1"], 0, "", has_run_folder=True)
    second = multirun.write_result(
        tmp_path,
        1,
        ["trainer.seed=2"],
        2,
        f"{tmp_path}: already contains a run",
        has_run_folder=False,
    )
    assert (first["training_loss"], second["training_loss"]) == (
        4.0,
        None,
    ) and multirun.read_results(tmp_path) == [first, second]
    assert multirun.report(tmp_path, "") == 2
    assert capsys.readouterr().out.splitlines()[3:] == [
        ".       1             4.0000                              0",
        ".       2                                                 2",
        f". refused: {tmp_path}: already contains a run",
    ]


@pytest.mark.slow
def test_two_jobs_in_one_folder_are_kept_apart(tmp_path: Path) -> None:
    done = process(
        "-m",
        *[w for w in SMALL if not w.startswith("trainer.max_steps")],
        "trainer.max_steps=3",
        f"log.dir={tmp_path}",
        "trainer.seed=1,2",
        "hydra.sweep.subdir=${hydra.job.name}",
    )
    (sweep,) = tmp_path.iterdir()
    first, second = json.loads((sweep / "results.json").read_text())
    assert (
        done.returncode == 2
        and first["exit_code"] == 0
        and first["training_loss"]
        and second["training_loss"] is None
    )
    assert f"fp8cfg refused: {sweep / 'fp8cfg'}: already contains a run" in done.stdout


def test_what_the_user_did_not_write_gives_way_in_each_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[fp8cfg.Recipe] = []

    def launched(recipe: fp8cfg.Recipe, *_: Any, **__: Any) -> int:
        ran.append(recipe)
        return 0

    monkeypatch.setattr("fp8cfg.cli.launch_run.launch", launched)
    file = tmp_path / "mine.yaml"
    file.write_text("optim: {constant_steps: 3}\n")
    assert (
        main(["-m", str(file), "trainer.max_steps=5,200", f"hydra.sweep.dir={tmp_path / 'sweep'}"])
        == 0
    )
    assert [(r.optim.warmup_steps, r.optim.constant_steps) for r in ran] == [(2, 3), (20, 3)]
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")] == [
        "note: optim.warmup_steps 20 -> 2: the recipe's value is changed to fit trainer.max_steps=5 and optim.constant_steps=3"
    ]


def test_null_keeps_the_recipe_in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[fp8cfg.Recipe] = []

    def launched(recipe: fp8cfg.Recipe, *_: Any, **__: Any) -> int:
        ran.append(recipe)
        return 0

    monkeypatch.setattr("fp8cfg.cli.launch_run.launch", launched)
    words = ["precision=null,bf16_fp8", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert main(["-m", *words]) == 0
    assert [recipe.fp8.enabled for recipe in ran] == [False, True]
    results = json.loads((tmp_path / "sweep" / "results.json").read_text())
    assert [result["overrides"]["precision"] for result in results] == ["null", "bf16_fp8"]


@pytest.mark.slow
def test_a_sweep_end_to_end(tmp_path: Path) -> None:
    """Jobs that train, one that fails, one that a rule refuses; and a run of the same words alone gives the same losses."""
    words = [
        *SMALL,
        f"log.dir={tmp_path}",
        "fp8.margin=0,1",
        "precision=bf16_fp8,bf16",
        "fp8.min_coverage=0,0.99",
    ]
    done = process("-m", *words)
    assert done.returncode == 3, done.stderr
    (sweep,) = tmp_path.iterdir()
    assert done.stdout.startswith(
        "3 of 8 combinations cannot run:\n  fp8.margin=0 precision=bf16 fp8.min_coverage=0.99\n    fp8.min_coverage=0.99: has no effect"
    )
    jobs = json.loads((sweep / "results.json").read_text())
    assert [j["exit_code"] for j in jobs] == [0, 3, 0, 2, 0, 3, 2, 2]
    assert [j["overrides"]["fp8.margin"] for j in jobs] == list("00001111")
    assert (
        all(Path(j["run_folder"]) == sweep / str(j["job"]) for j in jobs)
        and jobs[0]["fp8_share"] > 0.7
        and jobs[2]["fp8_share"] == 0
    )
    assert jobs[1]["error"].startswith("fp8.min_coverage=0.99: ") and jobs[0]["error"] is None
    table = done.stdout[done.stdout.index("sweep folder: ") :].splitlines()
    assert (
        table[1] == "folder    loss  val loss  tokens/s    FP8  exit"
        and max(map(len, table[1:18])) <= 80
    )
    assert table[10:18] == [
        f"{j['job']}: "
        + " ".join(
            f"{k}={j['overrides'][k]}" for k in ("fp8.margin", "precision", "fp8.min_coverage")
        )
        for j in jobs
    ]
    assert table[18:] == [
        f"{j['job']} {'refused' if j['exit_code'] == 2 else 'failed'}: {line}"
        for j in jobs
        for line in (j["error"] or "").splitlines()
    ]
    assert "Traceback" not in done.stderr

    assert (
        main([*SMALL, f"log.dir={tmp_path / 'alone'}", "fp8.margin=1", "precision=bf16_fp8"]) == 0
    )
    (alone,) = (tmp_path / "alone").iterdir()
    for name in ("loss", "val_loss"):
        assert [
            r[name] for r in metrics_file.read_metrics(alone / "metrics.jsonl") if name in r
        ] == [r[name] for r in metrics_file.read_metrics(sweep / "4/metrics.jsonl") if name in r]
    assert (
        jobs[4]["training_loss"] == metrics_file.read_metrics(alone / "metrics.jsonl")[-2]["loss"]
    )


@pytest.mark.slow
def test_a_signal_stops_the_sweep_after_a_checkpoint(tmp_path: Path) -> None:
    words = [w for w in SMALL if not w.startswith("trainer.max_steps")] + [
        "trainer.max_steps=100000",
        f"log.dir={tmp_path}",
        "trainer.seed=1,2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "fp8cfg", "sweep", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    for line in process.stdout:
        if "validation loss" in line:
            os.kill(process.pid, signal.SIGTERM)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "error: stopped by a signal; runs that are not in the table have not started" in err
    (sweep,) = tmp_path.iterdir()
    (job,) = json.loads((sweep / "results.json").read_text())
    assert (
        job["exit_code"] == 75 and list((sweep / "0" / "checkpoints").iterdir()) and "75\n" in out
    )


def test_the_last_argument_of_a_key_counts_as_in_a_single_run() -> None:
    words = ["fp8.margin=1", "trainer.max_steps=2,3", "fp8.margin=2"]
    assert [job[-1] for job in read(words, Library()).combinations] == ["fp8.margin=2"] * 2
    with pytest.raises(fp8cfg.ConfigError, match="fp8 is set twice in this sweep"):
        read(["fp8={margin: 1}", "fp8={interval: 2}", "optim.lr=1e-4,1e-3"], Library())
