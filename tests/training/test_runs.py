"""Runs in Python: `fit` leaves what the command line leaves, `resume` goes on with it, and callbacks hear of both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest
import torch

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.building.job import Job
from fp8cfg.numerics.amax_update import Overflow, RangesUsed, read_overflow
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.files import RunFolderError
from fp8cfg.run_folder.metrics_file import MEASURED
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.training import overflow_watch
from fp8cfg.training.overflow_watch import reduce_ranges_used
from tests.support.small import small, small_words
from tests.support.traced import TRACE

WORDS = (
    "precision=bf16_fp8",
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
    "checkpoint.every_n_steps=2",
)


class Heard(fp8cfg.Callback):
    """What a run has called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def step(self, done: int, values: Any) -> None:
        self.calls.append(("step", done, values["loss"]))

    def evaluation(self, done: int, loss: float) -> None:
        self.calls.append(("evaluation", done, loss))

    def save(self, done: int, folder: Path) -> None:
        self.calls.append(("save", done, (folder / "MANIFEST.json").is_file()))


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in MEASURED} for line in lines]


def files(folder: Path) -> set[str]:
    return {str(f.relative_to(folder)) for f in folder.rglob("*")}


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, fp8cfg.Recipe, Heard, list[str]]:
    """A run from Python: its folder, which is named by log.dir, its recipe, what callbacks heard and what it said."""
    recipe = fp8cfg.compose([f"log.dir={tmp_path_factory.mktemp('python')}"], base=small(*WORDS))
    heard, said = Heard(), list[str]()
    result = fp8cfg.fit(fp8cfg.build(recipe), say=said.append, callbacks=[heard])
    assert result.folder
    return result.folder, recipe, heard, said


def test_fit_leaves_what_the_command_line_leaves(trained: Any, tmp_path: Path) -> None:
    folder, recipe, _, said = trained
    assert main(["train", *small_words(*WORDS), f"log.dir={tmp_path}"]) == 0
    (other,) = tmp_path.iterdir()
    assert folder.parent == Path(recipe.log.dir) and folder.name.startswith("llama_tiny-")
    assert files(folder) == files(other) and rows(folder) == rows(other)
    assert (folder / "coverage.json").read_bytes() == (other / "coverage.json").read_bytes()
    kernels = json.loads((folder / "coverage.json").read_text())["sdpa_backend"]
    assert kernels == {f"layers.{n}.self_attention.core_attention": "flash" for n in range(2)}
    assert fp8cfg.RunFolder.open(folder, lock=False).read_recipe() == recipe
    assert said[0] == f"run folder: {folder}" and not any("run folder" in text for text in said[1:])


def test_callbacks_are_called_in_the_order_of_the_run(trained: Any) -> None:
    folder, _, heard, _ = trained
    losses = {r["step"]: r["loss"] for r in rows(folder) if "loss" in r}
    assert [call[:2] for call in heard.calls] == [
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("save", 2),
        ("step", 3),
        ("step", 4),
        ("evaluation", 4),
        ("save", 4),
    ]
    assert {call[1]: call[2] for call in heard.calls if call[0] == "step"} == losses
    assert all(call[2] for call in heard.calls if call[0] == "save")


def test_an_error_of_a_callback_ends_the_run(tmp_path: Path) -> None:
    class Stops(fp8cfg.Callback):
        def save(self, done: int, folder: Path) -> None:
            raise OSError("no uploads today")

    with pytest.raises(Exception, match="no uploads today") as error:
        fp8cfg.fit(
            fp8cfg.build(
                small("trainer.max_steps=2", "checkpoint.every_n_steps=1", "optim.warmup_steps=1")
            ),
            tmp_path / "run",
            say=lambda _: None,
            callbacks=[Stops()],
        )
    assert [f.name for f in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000001"]
    assert isinstance(error.value.__cause__, OSError), "with the traceback of the callback"


def test_a_folder_of_ones_own_is_resumed_by_either_door(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, recipe, _, _ = trained
    job = fp8cfg.build(
        fp8cfg.compose(["trainer.max_steps=2", "optim.lr_decay_style=constant"], base=recipe)
    )
    run = fp8cfg.fit(job, tmp_path / "mine", say=lambda _: None)
    assert run.folder == tmp_path / "mine" and run.steps == 2
    with pytest.raises(RunFolderError, match="already contains a run; continue it"):
        fp8cfg.fit(job, tmp_path / "mine")
    with pytest.raises(fp8cfg.ConfigError, match="this job has already trained 2 steps"):
        fp8cfg.fit(job, tmp_path / "another")
    assert not (tmp_path / "another").exists()
    said: list[str] = []
    again = fp8cfg.resume(tmp_path / "mine", ["trainer.max_steps=3"], say=said.append)
    assert said[:2] == [
        f"resuming {tmp_path / 'mine'} from step-00000002",
        "changed: trainer.max_steps",
    ]
    assert (again.steps, again.folder) == (3, tmp_path / "mine")
    assert main(["resume", str(tmp_path / "mine"), "trainer.max_steps=4"]) == 0
    assert [r["step"] for r in rows(tmp_path / "mine") if "loss" in r] == [1, 2, 3, 4]
    assert fp8cfg.RunFolder.open(tmp_path / "mine").read_recipe().trainer.max_steps == 4


def test_resume_refuses_what_is_another_run(trained: Any, tmp_path: Path) -> None:
    folder, _, _, _ = trained
    with pytest.raises(
        fp8cfg.ConfigError, match=r"fp8\.margin=1: the checkpoint of step 4 has fp8.margin=0"
    ):
        fp8cfg.resume(folder, ["fp8.margin=1"], say=lambda _: None)
    with pytest.raises(RunFolderError, match="run folder not found"):
        fp8cfg.resume(tmp_path / "nothing")
    for word, said in (
        (
            "trainer.max_steps=3",
            "trainer.max_steps=3: 4 steps are done; set trainer.max_steps=4 or more",
        ),
        (
            "log.folder=elsewhere",
            f"log.folder=elsewhere: a resumed run stays in {folder}; remove log.folder",
        ),
        (
            "log.dir=elsewhere",
            f"log.dir=elsewhere: a resumed run stays in {folder}; remove log.dir",
        ),
    ):
        with pytest.raises(fp8cfg.ConfigError, match=re.escape(said)):
            fp8cfg.resume(folder, [word], say=lambda _: None)
    assert fp8cfg.resume(folder, [f"log.folder={folder}"], say=lambda _: None).steps == 4
    before = (folder / "recipe.yaml").read_text()
    assert (
        fp8cfg.resume(folder, ["trainer.max_steps=4", "optim.lr=1"], say=lambda _: None).steps == 4
    ), "nothing left to do"
    assert main(["resume", str(folder), "optim.lr=1"]) == 0
    assert (folder / "recipe.yaml").read_text() == before, "no step has run with what was changed"


def test_what_was_edited_in_a_graph_is_in_the_run_folder_and_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = fp8cfg.lower(small("trainer.max_steps=2", "optim.warmup_steps=1", "precision=bf16_fp8"))
    graph.autocast.fp8.margin = 2
    graph.recipe.log.dir = str(tmp_path / "again")
    result = fp8cfg.fit(fdl.build(graph), tmp_path / "run", say=lambda _: None)
    assert result.folder and RunFolder.open(result.folder).read_recipe().fp8.margin == 2
    assert main(["rerun", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "training loss: equal bit for bit in all 2 values" in out and "changed: fp8" not in out


def test_the_exported_script_leaves_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "export",
                "--python",
                *small_words("trainer.max_steps=1", "optim.warmup_steps=1", "precision=bf16_fp8"),
            ]
        )
        == 0
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(capsys.readouterr().out, "script.py", "exec"), {"__name__": "__main__"})
    (folder,) = (tmp_path / "runs").iterdir()
    assert {f.name for f in folder.iterdir()} >= {
        "recipe.yaml",
        "metrics.jsonl",
        "coverage.json",
        "checkpoints",
    }


@pytest.fixture(scope="module")
def job() -> fp8cfg.Job:
    return fp8cfg.build(small())


def test_fit_wants_a_job() -> None:
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"fit: expected a Job, got Recipe; fp8cfg\.build\(recipe\) returns one",
    ):
        fp8cfg.fit(small())  # type: ignore[arg-type]


def test_a_key_of_a_recipe_is_no_argument() -> None:
    calls: dict[str, Callable[[], Any]] = {
        r"fit: has no argument max_steps; set recipe\.trainer\.max_steps; fit expects a Job,"
        r" and fp8cfg\.build\(recipe\) returns one": lambda: fp8cfg.fit(small(), max_steps=2),  # type: ignore[call-arg, arg-type]
        r"build: has no argument lr; set recipe\.optim\.lr": lambda: fp8cfg.build(small(), lr=1),  # type: ignore[call-arg]
        r"resume: has no argument max_steps; pass overrides=\['trainer\.max_steps=VALUE'\]": (
            lambda: fp8cfg.resume("a", max_steps=2)  # type: ignore[call-arg]
        ),
    }
    for line, call in calls.items():
        with pytest.raises(fp8cfg.ConfigError, match=f"^{line}$"):
            call()
    with pytest.raises(TypeError, match="colour"):
        fp8cfg.fit(small(), colour=2)  # type: ignore[call-arg, arg-type]


class Spoils(fp8cfg.Callback):
    """Makes the delayed scales of one layer too large after a step."""

    def __init__(self, job: fp8cfg.Job, after: int) -> None:
        self.layer, self.after = job.model.get_submodule("layers.1.mlp.linear_fc1"), after

    def step(self, done: int, values: Any) -> None:
        if done == self.after:
            self.layer.fp8_scale.mul_(1024)


def test_what_delayed_scaling_clips_is_counted_and_said_once(tmp_path: Path) -> None:
    job, said = (
        fp8cfg.build(small("precision=bf16_fp8", "fp8.margin=4", "trainer.max_steps=4")),
        list[str](),
    )
    fp8cfg.fit(job, tmp_path / "run", say=said.append, callbacks=[Spoils(job, 2)])
    steps = [row for row in rows(tmp_path / "run") if "loss" in row]
    counts = [(row["fp8_clipped"], row["fp8_infinite"]) for row in steps]
    assert counts == [(0, 0), (0, 0), (3, 0), (0, 0)], (
        "input, weight and grad_output of the layer, until its scales move again"
    )
    assert [row["fp8_clipped_values"] > 1000 for row in steps] == [False, False, True, False]
    assert {row["fp8_infinite_values"] for row in steps} == {0}
    (line,) = [" ".join(s.split()) for s in said if "clipped" in s]
    assert (
        line.startswith("warning: step 3: 3 tensors clipped, the most layers.1.mlp.linear_fc1 ")
        and "x its range)" in line
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16_fp8",
        "precision=bf16_fp8 fp8.params=false trainer.micro_batch_size=2 model.recompute_granularity=full",
    ],
)
def test_compiled_runs_count_the_values_that_eager_ones_do(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the microbatches of a step, and where a backward pass computes layers again."""
    monkeypatch.setattr(Job, "compiler", lambda job: TRACE)
    counts = []
    for how in ("off", "on"):
        job = fp8cfg.build(
            small(*words.split(), "fp8.margin=4", "trainer.max_steps=4", f"trainer.compile={how}")
        )
        fp8cfg.fit(job, tmp_path / how, say=lambda line: None, callbacks=[Spoils(job, 2)])
        steps = [row for row in rows(tmp_path / how) if "loss" in row]
        counts.append([(row["fp8_clipped_values"], row["fp8_infinite_values"]) for row in steps])
        assert job.compiled == (how == "on")
    assert counts[0] == counts[1] and [clipped > 1000 for clipped, _ in counts[0]] == [
        False,
        False,
        True,
        False,
    ]


def test_infinite_values_are_counted_and_said_once_without_delayed_scaling(tmp_path: Path) -> None:
    job, said, passes = (
        fp8cfg.build(small("precision=bf16_fp8_current", "trainer.max_steps=4")),
        list[str](),
        iter(range(9)),
    )

    def spoil(layer: Any, inputs: tuple[Any, ...]) -> None:
        if next(passes) in (1, 2):
            inputs[0].data[0, 0, 0] = float("inf")

    job.model.get_submodule("layers.1.mlp.linear_fc1").register_forward_pre_hook(spoil)
    fp8cfg.fit(job, tmp_path / "run", say=said.append)
    counts = [
        (row["fp8_clipped"], row["fp8_infinite"], row["fp8_infinite_values"])
        for row in rows(tmp_path / "run")
        if "loss" in row
    ]
    assert counts == [(0, 0, 0), (0, 1, 1), (0, 1, 1), (0, 0, 0)], "one pass a step"
    (line,) = [" ".join(s.split()) for s in said if "infinite values" in s]
    assert line.startswith(
        "warning: step 2: 1 tensor had infinite values, such as layers.1.mlp.linear_fc1 input; FP8 makes them finite under most scalings"
    )


def test_infinite_values_of_any_rank_are_counted() -> None:
    class Others(World):
        def largest(self, value: torch.Tensor) -> torch.Tensor:
            return torch.maximum(value, torch.tensor([0.0, torch.inf, 3.0]))

    found = read_overflow(
        reduce_ranges_used(
            RangesUsed(torch.tensor([2.0, 0.0, 0.5]), ["a input", "a weight", "a grad_output"]),
            Others(),
        )
    )
    assert (
        found == Overflow(2, 1, torch.inf, "a weight")
        and reduce_ranges_used(None, Others()) is None
    )


def test_values_are_counted_where_layers_count_them() -> None:
    job = fp8cfg.build(small("precision=bf16_fp8"))
    assert (
        overflow_watch.take_value_counter(job) is not None
        and overflow_watch.take_value_counter(fp8cfg.build(small("precision=bf16"))) is None
    )
    job.compiled = True
    assert overflow_watch.take_value_counter(job) is not None


@pytest.mark.parametrize(
    ("words", "asked"),
    [("", False), ("fp8.reduce_amax=false", True), ("precision=bf16_fp8_current", True)],
)
def test_ranks_that_shared_their_amaxes_are_not_asked_again(
    words: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = World(0, 2)
    monkeypatch.setattr(overflow_watch, "stage_world", lambda prepared: every)
    job = fp8cfg.build(small("precision=bf16_fp8", *words.split()))
    assert (overflow_watch.ranks_with_own_amaxes(job) is every) == asked


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"folder": 3}, "folder: expected a path, got 3"),
        ({"folder": ""}, "folder: expected a path, got ''"),
        ({"folder": "a\0b"}, "folder: expected a path"),
        ({"callbacks": 3}, "callbacks: expected a list, got int"),
        (
            {"callbacks": [print]},
            "callbacks: expected objects of a subclass of fp8cfg.Callback, got <built-in",
        ),
        ({"callbacks": [fp8cfg.Callback]}, r"pass Callback\(\)$"),
    ],
)
def test_arguments_of_other_kinds_are_refused_before_a_step(
    trained: Any, words: dict[str, Any], line: str, job: fp8cfg.Job
) -> None:
    for call in (
        lambda **w: fp8cfg.fit(job, **w),
        lambda folder=trained[0], **w: fp8cfg.resume(folder, **w),
    ):
        with pytest.raises(fp8cfg.ConfigError, match=line):
            call(**words)


@pytest.mark.parametrize("allow", ["optim.lr", [3]])
def test_keys_to_allow_are_a_list(trained: Any, allow: Any) -> None:
    with pytest.raises(
        fp8cfg.ConfigError, match=r"^allow: expected a list of keys, as in allow=\['optim\.lr'\]$"
    ):
        fp8cfg.resume(trained[0], ["optim.lr=1e-4"], allow)
    with pytest.raises(RunFolderError, match=r"^x{40}\.\.\.: File name too long$"):
        fp8cfg.resume("x" * 5000)
