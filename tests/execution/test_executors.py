"""Executors of `fp8cfg.run`: on this machine, in a queue that stands for Slurm's, and nemo_run's own where it is installed."""

from __future__ import annotations

import importlib.util
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.execution import executor as executors
from fp8cfg.execution import executor as nemo
from fp8cfg.execution.executor import Command, RunFailed
from fp8cfg.run_folder import metrics_file
from fp8cfg.schema.recipe import Recipe
from tests.cli.test_hydra_habits import TINY


def tiny(folder: Path, *words: str) -> Recipe:
    return fp8cfg.compose(
        [
            *(w for w in TINY if not any(w.startswith(x.partition("=")[0] + "=") for x in words)),
            f"log.dir={folder}",
            "name=one",
            *words,
        ]
    )


@dataclass
class Recorded:
    """An executor of one's own."""

    code: int | None = 0
    seen: list[Command] = field(default_factory=list)

    def execute(self, command: Command) -> int | None:
        self.seen.append(command)
        return self.code


def test_an_executor_gets_a_command_that_is_the_recipe(tmp_path: Path) -> None:
    mine, recipe = (
        Recorded(),
        tiny(tmp_path, "trainer.devices=4", "trainer.num_nodes=2", "trainer.global_batch_size=16"),
    )
    done = fp8cfg.run(recipe, mine)
    (command,) = mine.seen
    assert (
        done == fp8cfg.Execution(command.folder, 0)
        and done.folder.parent == tmp_path
        and (command.ranks, command.nodes) == (4, 2)
    )
    file, *words = command.words()
    assert fp8cfg.from_yaml(Path(file)) == recipe and words == [
        f'log.folder="{done.folder}"',
        "log.resume=auto",
    ]
    (done.folder / "recipe.yaml").write_text("")
    with pytest.raises(
        fp8cfg.ConfigError, match=r"already contains a run; continue it with fp8cfg resume"
    ):
        fp8cfg.run(recipe, mine, done.folder)
    recipe.log.folder, recipe.log.resume = str(done.folder), "auto"
    assert fp8cfg.run(recipe, mine).folder == done.folder
    recipe.log.folder, recipe.log.resume = None, "never"
    assert fp8cfg.run(recipe, Recorded(None)).exit_code is None and isinstance(
        mine, fp8cfg.Executor
    )
    with pytest.raises(RunFailed, match="the run ended with exit code 3") as e:
        fp8cfg.run(recipe, Recorded(3), tmp_path / "three")
    assert e.value.exit_code == 3


@pytest.mark.parametrize("name", ["it's", 'a "b"', "a\\'b", "a, b=1"])
def test_a_folder_of_any_name_is_the_commands(name: str, tmp_path: Path) -> None:
    file, *words = Command(tmp_path / name).words()
    composed = fp8cfg.compose(["recipe=llama_tiny", *words])
    assert file == f"{tmp_path / name}/request.yaml"
    assert composed.log.folder == str(tmp_path / name)


@pytest.mark.parametrize("started", [False, True])
def test_a_rejected_run_keeps_the_request_of_a_job_in_the_queue(
    started: bool, tmp_path: Path
) -> None:
    """A job that waits in a queue, or is requeued, reads it again."""
    folder = tmp_path / "run"
    fp8cfg.run(tiny(tmp_path), Recorded(None), folder)
    request = (folder / "request.yaml").read_bytes()
    if started:
        (folder / "recipe.yaml").write_text("")
    other = tiny(
        tmp_path,
        "trainer.num_nodes=2",
        "trainer.micro_batch_size=1",
        "log.resume=auto",
        f"log.folder={folder}",
    )
    with pytest.raises(fp8cfg.ConfigError, match="TorchrunExecutor has one machine"):
        fp8cfg.run(other, fp8cfg.TorchrunExecutor())
    assert (folder / "request.yaml").read_bytes() == request
    with pytest.raises(RunFailed):
        fp8cfg.run(other, Recorded(2))
    assert (folder / "request.yaml").read_bytes() == request


def test_what_is_refused_before_anything_starts(tmp_path: Path) -> None:
    recipe = tiny(tmp_path)
    for wrong in ("local", fp8cfg.LocalExecutor, 5):
        with pytest.raises(fp8cfg.ConfigError, match="executor: expected one with execute"):
            fp8cfg.run(recipe, wrong)
    with pytest.raises(fp8cfg.ConfigError, match="expected a Recipe, got str"):
        fp8cfg.run("llama_tiny")
    recipe.model.num_attention_heads = 3
    with pytest.raises(fp8cfg.ConfigError, match="not a multiple"):
        fp8cfg.run(recipe, Recorded())
    with pytest.raises(fp8cfg.ConfigError, match="TorchrunExecutor has one machine"):
        fp8cfg.run(
            tiny(tmp_path / "runs" / "log", "trainer.num_nodes=2", "trainer.micro_batch_size=1"),
            fp8cfg.TorchrunExecutor(),
        )
    assert not list(tmp_path.iterdir())
    with pytest.raises(fp8cfg.ConfigError, match="ranks=0: must be at least 1"):
        fp8cfg.TorchrunExecutor(0)


def test_processes_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words that they get; test_a_run_on_this_machine runs them."""
    ran: list[list[str]] = []
    monkeypatch.setattr(executors, "_run_python", lambda argv: ran.append(list(argv)) or 0)
    fp8cfg.run(tiny(tmp_path), folder=tmp_path / "a")
    fp8cfg.run(
        tiny(tmp_path, "trainer.devices=2", "trainer.micro_batch_size=1"),
        fp8cfg.TorchrunExecutor(),
        tmp_path / "b",
    )
    fp8cfg.run(tiny(tmp_path), fp8cfg.TorchrunExecutor(3), tmp_path / "c")
    assert [r[:-3] for r in ran] == [
        ["-m", "fp8cfg"],
        ["-m", "fp8cfg.execution.executor", "2"],
        ["-m", "fp8cfg.execution.executor", "3"],
    ]
    monkeypatch.setenv("RANK", "1")
    assert (
        "RANK" not in executors.child_environment()
        and Path(
            executors.child_environment()["PYTHONPATH"].split(os.pathsep)[0], "fp8cfg"
        ).is_dir()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "executor", [fp8cfg.LocalExecutor(), fp8cfg.TorchrunExecutor(2)], ids=["local", "torchrun"]
)
def test_a_run_on_this_machine(executor: fp8cfg.Executor, tmp_path: Path) -> None:
    words = ["trainer.micro_batch_size=1"]
    done = fp8cfg.run(tiny(tmp_path, *words), executor)
    assert (
        done.exit_code == 0
        and [m["step"] for m in metrics_file.read_metrics(done.folder / "metrics.jsonl")][-1] == 2
    )
    with pytest.raises(RunFailed) as e:
        fp8cfg.run(tiny(tmp_path, *words, "data=text", "data.path=nowhere"), executor)
    assert e.value.exit_code == 2


SBATCH = """#!/bin/bash
# A queue of one machine: starts the job again as often as it is put back, from a copy, as Slurm does: submitit moves the script.
cp "$1" $QUEUE/script
echo "Submitted batch job 77"
(
  export SLURM_JOB_ID=77 SLURM_JOBID=77 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_NODELIST=localhost
  export SLURM_NTASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=1
  for n in 0 1 2 3; do
    SLURM_RESTART_COUNT=$n bash $QUEUE/script > $QUEUE/job.$n.log 2>&1
    [ -e $QUEUE/requeue ] || break
    rm $QUEUE/requeue
  done
  touch $QUEUE/ended
) > /dev/null 2>&1 &
"""
SRUN = """#!/bin/bash
while [[ "$1" == -* ]]; do if [[ "$1" == --output || "$1" == --error ]]; then shift; fi; shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [ "$1" == show ]; then echo localhost; else echo "$@" >> $QUEUE/scontrol.log; touch $QUEUE/requeue; fi
"""
SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
if [ -e $QUEUE/ended ]; then echo "77|COMPLETED|localhost"; else echo "77|RUNNING|localhost"; fi
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with commands that stand for Slurm's."""
    pytest.importorskip("submitit", reason="pip install 'fp8cfg[slurm]'")
    folder = tmp_path / "queue"
    folder.mkdir()
    for name, text in {
        "sbatch": SBATCH,
        "srun": SRUN,
        "scontrol": SCONTROL,
        "sacct": SACCT,
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE", str(folder))
    return folder


def test_slurm_is_asked_for_what_the_recipe_is_meant_for(queue: Path, tmp_path: Path) -> None:
    """A batch script, which is not run."""
    (queue / "sbatch").write_text("#!/bin/bash\necho Submitted batch job 5\n")
    recipe = tiny(
        tmp_path, "trainer.num_nodes=4", "trainer.devices=8", "trainer.global_batch_size=64"
    )
    done = fp8cfg.run(recipe, fp8cfg.SlurmExecutor({"partition": "gpu", "time": 30}))
    script = (done.folder / "slurm/5_submission.sh").read_text() if done.exit_code is None else ""
    for line in (
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--partition=gpu",
        "--time=30",
        "--requeue",
        "--signal=USR2@90",
        f"--job-name={done.folder.name}",
    ):
        assert f"#SBATCH {line}\n" in script, script
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"^SlurmExecutor: partitoin=gpu: no option of sbatch; did you mean 'partition'\?$",
    ):
        fp8cfg.run(recipe, fp8cfg.SlurmExecutor({"partitoin": "gpu"}))


def test_what_submitit_has_no_name_for_goes_to_sbatch_whose_refusal_is_one_line(
    queue: Path, tmp_path: Path
) -> None:
    (queue / "sbatch").write_text(
        "#!/bin/bash\ncp $1 $QUEUE/script\necho \"sbatch: unrecognized option '--gizmo=1'\" >&2\nexit 1\n"
    )
    given = {"reservation": "mine", "gizmo": 1, "cpus-per-task": 4, "setup": "module load cuda"}
    with pytest.raises(
        fp8cfg.ConfigError, match=r"^SlurmExecutor: sbatch: unrecognized option '--gizmo=1'$"
    ):
        fp8cfg.run(tiny(tmp_path), fp8cfg.SlurmExecutor(given))
    script = (queue / "script").read_text()
    for line in (
        "#SBATCH --reservation=mine",
        "#SBATCH --gizmo=1",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --requeue",
        "module load cuda",
    ):
        assert f"\n{line}\n" in script, script
    assert [each.name for each in tmp_path.iterdir()] == ["queue"]


def test_without_slurm_or_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        fp8cfg.ConfigError, match=r"there is no srun here|pip install 'fp8cfg\[slurm\]'"
    ):
        fp8cfg.run(tiny(tmp_path), fp8cfg.SlurmExecutor())


@pytest.mark.slow
def test_a_slurm_job_whose_time_is_over_goes_on_in_the_queue(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's warning comes at the first checkpoint, which alone ends so many steps; the run stops with 75, is put back, and goes on
    to the end, which is three steps on."""
    (queue / "srun").write_text(
        SRUN.replace(
            'exec "$@"',
            """if [ $SLURM_RESTART_COUNT == 1 ]; then
  last=$(ls $RUN/checkpoints | grep -E '^step-[0-9]+$' | tail -1)
  sed -i "s/max_steps: 1000000/max_steps: $((10#${last#step-} + 3))/" $RUN/request.yaml
fi
"$@" &
task=$!
if [ $SLURM_RESTART_COUNT == 0 ]; then
  until ls $RUN/checkpoints/step-*/MANIFEST.json; do sleep 0.1; done
  kill -USR2 $task
fi
wait $task""",
        )
    )
    folder = tmp_path / "run"
    monkeypatch.setenv("RUN", str(folder))
    recipe = tiny(
        tmp_path,
        "trainer.max_steps=1000000",
        "checkpoint.every_n_steps=10",
        "trainer.accelerator=cpu",
        "optim.warmup_steps=2",
    )
    done = fp8cfg.run(recipe, fp8cfg.SlurmExecutor(wait=True), folder)
    log = "".join(p.read_text() for p in sorted(queue.glob("job.*.log")))
    assert done.exit_code == 0, log
    assert (queue / "scontrol.log").read_text() == "requeue 77\n" and sorted(
        p.name for p in queue.glob("job.*.log")
    ) == ["job.0.log", "job.1.log"]
    last = fp8cfg.from_yaml(folder / "request.yaml").trainer.max_steps
    assert [m["step"] for m in metrics_file.read_metrics(folder / "metrics.jsonl")] == list(
        range(1, last + 1)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what it imports warns
@pytest.mark.skipif(not importlib.util.find_spec("nemo_run"), reason="nemo_run is not installed")
def test_nemo_runs_own_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "home"))
    import nemo_run

    done = fp8cfg.run(tiny(tmp_path), nemo_run.LocalExecutor())
    assert done.exit_code == 0 and (done.folder / "coverage.json").exists()
    with pytest.raises(RunFailed):
        fp8cfg.run(tiny(tmp_path, "data=text", "data.path=nowhere"), nemo_run.LocalExecutor())


def test_nemo_runs_executors_are_told_by_their_class() -> None:
    base = type("Executor", (), {"__module__": "nemo_run.core.execution.base"})
    assert nemo.is_nemo_executor(
        type("LocalExecutor", (base,), {})()
    ) and not nemo.is_nemo_executor(fp8cfg.LocalExecutor())
