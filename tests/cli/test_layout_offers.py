"""Layouts and memory that are refused: `plan`, a start, `resume` and `launch --local` end with a whole line that is accepted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.backends.choice import BLOCK_CUDA, Hardware
from fp8cfg.cli import launch_run
from fp8cfg.execution import executor as runs
from fp8cfg.planning import hardware, preflight, smoke
from fp8cfg.planning.layout import layout_violations
from fp8cfg.planning.peak_memory import plan_memory
from tests.support.small import small_words

TENSOR, PIPELINE = (
    "trainer.strategy.tensor_model_parallel_size",
    "trainer.strategy.pipeline_model_parallel_size",
)
BYTES = "data.tokenizer=bytes"
CONTEXT = "trainer.strategy.context_parallel_size"


def lines(err: str, where: str) -> list[list[str]]:
    """The words of each line that runs `where`."""
    offers = f"; runs {where}: |; as a smoke run: | · "
    return [shlex.split(line)[1:] for line in re.split(offers, err.splitlines()[-1])[1:]]


@pytest.mark.parametrize(
    ("words", "options", "more"),
    [
        (
            "recipe=llama_8b trainer.devices=1",
            "--gpu h200",
            "trainer.strategy.context_parallel_size=1",
        ),
        (
            f"recipe=llama_8b {TENSOR}=16",
            "--gpu h200 --gpus 4",
            f"{TENSOR}=4 trainer.strategy.context_parallel_size=1",
        ),
        (
            f"recipe=llama_8b {TENSOR}=12 trainer.num_nodes=3 trainer.global_batch_size=516",
            "--gpu h200",
            f"{TENSOR}=4",
        ),
        (
            f"recipe=llama_8b {PIPELINE}=5 trainer.num_nodes=5 trainer.global_batch_size=520",
            "--gpu h200",
            f"{PIPELINE}=1",
        ),
        (f"recipe=llama_8b {TENSOR}=3 trainer.devices=6", "--gpu h200", "trainer.smoke=true"),
    ],
)
def test_plan_ends_with_a_line_that_runs_there(
    words: str, options: str, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split(), *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(
        ("error: trainer.strategy.", "error: trainer.num_nodes x trainer.devices = ")
    )
    for offered in lines(err, "there"):
        assert main(["plan", *offered, *options.split()]) == 0
    assert set(more.split()) <= set(lines(err, "there")[0])


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (f"recipe=qwen25_72b {TENSOR}=1 trainer.global_batch_size=24", "--gpu h200 --gpus 16"),
        (f"recipe=llama_8b {TENSOR}=3 trainer.global_batch_size=510", "--gpu h200 --gpus 3"),
    ],
)
def test_what_gave_way_is_written_in_a_line_for_other_gpus(
    words: str, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line as it is typed gives the ranks and the batch that were searched for."""
    assert main(["plan", *words.split(), *options.split()]) == 2
    offered, batch = lines(capsys.readouterr().err, "there"), words.rpartition("=")[2]
    blanks = ["data=jsonl", "data.path=PATH", "data.tokenizer=FOLDER"]
    assert offered and all(line[-3:] == blanks for line in offered)
    assert all(line[-4].startswith("trainer.") for line in offered)
    for line in offered:
        assert main(["plan", *line, *options.split()]) == 0
        t = fp8cfg.compose(line).trainer
        assert (t.num_nodes * t.devices, t.global_batch_size) == (
            int(options.split()[-1]),
            int(batch),
        )


def test_the_nearest_layout_divides_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "recipe=llama_8b", "--gpus", "3"]) == 2
        and "nearest is 4 (--gpus 4); runs there" in capsys.readouterr().err
    )
    assert main(["plan", "recipe=llama_8b", "--gpus", "1"]) == 2
    assert (
        "nearest is 2 (--gpus 2), or trainer.strategy.context_parallel_size=1; runs there"
        in capsys.readouterr().err
    )


def test_a_start_ends_with_lines_that_run_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "recipe=llama_tiny",
                "precision=bf16_fp8",
                f"{TENSOR}=2",
                "trainer.accelerator=cpu",
                f"log.dir={tmp_path}",
            ]
        )
        == 2
    )
    offered = lines(capsys.readouterr().err, "here")
    assert not list(tmp_path.iterdir())
    assert [words[-1] for words in offered] == [f"{TENSOR}=1", "trainer.smoke=true"]
    for words in offered:
        assert layout_violations(smoke.cut_recipe(fp8cfg.compose(words), 1), 1) == []


def test_a_smoke_run_cuts_a_layout_that_the_gpus_do_not_have() -> None:
    recipe = fp8cfg.compose(
        ["recipe=llama_8b", "trainer.devices=1", f"{TENSOR}=6", "trainer.smoke=true"]
    )
    layouts = [smoke.cut_recipe(recipe, ranks).trainer.strategy for ranks in (1, 4)]
    assert [(s.tensor_model_parallel_size, s.context_parallel_size) for s in layouts] == [
        (1, 1),
        (2, 2),
    ]
    with pytest.raises(fp8cfg.ConfigError, match="set it to false"):
        fp8cfg.compose(
            ["recipe=llama_8b", "trainer.strategy.sequence_parallel=true", "trainer.smoke=true"]
        )


@pytest.mark.parametrize(
    "words",
    [
        [
            "recipe=llama_405b",
            BYTES,
            "precision=bf16_fp8",
            "trainer.num_nodes=1",
            f"{TENSOR}=8",
            f"{PIPELINE}=1",
            "trainer.strategy.virtual_pipeline_model_parallel_size=null",
            "trainer.strategy.context_parallel_size=1",
        ],
        ["recipe=llama_tiny", f"{TENSOR}=4"],
    ],
    ids=["memory", "composition"],
)
def test_launch_refuses_before_there_is_a_folder(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["launch", "--local", "2", *words, "trainer.accelerator=cpu", f"log.dir={tmp_path}"]
    assert main(words) == 2
    offered = lines(capsys.readouterr().err, "here")
    assert not list(tmp_path.iterdir()) and all(line[:3] == words[:3] for line in offered)
    started: list[fp8cfg.Recipe] = []
    monkeypatch.setattr(
        runs,
        "run",
        lambda recipe, executor: started.append(recipe) or fp8cfg.Execution(tmp_path, 0),
    )
    assert [main(line) for line in offered] == [0] * len(offered) == [0] * len(started)


@pytest.mark.parametrize("backend", ["torchao", "te", "msamp"])
def test_a_backend_that_splits_no_matrices_is_refused_with_one_that_does(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By launch, by the ranks that a launcher starts, and for GPUs that are not here."""
    words = [
        "recipe=llama_tiny",
        "precision=bf16_fp8_current",
        f"backend={backend}",
        f"{TENSOR}=2",
        f"log.dir={tmp_path}",
    ]
    why = f"backend={backend}: its layers do not support tensor_model_parallel_size=2; set backend=native"
    for gpus in ("2", "1"):  # one of which has whole replicas
        assert main(["plan", *words, "--gpus", gpus]) == 2
        offered = lines(capsys.readouterr().err, "there")
        assert offered and [main(["plan", *line, "--gpus", gpus]) for line in offered] == [0] * len(
            offered
        )
    words += ["trainer.accelerator=cpu"]
    assert main(["launch", "--local", "2", *words]) == 2
    err = capsys.readouterr().err
    offered = lines(err, "here")
    assert why in err
    monkeypatch.setattr(runs, "run", lambda recipe, executor: fp8cfg.Execution(tmp_path, 0))
    assert (
        "backend=native" in offered[0]
        and f"{TENSOR}=2" in offered[0]
        and [main(line) for line in offered] == [0] * len(offered)
    )
    launched = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert main(words) == 2
    assert all(
        {*started} <= {*line, "trainer.devices=2"}
        for started, line in zip(lines(capsys.readouterr().err, "here"), offered, strict=True)
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "nodes", "more"),
    [
        ("recipe=llama_70b precision=bf16_fp8", 4, ["trainer.smoke=true"]),
        ("recipe=llama_tiny trainer.num_nodes=2", 2, ["trainer.num_nodes=1", "trainer.smoke=true"]),
    ],
)
def test_launch_on_one_machine_of_what_is_meant_for_several_ends_with_lines_that_it_starts(
    words: str,
    nodes: int,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "launch",
                "--local",
                "2",
                *words.split(),
                BYTES,
                "trainer.accelerator=cpu",
                f"log.dir={tmp_path}",
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    offered = lines(err, "here")
    assert err.startswith(
        f"error: trainer.num_nodes={nodes}: --local has one machine; write trainer.num_nodes=1, or launch with --slurm; "
    )
    assert ("; the whole model needs at least " in err) == ("70b" in words)
    assert not list(tmp_path.iterdir()) and [
        word in line for word, line in zip(more, offered, strict=True)
    ] == [True] * len(more)
    monkeypatch.setattr(runs, "run", lambda recipe, executor: fp8cfg.Execution(tmp_path, 0))
    assert [main(line) for line in offered] == [0] * len(offered)


def test_launch_takes_a_layout_of_its_own_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[fp8cfg.Recipe] = []
    monkeypatch.setattr(
        runs,
        "run",
        lambda recipe, executor: started.append(recipe) or fp8cfg.Execution(tmp_path, 0),
    )
    assert (
        main(
            [
                "launch",
                "--local",
                "2",
                "recipe=llama_tiny",
                f"{TENSOR}=2",
                "trainer.accelerator=cpu",
                f"log.dir={tmp_path}",
            ]
        )
        == 0
    )
    assert started[0].trainer.devices == 2


Machine = Callable[..., list[tuple[int, list[str]]]]


@pytest.fixture
def machine_of(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes a machine of so many H200s, and gives the ranks and words that it starts."""

    def of(gpus: int) -> list[tuple[int, list[str]]]:
        begun: list[tuple[int, list[str]]] = []
        for module in (preflight, hardware):
            monkeypatch.setattr(module, "count_gpus", lambda: gpus)
            monkeypatch.setattr(module, "free_memory", lambda device, ranks=None: 139 << 30)
        monkeypatch.setattr(
            hardware, "find_hardware", lambda _: Hardware("cuda", (9, 0), BLOCK_CUDA)
        )
        monkeypatch.setattr(
            launch_run, "launch_ranks", lambda ranks, argv: begun.append((ranks, [*argv])) or 0
        )
        return begun

    return of


@pytest.mark.parametrize(
    ("words", "gpus", "more"),
    [
        (
            "recipe=olmo2_32b precision=bf16_fp8 trainer.devices=6 trainer.global_batch_size=96",
            4,
            f"{TENSOR}=4 trainer.num_nodes=1 trainer.devices=4",
        ),
        (f"recipe=llama_8b {TENSOR}=16", 4, f"{TENSOR}=4"),
        (f"recipe=llama_8b precision=bf16_fp8 {TENSOR}=8 trainer.devices=4", 2, f"{TENSOR}=2"),
    ],
)
def test_a_start_on_gpus_ends_with_lines_that_start_ranks(
    words: str, gpus: int, more: str, machine_of: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine, one, is a part of what was searched, where the recipe is meant for others."""
    begun = machine_of(gpus)
    assert main([*words.split(), BYTES]) == 2
    offered = lines(capsys.readouterr().err, "here")
    assert set(more.split()) <= set(offered[0]) and offered[-1][-1] == "trainer.smoke=true"
    assert [main(line) for line in offered] == [0] * len(offered) and begun == [
        (gpus, line) for line in offered
    ]


def test_of_several_nodes_a_line_is_printed_where_it_runs(
    machine_of: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend that the GPUs here do not have does not multiply on the nodes, which have such GPUs, nor in a smoke run here."""
    monkeypatch.setattr(hardware, "count_gpus", lambda: 0)
    monkeypatch.setattr(hardware, "find_hardware", lambda _: Hardware("cpu"))
    assert (
        main(
            [
                "recipe=qwen25_14b",
                BYTES,
                "precision=bf16_fp8",
                "backend=te",
                "trainer.num_nodes=2",
                f"{TENSOR}=1",
            ]
        )
        == 2
    )
    assert capsys.readouterr().err.endswith(
        "FIRST_NODE is the name of one of them, which the scripts of fp8cfg export slurm find\n"
    )
    begun = machine_of(4)
    assert main(
        ["recipe=llama_70b", BYTES, "precision=bf16_fp8_block"]
    ) == 2 and capsys.readouterr().err.startswith("error: fp8.format=hybrid: ")
    assert main(["recipe=llama_70b", BYTES, "precision=bf16_fp8"]) == 2
    (line,) = lines(capsys.readouterr().err, "here")
    assert main(line) == 0 and begun == [(4, line)]


@pytest.mark.parametrize(
    ("words", "trains"),
    [
        ("3 recipe=llama_tiny", (3, 48, 16)),
        ("3 recipe=llama_tiny trainer.micro_batch_size=3", (3, 18, 3)),
        ("4 recipe=llama_tiny trainer.devices=4", (4, 16, 4)),
        ("2 recipe=llama_tiny trainer.micro_batch_size=8", (2, 16, 8)),
    ],
)
def test_ranks_that_are_launched_are_those_of_the_recipe(
    words: str,
    trains: tuple[int, int, int],
    machine_of: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was not written gives way to them, as to trainer.devices."""
    machine_of(4)
    started: list[fp8cfg.Recipe] = []
    monkeypatch.setattr(
        runs,
        "run",
        lambda recipe, executor: started.append(recipe) or fp8cfg.Execution(tmp_path, 0),
    )
    assert main(["launch", "--local", *words.split()]) == 0
    t = started[0].trainer
    assert (t.devices, t.global_batch_size, t.micro_batch_size) == trains


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "5 recipe=llama_tiny",
            "--local 5: each process takes a GPU, and this machine has 4; write --local 4",
        ),
        (
            f"2 recipe=llama_70b {BYTES} trainer.num_nodes=1",
            f"{TENSOR}=4: needs a multiple of 4 ranks, got 2; launch 4 ranks or set it to 2",
        ),
    ],
)
def test_launch_says_what_this_machine_starts(
    words: str, line: str, machine_of: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_of(4)
    assert main(["launch", "--local", *words.split(), f"log.dir={tmp_path}/runs"]) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith(f"error: {line}\n")
        and "num_nodes=16" not in err
        and not list(tmp_path.iterdir())
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            f"{CONTEXT}=3",
            f"{CONTEXT}=3: needs a multiple of 3 ranks, got 2; launch 3 ranks or set it to 1",
        ),
        (
            f"{CONTEXT}=2 model.seq_length=30",
            "model.seq_length=30: must be a multiple of 2 x context_parallel_size = 4; nearest is 32",
        ),
    ],
)
def test_sequences_that_ranks_do_not_share_are_refused_with_a_line_that_runs(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = "fp8cfg launch --local 2 recipe=llama_tiny"
    assert main([*start.split()[1:], *words.split()]) == 2
    err = capsys.readouterr().err.strip()
    assert re.split("; runs here: |; as a smoke run: ", err)[0] == f"error: {line}"
    assert err.endswith(f"; as a smoke run: {start} {words} trainer.smoke=true")


@pytest.mark.parametrize(
    ("local", "machines"),
    [({}, (1, 4)), ({"LOCAL_WORLD_SIZE": "2"}, (2, 2)), ({"LOCAL_WORLD_SIZE": "3"}, None)],
)
def test_torchrun_takes_a_layout_of_its_own_ranks(
    local: dict[str, str],
    machines: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of machines that are alike."""
    trained: list[fp8cfg.Recipe] = []
    monkeypatch.setattr(launch_run, "launch", lambda recipe, *_: trained.append(recipe) or 0)
    words = ["recipe=llama_tiny", "trainer.accelerator=cpu", f"{TENSOR}=2"]
    assert main(words) == 2 and "set trainer.devices=2, or" in capsys.readouterr().err
    for key, value in {"WORLD_SIZE": "4", **local}.items():
        monkeypatch.setenv(key, value)
    assert main(words) == (0 if machines else 2)
    assert [(r.trainer.num_nodes, r.trainer.devices) for r in trained] == [machines] * len(
        trained
    ) and bool(trained) == bool(machines)
    assert [layout_violations(r, 4) for r in trained] == [[]] * len(trained)
    text = f"trainer: {{accelerator: cpu, strategy: {{{TENSOR.removeprefix('trainer.strategy.')}: 2}}}}"
    for read in (lambda: fp8cfg.compose(words), lambda: fp8cfg.from_yaml(text)):
        with (
            nullcontext()
            if machines
            else pytest.raises(fp8cfg.ConfigError, match=r"set trainer\.devices=2, or")
        ):
            assert ((t := read().trainer).num_nodes, t.devices) == machines
    with pytest.raises(fp8cfg.ConfigError, match=r"= 2; set trainer\.devices=2, or"):
        fp8cfg.compose([*words, "trainer.devices=1"])


def test_a_smoke_run_is_offered_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformer Engine has no CPU, and a smoke run is none that a smoke run cures."""
    words = ["precision=bf16_fp8", f"{TENSOR}=2", "trainer.accelerator=cpu", f"log.dir={tmp_path}"]
    assert (
        main(["recipe=llama_tiny", "backend=te", *words]) == 2
        and "trainer.smoke" not in capsys.readouterr().err
    )
    assert main(["recipe=llama_tiny", *words]) == 2 and "trainer.smoke" in capsys.readouterr().err
    assert (
        main(
            [
                "plan",
                "recipe=llama_405b",
                "trainer.smoke=true",
                "precision=bf16_fp8",
                "model.num_layers=1",
                "--gpus",
                "3",
            ]
        )
        == 0
    )


def test_a_smoke_run_for_which_there_is_no_memory_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on so many ranks that none has a share of the machine in which it fits."""
    monkeypatch.setattr(preflight, "free_memory", lambda device, ranks=None: 1 << 20)
    assert (
        main(
            [
                "launch",
                "--local",
                "2",
                "recipe=llama_tiny",
                "trainer.accelerator=cpu",
                f"log.dir={tmp_path}",
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert "this machine has 1.0 MiB free on cpu; the whole model needs at least " in err
    assert "runs here" not in err


def test_chunks_that_are_too_many_are_refused_with_as_many_as_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "plan",
        "recipe=llama_8b",
        "--gpu",
        "h200",
        f"{PIPELINE}=8",
        "trainer.strategy.context_parallel_size=1",
    ]
    chunks = "trainer.strategy.virtual_pipeline_model_parallel_size"
    assert main([*words, f"{chunks}=6"]) == 2
    assert "nearest is virtual_pipeline_model_parallel_size=4;" in capsys.readouterr().err
    assert main([*words, f"{chunks}=4"]) == 0
    assert main(["plan", "recipe=llama_tiny", "trainer.strategy.pipeline_schedule=auto"]) == 0, (
        "what is no change has an effect"
    )


def test_what_memory_does_not_allow_trains_as_it_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is resumed with more is offered what its checkpoint takes: no smoke run."""
    words = small_words("precision=bf16_fp8", "trainer.max_steps=2", f"log.dir={tmp_path}")
    free = sum(plan_memory(fp8cfg.compose(words), "cpu").values()) - 1
    for module in (preflight, hardware):
        monkeypatch.setattr(module, "free_memory", lambda device, ranks=None: free)
    assert main(words) == 2
    first, smoke_run = lines(capsys.readouterr().err, "here")
    assert (
        not list(tmp_path.iterdir())
        and "model.recompute_granularity=selective" in first
        and "trainer.smoke=true" in smoke_run
    )
    assert main(first) == 0 and "done: 2 steps" in capsys.readouterr().out
    before = {*tmp_path.iterdir()}
    assert main([*words, "trainer.micro_batch_size=4"]) == 0
    capsys.readouterr()
    (run,) = {*tmp_path.iterdir()} - before
    assert main(["resume", str(run), "trainer.max_steps=3", "trainer.micro_batch_size=8"]) == 2
    offered = lines(capsys.readouterr().err, "here")
    resume = ["resume", str(run), "trainer.max_steps=3"]
    recompute = "model.recompute_granularity=selective"
    assert offered == [[*resume, "trainer.micro_batch_size=8", recompute]]
    assert main(offered[0]) == 0 and "done: 3 steps" in capsys.readouterr().out
