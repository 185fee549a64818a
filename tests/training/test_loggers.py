"""log.loggers: each library reads back what a run logged to it, and no logger ends a run."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.run_folder.metrics_file import read_metrics
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training.loggers import run_loggers, tensorboard
from fp8cfg.training.loggers.interface import LoggedRun
from tests.support import wandb_file
from tests.support.small import small

# The libraries use deprecated functions of their dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")
FILES = {"recipe.yaml", "sources.json", "plan.json", "coverage.json"}


class CrashAtThree(fp8cfg.Callback):
    def step(self, done: int, values: Mapping[str, Any]) -> None:
        if done == 3:
            raise RuntimeError("crash")


def local_stores(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keeps everything that the libraries write below `folder`, without a network."""
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_DATA_DIR": f"{folder}/wandb-data",
        "WANDB_CACHE_DIR": f"{folder}/wandb-cache",
        "WANDB_CONFIG_DIR": f"{folder}/wandb-config",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": f"{folder}/trackio",
        "HF_HUB_OFFLINE": "1",
    }
    for name, value in variables.items():
        patch.setenv(name, value)
    # MLflow's folder of artifacts is relative to the working directory.
    patch.chdir(folder)


@pytest.fixture
def logged(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that crashes after step 3 and resumes from step 2 to the end, step 4."""
    name = request.param
    local_stores(monkeypatch, tmp_path)
    pytest.importorskip(name)  # afterwards: Trackio reads TRACKIO_DIR when it is imported
    recipe = small(
        "precision=bf16_fp8",
        "trainer.max_steps=4",
        "trainer.val_check_interval=4",
        "model.num_layers=1",
        f"log.loggers=[{name}]",
        *(["log.project=mine"] if name != "tensorboard" else []),
    )
    with pytest.raises(RuntimeError, match="crash"):
        fp8cfg.fit(fp8cfg.build(recipe), "run", callbacks=[CrashAtThree()])
    # As after a kill: the crash itself has saved step 3.
    shutil.rmtree("run/checkpoints/step-00000003")
    folder = Path("run")
    if name == "trackio":
        folder = folder.rename("moved")  # Trackio finds the run by its first name
    fp8cfg.resume(folder)
    assert list(json.loads((folder / "loggers.json").read_text())) == [name]
    return tmp_path / folder


def logs_to(name: str) -> pytest.MarkDecorator:
    """Runs a test with the run of one logger."""
    return pytest.mark.parametrize("logged", [name], indirect=True)


def metric(run: Path, name: str) -> dict[int, float]:
    """Value of each step in metrics.jsonl."""
    return {row["step"]: row[name] for row in read_metrics(run / "metrics.jsonl") if name in row}


@logs_to("tensorboard")
def test_tensorboard_reads_the_run(logged: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logged / "tensorboard")).Reload()
    for name in ("loss", "grad_norm", "val_loss", "tokens_per_second"):
        # Each step once: the resumed run purges step 3 of the crashed one.
        found = {event.step: event.value for event in events.Scalars(name)}
        assert len(found) == len(events.Scalars(name))
        assert found == pytest.approx(metric(logged, name), rel=1e-6)
    text = events.Tensors("recipe.yaml/text_summary")[-1].tensor_proto.string_val[0].decode()
    lines = [line.removeprefix("    ") for line in text.splitlines()]
    assert lines == (logged / "recipe.yaml").read_text().splitlines()
    states = [event.tensor_proto.string_val[0] for event in events.Tensors("state/text_summary")]
    assert states[-1] == b"done"


def test_tensorboard_hides_the_steps_of_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = small("precision=bf16", "model.num_layers=1", "log.loggers=[tensorboard]")
    recipe.checkpoint.every_n_steps = 5
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="crash"):
        fp8cfg.fit(fp8cfg.build(recipe), folder, callbacks=[CrashAtThree()])
    shutil.rmtree(folder / "checkpoints" / "step-00000003")  # as after a kill
    fp8cfg.resume(folder)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


@logs_to("wandb")
def test_wandb_reads_the_run(logged: Path) -> None:
    crashed, resumed = sorted((logged / "wandb").glob("offline-run-*/run-*.wandb"))
    assert crashed.name == resumed.name  # one id, so `wandb sync` makes one run of both
    last_rows = {}
    for file, state, code in ((crashed, "crashed", 1), (resumed, "done", 0)):
        found: dict[str, list[Any]] = {}
        for record in wandb_file.records(file):
            found.setdefault(record.WhichOneof("record_type"), []).append(record)
        run = found["run"][0].run
        assert (run.project, run.display_name) == ("mine", "run")
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["fp8"]["enabled"] is True and config["trainer"]["max_steps"] == 4
        files = {
            entry.path for one in found["artifact"] for entry in one.artifact.manifest.contents
        }
        assert files == FILES
        assert found["exit"][0].exit.exit_code == code
        summary = [item for one in found["summary"] for item in one.summary.update]
        assert [json.loads(i.value_json) for i in summary if i.key == "state"] == [state]
        axes = {one.metric.glob_name: one.metric.step_metric for one in found["metric"]}
        assert axes["*"] == "step"
        for row in wandb_file.history(file):
            if "loss" in row:
                last_rows[row["step"]] = row["loss"]
    assert last_rows == metric(logged, "loss")


@logs_to("mlflow")
def test_mlflow_reads_the_run(logged: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params["trainer.max_steps"] == "4"
    assert run.data.params["fp8.enabled"] == "True"
    for name in ("loss", "val_loss"):
        found = {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}
        assert found == metric(logged, name)
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == FILES


@logs_to("trackio")
def test_trackio_reads_the_run(
    logged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trackio import cli

    def trackio(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["trackio", *arguments, "--project", "mine", "--json"])
        cli.main()
        return json.loads(capsys.readouterr().out)

    for name in ("loss", "val_loss"):
        found = trackio("get", "metric", "--run", "run", "--metric", name)
        assert {row["step"]: row["value"] for row in found["values"]} == metric(logged, name)
    artifacts = trackio("list", "artifacts")["artifacts"]
    assert {one["name"] for one in artifacts} == {f"{Path(file).stem}-run" for file in FILES}
    (alert,) = trackio("list", "alerts")["alerts"]
    assert (alert["title"], alert["level"]) == ("run crashed", "error")


def test_a_missing_library_ends_before_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fp8cfg.__main__ import main

    installed = run_loggers.find_spec
    missing = {"wandb": None}
    monkeypatch.setattr(run_loggers, "find_spec", lambda n: missing.get(n, installed(n)))
    monkeypatch.setitem(missing, "tensorboard", installed("json"))  # some library
    monkeypatch.chdir(tmp_path)
    assert main(["recipe=llama_tiny", "log.loggers=[tensorboard,wandb]"]) == 2
    line = "log.loggers=[wandb]: wandb is not installed; pip install 'fp8cfg[wandb]'"
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {line}"
    job = fp8cfg.build(small("log.loggers=wandb"))
    with pytest.raises(ConfigError) as error:
        fp8cfg.fit(job)
    assert str(error.value) == line
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_wandb_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # W&B creates this folder in the working directory.
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        run_loggers.refuse_missing(small("log.loggers=[wandb]"))


class Broken:
    """A logger that fails in one method."""

    method = "write"
    calls = 0

    def __init__(self, run: LoggedRun) -> None:
        self.run_id = self.location = "x"
        self._fail("__init__")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._fail("write")

    def save(self, path: Path) -> None:
        self._fail("save")

    def close(self, state: str) -> None:
        self._fail("close")

    def _fail(self, method: str) -> None:
        if method == Broken.method:
            Broken.calls += 1
            raise SystemExit("out of order")


def train_with(
    logger: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the metrics and the warnings of a run that logs to `logger`."""
    monkeypatch.setattr(tensorboard, "Logger", logger)
    said: list[str] = []
    job = fp8cfg.build(small("trainer.max_steps=3", "log.loggers=[tensorboard]"))
    result = fp8cfg.fit(job, tmp_path / "run", say=said.append)
    assert result.steps == 3
    warnings = [" ".join(text.split()) for text in said if text.startswith("warning")]
    return read_metrics(tmp_path / "run" / "metrics.jsonl"), warnings


@pytest.mark.parametrize("method", ["__init__", "write", "save", "close"])
def test_a_failing_logger_ends_no_run(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "method", method)
    monkeypatch.setattr(Broken, "calls", 0)
    rows, warnings = train_with(Broken, tmp_path, monkeypatch)
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert warnings == [
        "warning: log.loggers=[tensorboard] is off after an error: SystemExit: out of order;"
        " metrics.jsonl has all metrics"
    ]
    assert Broken.calls == 1


@pytest.mark.parametrize("is_full", [False, True])
def test_a_hanging_logger_ends_no_run(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    class Hanging(Broken):
        def write(self, step: int, values: Mapping[str, float]) -> None:
            released.wait(60)

    monkeypatch.setattr(Broken, "method", "")
    monkeypatch.setattr(run_loggers, "CLOSE_SECONDS", 0.1)
    if is_full:
        monkeypatch.setattr(run_loggers, "MAX_WAITING", 1)
    try:
        rows, warnings = train_with(Hanging, tmp_path, monkeypatch)
    finally:
        released.set()
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    reason = "1 rows wait to be written" if is_full else "did not finish in time"
    assert len(warnings) == 1 and reason in warnings[0]


def test_loggers_that_hang_share_the_time_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_loggers, "CLOSE_SECONDS", 10.0)
    waits: list[float] = []

    class HangingThread:
        error = None
        logger = Broken

        def add(self, call: object) -> None: ...

        def join(self, seconds: float) -> None:
            waits.append(seconds)
            now[0] += seconds

    now = [100.0]
    monkeypatch.setattr(run_loggers.time, "monotonic", lambda: now[0])
    job = fp8cfg.build(small("log.loggers=[tensorboard,mlflow]"))
    loggers = run_loggers.RunLoggers(job, None, 1, print)
    loggers._threads = [HangingThread(), HangingThread()]  # type: ignore[list-item]
    loggers.close("done")
    assert waits == [10.0, 0.0]


def test_only_the_first_rank_logs(tmp_path: Path) -> None:
    job = fp8cfg.build(small("log.loggers=[tensorboard]"))
    loggers = run_loggers.RunLoggers(job, None, 2, print)  # no run folder, as on other ranks
    with loggers:
        loggers.open(0)
        loggers.write(1, {"loss": 1.0})
        loggers.save("recipe.yaml")
    assert not list(tmp_path.iterdir())
