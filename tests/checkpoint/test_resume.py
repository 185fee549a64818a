"""A run that is killed comes back as it was: the same losses bit for bit, or one clear line."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.checkpoint import job_state, resume_rules
from fp8cfg.checkpoint.load import Tensors
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.stored_state import fit_history, stored_state_dict
from fp8cfg.run_folder.metrics_file import MEASURED, read_metrics
from fp8cfg.training.data import run_data
from tests.support import whole_checkpoints
from tests.support.ranks import launch
from tests.support.short_runs import fit
from tests.support.small import SMALL, small, steps

FP8 = "precision=bf16_fp8"


def after(words: tuple[str, ...], done: int) -> tuple[fp8cfg.Job, Tensors, dict[str, object]]:
    """A job `done` steps on, and what its checkpoint holds, through files."""
    job = fp8cfg.build(small(*words))
    list(steps(job, done))
    return job, *whole_checkpoints.collect(job, run_data(job.recipe)[0], done)


@pytest.mark.parametrize(
    "words",
    [
        ("precision=fp32",),
        ("precision=bf16",),
        ("precision=fp16", "precision.initial_loss_scale=65536"),
        (FP8,),
        (FP8, "fp8.params=false"),
        (FP8, "fp8.interval=3"),
        (FP8, "fp8.first_step=te"),
        (FP8, "fp8.amax_history_len=2"),
        ("precision=bf16_fp8_current", "fp8.high_precision_at_end=0", "model.num_layers=4"),
        ("precision=fp16_fp8", "precision.initial_loss_scale=65536"),
        (FP8, "optim.name=sgd"),
        (FP8, "optim.name=adam"),
        (FP8, "model.share_embeddings_and_output_weights=true"),
        (FP8, "trainer.micro_batch_size=2"),
    ],
)
def test_losses_and_state_go_on_bit_for_bit(words: tuple[str, ...], tmp_path: Path) -> None:
    words = (*words, "trainer.max_steps=12")
    whole = fp8cfg.build(small(*words))
    want = [s.loss for s in steps(whole, 9)][4:]
    _, tensors, state = after(words, 4)
    path = whole_checkpoints.save(tmp_path, 4, tensors, state, keep=2)
    job = fp8cfg.build(small(*words))
    assert job_state.restore(job, *whole_checkpoints.load(path), run_data(job.recipe)[0]) == 4
    assert [s.loss for s in steps(job, 5, first=4)] == want
    for (name, a), b in zip(
        stored_state_dict(job.model).items(), stored_state_dict(whole.model).values(), strict=True
    ):
        assert torch.equal(a, b), name
    for name, tensor in whole.optimizer.state_tensors().items():
        assert torch.equal(job.optimizer.state_tensors()[name], tensor), name


def test_fp8_state_is_plain_tensors_in_a_file_of_its_own() -> None:
    _, tensors, _ = after((FP8,), 2)
    names = {name.rsplit(".", 1)[-1] for name in tensors["fp8"]}
    assert names == {"fp8_scale", "fp8_amax_history", "fp8_weight_scale_inv"}
    assert not any("fp8_" in name for name in tensors["model"])
    assert tensors["fp8"]["layers.0.mlp.linear_fc1.fp8_amax_history"].shape == (1024, 3)


@pytest.mark.parametrize(
    ("words", "done"),
    [
        (("precision=fp32", "optim.name=sgd", "optim.momentum=0"), 2),
        (("precision=fp16", "storage.weight=fp32"), 1),
    ],
)
def test_an_optimizer_without_tensors_is_resumed(
    words: tuple[str, ...], done: int, tmp_path: Path
) -> None:
    whole, tensors, state = after(words, done)
    assert "optimizer" not in tensors
    path = whole_checkpoints.save(tmp_path, done, tensors, state, keep=1)
    job = fp8cfg.build(small(*words))
    assert job_state.restore(job, *whole_checkpoints.load(path), run_data(job.recipe)[0]) == done
    assert job.optimizer.state_json() == whole.optimizer.state_json()
    assert [s.loss for s in steps(job, 2, first=done)] == [
        s.loss for s in steps(whole, 2, first=done)
    ]


REFUSED = [
    (
        "fp8.margin=1",
        "fp8.margin=1: this run has fp8.margin=0; to change it, add --allow fp8.margin",
    ),
    (
        "fp8.format=e4m3",
        "fp8.format=e4m3: this run has fp8.format=hybrid; to change it, add --allow fp8.format",
    ),
    ("model.num_layers=3", "model.num_layers=3: this run has model.num_layers=2; start a new run"),
    (
        "precision.compute=fp16",
        "precision.compute=fp16: this run has precision.compute=bf16; start a new run",
    ),
    ("trainer.seed=1", "trainer.seed=1: this run has trainer.seed=1234; start a new run"),
    ("data=stdlib", "data.name=stdlib: this run has data.name=tiny; start a new run"),
]


@pytest.mark.parametrize(("word", "line"), REFUSED)
def test_a_change_that_is_not_the_same_run_is_refused(word: str, line: str) -> None:
    before = small(FP8)
    with pytest.raises(fp8cfg.ConfigError) as e:
        resume_rules.refuse_changes(before, fp8cfg.compose([word], base=before), [])
    assert line in e.value.problems
    if "--allow" in line:
        resume_rules.refuse_changes(
            before, fp8cfg.compose([word], base=before), [word.partition("=")[0]]
        )
        resume_rules.refuse_changes(before, fp8cfg.compose([word], base=before), ["fp8"])
    else:
        with pytest.raises(fp8cfg.ConfigError, match="start a new run"):
            resume_rules.refuse_changes(before, fp8cfg.compose([word], base=before), ["*"])


def test_free_keys_may_change() -> None:
    before = small(FP8)
    now = fp8cfg.compose(
        ["trainer.max_steps=99", "log.every_n_steps=1", "optim.lr=1e-4", "fp8.min_coverage=0.5"],
        base=before,
    )
    resume_rules.refuse_changes(before, now, [])
    assert set(resume_rules.changes(before, now)) == {
        "trainer.max_steps",
        "log.every_n_steps",
        "optim.lr",
        "fp8.min_coverage",
    }


@pytest.mark.parametrize(
    ("start", "change"),
    [
        ((FP8,), "fp8.margin=1"),
        ((FP8,), "fp8.params=false"),
        ((FP8, "fp8.params=false"), "fp8.params=true"),
        ((FP8,), "precision=bf16"),
        (("precision=bf16",), "precision=bf16_fp8"),
        ((FP8,), "fp8.amax_history_len=8"),
        ((FP8, "fp8.amax_history_len=8"), "fp8.amax_history_len=1024"),
        ((FP8,), "precision={fp8: {scaling: current}}"),
    ],
)
def test_an_allowed_change_of_precision_keeps_the_masters(
    start: tuple[str, ...], change: str
) -> None:
    before, tensors, state = after((*start, "trainer.max_steps=12"), 4)
    job = fp8cfg.build(fp8cfg.compose([change], base=before.recipe))
    assert job_state.restore(job, tensors, state, run_data(job.recipe)[0]) == 4
    for p, name in job.optimizer.names.items():
        assert torch.equal(job.optimizer.masters[p], tensors["optimizer"][f"{name}.master"])
    changed, same = (
        [s.loss for s in steps(job, 3, first=4)],
        [s.loss for s in steps(before, 3, first=4)],
    )
    assert changed == pytest.approx(same, rel=0.02)


def test_a_longer_history_keeps_the_newest_amaxes_newest() -> None:
    long = torch.arange(30.0).view(10, 3)
    short = fit_history(long, torch.empty(4, 3))
    assert torch.equal(short, long[[0, 7, 8, 9]])
    again = fit_history(short, torch.empty(10, 3))
    assert torch.equal(again[[0, 7, 8, 9]], short) and not again[1:7].any()
    assert torch.equal(fit_history(long, torch.empty(1, 3)), long[:1])


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    _, tensors, state = after((FP8,), 2)
    job = fp8cfg.build(small(FP8))
    other, _ = run_data(small("data=stdlib"))
    with pytest.raises(ValueError, match="corpus_sha256"):
        job_state.restore(job, tensors, state, other)


WORDS = [*SMALL, FP8, "trainer.max_steps=8", "checkpoint.every_n_steps=2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    root = tmp_path_factory.mktemp("whole")
    assert launch(1, *WORDS, f"log.dir={root}").returncode == 0
    return metrics(next(root.iterdir()))


def metrics(folder: Path) -> list[dict[str, object]]:
    return [
        {k: v for k, v in line.items() if k not in MEASURED}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.parametrize(
    "failpoint", ["shard:2", "manifest:2", "rename:3", "renamed:2", "delete:1"]
)
def test_kill_9_inside_a_save_and_resume(
    failpoint: str, whole: list[dict[str, object]], tmp_path: Path
) -> None:
    killed = launch(1, *WORDS, f"log.dir={tmp_path}", FP8CFG_FAILPOINT=failpoint)
    assert killed.returncode == -signal.SIGKILL
    folder = next(tmp_path.iterdir())
    resumed = launch(1, "resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming" in resumed.stdout
    assert metrics(folder) == whole


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_with_a_line_that_names_the_file(
    whole: list[dict[str, object]], tmp_path: Path
) -> None:
    assert launch(1, *WORDS, f"log.dir={tmp_path}").returncode == 0
    folder = next(tmp_path.iterdir())
    newest = sorted((folder / "checkpoints").iterdir())[-1] / "optimizer.safetensors"
    raw = bytearray(newest.read_bytes())
    raw[len(raw) // 2] ^= 1
    newest.write_bytes(raw)
    resumed = launch(1, "resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    assert (
        "skipped damaged checkpoint" in resumed.stdout
        and "step-00000008: optimizer.safetensors" in resumed.stdout
    )
    assert "from step-00000006" in resumed.stdout
    assert metrics(folder) == whole
    for file in (folder / "checkpoints").rglob("state.json"):
        file.write_text(json.dumps({}))
    none = launch(1, "resume", str(folder))
    assert (
        none.returncode == 4 and none.stderr.count("error:") == 1 and "Traceback" not in none.stderr
    )


@pytest.mark.slow
def test_errors_of_resume_are_one_line(tmp_path: Path) -> None:
    for argv, code, part in [
        (["resume"], 2, "needs one run folder"),
        (["resume", str(tmp_path / "none")], 2, "run folder not found"),
        (["resume", str(tmp_path), "--alow", "x"], 2, "did you mean '--allow'?"),
    ]:
        done = launch(1, *argv)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1) and part in done.stderr, (
            done.stderr
        )


def test_the_layers_of_a_resumed_model_are_fp8(tmp_path: Path) -> None:
    _, tensors, state = after((FP8,), 1)
    other = fp8cfg.build(small(FP8))
    job_state.restore(other, tensors, state, run_data(other.recipe)[0])
    assert len(list(fp8_linears(other.model))) == 8


def test_a_key_that_cannot_be_allowed_is_answered() -> None:
    with pytest.raises(
        fp8cfg.ConfigError, match=r"fp8\.margn: no such key; did you mean 'fp8\.margin'"
    ):
        resume_rules.refuse_changes(small(FP8), small(FP8), ["fp8.margn"])
    resume_rules.refuse_changes(
        small(FP8), small(FP8, "fp8.margin=1"), ["trainer.plugins.fp8.margin"]
    )
    resume_rules.refuse_changes(small(FP8), small(FP8, "model.recompute_granularity=full"), [])
    with pytest.raises(fp8cfg.ConfigError, match="start a new run"):
        resume_rules.refuse_changes(
            small(FP8), small(FP8, "trainer.global_batch_size=16"), ["trainer.global_batch_size"]
        )


def test_the_run_folder_says_what_runs_after_a_change(tmp_path: Path) -> None:
    assert launch(1, *WORDS, f"log.dir={tmp_path}").returncode == 0
    folder = next(tmp_path.iterdir())
    done = launch(
        1, "resume", str(folder), "trainer.max_steps=10", "fp8.margin=1", "--allow", "fp8.margin"
    )
    assert done.returncode == 0, done.stderr
    assert "changed: fp8.margin" in done.stdout
    now = fp8cfg.from_yaml(folder / "recipe.yaml")
    assert now.fp8.margin == 1 and now.trainer.max_steps == 10


def test_what_is_edited_in_a_run_folder_is_said_and_the_checkpoint_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "model.num_layers=1", "trainer.max_steps=2", f"log.dir={tmp_path}"]) == 0
    (folder,) = tmp_path.iterdir()
    file = folder / "recipe.yaml"
    file.write_text(file.read_text().replace("lr: 0.003", "lr: 0.004"))
    assert fp8cfg.from_yaml(file).optim.lr == 0.004
    capsys.readouterr()
    assert main(["resume", str(folder), "trainer.micro_batch_size=3"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: trainer.micro_batch_size=3: changes trainer.global_batch_size=8 of the checkpoint of step 2 to "
    )
    assert (
        main(
            [
                "resume",
                str(folder),
                "trainer.max_steps=3",
                "--allow",
                "optim.lr",
                "--allow",
                "trainer",
                "-cd",
                str(tmp_path),
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    assert said.err == (
        f"note: --config-dir {tmp_path}: no effect, no override chooses one of its presets; the recipe is the run's own\n"
        "note: --allow optim.lr: allows nothing, no such key has changed\n"
    )
    (edited,) = (
        line
        for line in said.out.splitlines()
        if "recipe.yaml differs from the checkpoint; using the checkpoint; to change it" in line
    )
    assert edited.startswith("note: optim.lr: ") and fp8cfg.from_yaml(file).optim.lr == 0.003


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (
            "trainer.max_steps=8",
            "note: the learning rate of step 5 is 0.00232 (7.75 times as high)",
        ),
        ("optim.lr=1e-4", "is 0.0001 (0.0333 times as high)"),
        ("optim.lr=0.0030001", ""),
        ("trainer.max_steps=4", ""),
    ],
)
def test_a_change_of_the_learning_rate_is_said(
    word: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fit(tmp_path, "checkpoint.every_n_steps=2")
    if word.startswith("optim.lr"):
        shutil.rmtree(folder.checkpoints / "step-00000004")
    fp8cfg.resume(folder.path, [word], say=print)
    out = " ".join(capsys.readouterr().out.split())
    assert says in out and ("learning rate" in out) == bool(says)


def test_a_step_is_chosen_and_later_checkpoints_are_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fit(tmp_path, "checkpoint.every_n_steps=2", "checkpoint.keep=9")
    whole = read_metrics(folder.metrics)
    assert main(["resume", str(folder.path), "--step", "3"]) == 2
    assert "--step 3: no checkpoint of that step; there are: 2, 4" in capsys.readouterr().err
    assert main(["resume", str(folder.path), "--step", "x"]) == 2
    assert "--step x: needs the number of a step" in capsys.readouterr().err
    assert main(["resume", str(folder.path), "--step", "9" * 5000]) == 2
    assert f"--step {'9' * 40}: needs the number of a step" in capsys.readouterr().err
    assert main(["resume", str(folder.path), "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert "from step-00000002" in out
    assert "step-00000004 is later than --step 2: renamed to step-00000004.aside-1" in out
    names = sorted(path.name for path in folder.checkpoints.iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000004.aside-1"]
    again = read_metrics(folder.metrics)
    assert [row.get("loss") for row in again] == [row.get("loss") for row in whole]
    fp8cfg.resume(folder.path, ["trainer.max_steps=5"], say=lambda _: None, step=2)
    names = sorted(path.name for path in folder.checkpoints.iterdir())
    assert "step-00000004.aside-2" in names and "step-00000005" in names
