"""Ranks that `fp8cfg` starts by itself: how many on a machine with so many GPUs, and what they end with."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.cli import launch_run
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.planning import hardware
from fp8cfg.run_folder import metrics_file
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema.recipe import Recipe
from tests.support.ranks import LIMIT, ROOT, ranks_environment
from tests.support.small import small, small_words

BYTES = "data.tokenizer=bytes"
CONTEXT = ("recipe=llama_8b", BYTES, "trainer.strategy.context_parallel_size=2")
DATA_PARALLEL = ("recipe=llama_8b", BYTES, "trainer.strategy.context_parallel_size=1")


def composed(*words: str) -> Recipe:
    return fp8cfg.compose([*words])


Starts = Callable[[int], list[tuple[int, list[str]]]]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """Makes a machine of so many GPUs, and gives the ranks and words that it starts, which end with 7."""

    def of(gpus: int) -> list[tuple[int, list[str]]]:
        begun: list[tuple[int, list[str]]] = []
        monkeypatch.setattr(hardware, "count_gpus", lambda: gpus)
        monkeypatch.setattr(
            launch_run, "launch_ranks", lambda ranks, argv: begun.append((ranks, [*argv])) or 7
        )
        return begun

    return of


@pytest.mark.parametrize(
    ("words", "gpus", "ranks"),
    [
        (DATA_PARALLEL, 8, 8),
        (DATA_PARALLEL, 4, 4),
        (DATA_PARALLEL, 16, 8),
        (DATA_PARALLEL, 0, 1),
        (DATA_PARALLEL, 7, 4),
        ((*DATA_PARALLEL, "trainer.accelerator=cpu"), 8, 1),
        (("recipe=llama_tiny",), 8, 1),
        (CONTEXT, 8, 8),
        (CONTEXT, 7, 4),
        (CONTEXT, 3, 2),
        (CONTEXT, 1, 1),
        ((*CONTEXT, "trainer.strategy.tensor_model_parallel_size=2"), 7, 4),
        ((*CONTEXT, "trainer.strategy.pipeline_model_parallel_size=2"), 7, 4),
        ((*CONTEXT, "trainer.strategy.pipeline_model_parallel_size=2", "storage.shard=fsdp"), 8, 8),
        (
            (
                *DATA_PARALLEL,
                "trainer.strategy.pipeline_model_parallel_size=2",
                "trainer.global_batch_size=4",
            ),
            8,
            4,
        ),
        ((*DATA_PARALLEL, "trainer.strategy.data_parallel_replicate_size=2"), 8, 8),
        (
            (
                *DATA_PARALLEL,
                "lora.enabled=true",
                "lora.dropout=0.1",
                "trainer.strategy.tensor_model_parallel_size=2",
            ),
            8,
            1,
        ),
        (("recipe=llama_8b", "trainer.smoke=true"), 7, 7),
        (("recipe=llama_405b", "trainer.smoke=true"), 4, 4),
    ],
)
def test_as_many_ranks_as_gpus_and_whole_batches(
    words: tuple[str, ...], gpus: int, ranks: int
) -> None:
    assert launch_run.count_ranks(composed(*words), gpus) == ranks


@pytest.mark.parametrize(
    ("words", "gpus", "ranks", "said"),
    [
        (
            DATA_PARALLEL,
            7,
            4,
            "note: 4 of 7 GPUs are used, over which trainer.global_batch_size=512 divides in microbatches of 1\n",
        ),
        (
            CONTEXT,
            3,
            2,
            "note: 2 of 3 GPUs are used, 2 to a replica, over which trainer.global_batch_size=512 divides in microbatches of 1\n",
        ),
        (DATA_PARALLEL, 8, 8, ""),
        ((*DATA_PARALLEL, "trainer.max_steps=3"), 8, 8, ""),
    ],
)  # what gives way to it the first rank says
def test_fewer_ranks_than_gpus_are_said(
    words: tuple[str, ...],
    gpus: int,
    ranks: int,
    said: str,
    starts: Starts,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun = starts(gpus)
    assert main([*words]) == 7 and begun == [(ranks, [*words])]
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("gpus", [8, 0])
def test_of_several_nodes_the_line_of_each_is_printed(gpus: int, starts: Starts) -> None:
    """On a login node without GPUs too, which is none of them."""
    argv = [*DATA_PARALLEL, "trainer.num_nodes=2", "name=two_nodes"]
    starts(gpus)
    with pytest.raises(fp8cfg.ConfigError) as e:
        launch_run.start_ranks(
            ResolvedRecipe(composed(*argv)), argv, lambda fit: f"fp8cfg {' '.join(fit.words)}"
        )
    (line,) = e.value.problems
    assert line.startswith(
        "trainer.num_nodes=2: this process would be the only rank; start it on each node with torchrun: torchrun --nnodes 2 "
        f"--nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint {socket.gethostname() if gpus else 'FIRST_NODE'}:29400 "
    )
    first = (
        ""
        if gpus
        else "; FIRST_NODE is the name of one of them, which the scripts of fp8cfg export slurm find"
    )
    assert line.endswith(
        f" --rdzv-id two_nodes -m fp8cfg {' '.join(argv)}{first}; as a smoke run: fp8cfg trainer.smoke=true"
    )


TENSOR = "trainer.strategy.tensor_model_parallel_size"


def run_of(folder: Path, *words: str) -> str:
    """A run folder without a checkpoint."""
    recipe = small("precision=bf16_fp8", f"log.dir={folder}", *words)
    with RunFolder.create(folder, recipe.name, datetime.now(), fp8cfg.to_yaml(recipe)) as run:
        return str(run.path)


@pytest.mark.parametrize("verb", ["resume", "rerun"])
def test_runs_that_go_on_and_are_repeated_start_ranks_too(
    verb: str, tmp_path: Path, starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the words that were typed; a rank starts none."""
    begun, run = (
        starts(6),
        run_of(
            tmp_path,
            "trainer.devices=4",
            "trainer.micro_batch_size=2",
            f"{TENSOR}=2",
            "model.num_query_groups=2",
        ),
    )
    argv = [
        verb,
        run,
        "trainer.max_steps=5",
        *(["--allow", "fp8.margin"] if verb == "resume" else []),
    ]
    assert main(argv) == 7 and begun == [(4, argv)]
    assert capsys.readouterr() == ("", "")
    assert (
        main([verb, run, "trainer.devices=2", "trainer.micro_batch_size=8"]) == 7
        and begun[-1][0] == 2
    )
    assert main([verb, run, "trainer.seed=x"]) == 2 and len(begun) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "3")
        assert main([verb, run]) == 2 and len(begun) == 2, "three ranks are no multiple of two"


def test_a_smoke_run_goes_on_with_the_layout_that_it_has(tmp_path: Path, starts: Starts) -> None:
    """It is cut to other ranks only where it starts anew."""
    begun = starts(3)
    run = run_of(
        tmp_path,
        "trainer.devices=4",
        "trainer.micro_batch_size=2",
        f"{TENSOR}=2",
        "model.num_query_groups=2",
        "trainer.smoke=true",
    )
    assert [main([verb, run]) for verb in ("resume", "rerun")] == [7, 7] and [
        ranks for ranks, _ in begun
    ] == [2, 3]


@pytest.mark.parametrize(
    ("verb", "words", "more"),
    [
        ("resume", "trainer.num_nodes=2", "trainer.num_nodes=1"),
        ("rerun", "trainer.num_nodes=2", "trainer.smoke=true"),
        ("resume", "", f"trainer.devices=1 {TENSOR}=1"),
        ("rerun", "", f"trainer.devices=1 {TENSOR}=1"),
        ("resume", "--allow fp8.margin", f"trainer.devices=1 {TENSOR}=1"),
    ],
)
def test_what_they_do_not_have_here_is_refused_with_a_line_that_runs(
    verb: str,
    words: str,
    more: str,
    tmp_path: Path,
    starts: Starts,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A layout or several nodes. Of a run that goes on the line is no smoke run, which is another one."""
    begun, run = (
        starts(4),
        run_of(
            tmp_path,
            "trainer.devices=2",
            "trainer.micro_batch_size=4",
            f"{TENSOR}=2",
            "model.num_query_groups=2",
        ),
    )
    argv = [verb, run, *words.split(), *([] if "nodes" in words else ["trainer.devices=1"])]
    assert main(argv) == 2 and not begun
    out, err = capsys.readouterr()
    assert (
        out == "" and err.count("\n") == 1 and ("torchrun --nnodes 2 " in err) == ("nodes" in words)
    )
    problem, *lines = re.split("; runs here: |; as a smoke run: ", err.rstrip())
    assert problem.endswith(f"-m fp8cfg {shlex.join(argv)}") == ("nodes" in words)
    assert ("smoke" in err) == (verb == "rerun")
    offered = shlex.split(lines[0])
    assert offered[:2] == ["fp8cfg", verb] and run in offered and set(more.split()) <= set(offered)
    assert ("--allow" in offered) == ("--allow" in words)
    assert main(offered[1:]) in (0, 7), "trains, or starts ranks that do"


def test_a_launcher_is_seen_by_its_variables() -> None:
    assert (
        not launch_run.is_launched({})
        and launch_run.is_launched({"RANK": "0"})
        and launch_run.is_launched({"WORLD_SIZE": "1"})
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    [(["trainer.smoke=true"], 0), (["data=text", "data.path=nowhere"], 2)],
    ids=["trains", "refused"],
)
def test_ranks_are_started_and_their_exit_code_is_that_of_the_command(
    words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    assert (
        launch_run.launch_ranks(
            2, ["recipe=llama_tiny", "precision=bf16_fp8", "trainer.micro_batch_size=8", *words]
        )
        == code
    )
    runs = list(tmp_path.glob("runs/*/checkpoints/*"))
    assert sorted(p.name for p in runs) == (["step-00000002", "step-00000003"] if code == 0 else [])
    monkeypatch.setattr(hardware, "count_gpus", lambda: 2)
    for last in (path for path in runs if path.name == "step-00000003"):
        shutil.rmtree(last)
        assert main(["resume", str(last.parents[1])]) == 0
        assert {path.name[:10] for path in (last / "model").iterdir()} == {
            "rank-00000",
            "rank-00001",
        }


@pytest.mark.slow
def test_the_line_of_several_nodes_trains_on_each_as_it_is_printed(
    tmp_path: Path, starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two agents of torchrun on this host, which stands for the first node: one run of two ranks."""
    starts(0)
    assert (
        main(
            small_words(
                "trainer.num_nodes=2",
                "trainer.micro_batch_size=4",
                "trainer.max_steps=2",
                f"log.folder={tmp_path}/run",
            )
        )
        == 2
    )
    torchrun, *words = shlex.split(
        capsys.readouterr().err.partition("with torchrun: ")[2].partition("; ")[0]
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words[words.index("FIRST_NODE:29400")] = f"localhost:{port}"
    command = {"torchrun": [sys.executable, "-m", "torch.distributed.run"]}[torchrun]
    environment = {**ranks_environment(1), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [*command, *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        said = [node.communicate(timeout=LIMIT)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert [
        sum(text.count(line) for text in said)
        for line in ("done: 2 steps", "sent in a step by the first rank: ")
    ] == [1, 1]
    assert [
        m["step"]
        for m in metrics_file.read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "loss" in m
    ] == [
        1,
        2,
    ]
