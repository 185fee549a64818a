"""Launched ranks of which one stands still, ends or is killed: the others name it, and a launcher that starts them again goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fp8cfg.__main__ import main
from fp8cfg.parallel import process_group
from tests.parallel.test_stalled_ranks import until
from tests.run_folder.test_log_folder import SAVES, steps
from tests.support.ranks import LIMIT, ROOT, ended, launch, ranks_environment, running
from tests.support.small import small_words

ENDS = """
import json, os, sys, time

from fp8cfg.schema.errors import Fp8cfgError
from fp8cfg.schema.training import Trainer
from fp8cfg.parallel.process_group import world

rank, case = int(os.environ["RANK"]), sys.argv[1]
try:
    with world("cpu", Trainer(timeout={"start": 60, "step": 4})) as ranks:
        ranks.stall_watch.timeout.start = 4
        first = ranks.text(str(os.getpid()))
        ranks.apply_timeout("step", 3)
        if case == "data" and rank == 0:
            raise RuntimeError("tokens of the data server: Connection refused")
        if case == "data":
            ranks.any(True)
        if case == "late" and rank == 1:
            while os.path.exists(f"/proc/{first}"):
                time.sleep(0.1)
except (RuntimeError, Fp8cfgError) as e:
    print(json.dumps([rank, type(e).__name__, str(e)]), flush=True)
"""


@pytest.mark.parametrize("case", ["data", "late"])
def test_how_ranks_end(case: str, tmp_path: Path) -> None:
    """One with an error of its own that reads like one of gloo's, and one that is late at the end."""
    (tmp_path / "ends.py").write_text(ENDS)
    done = launch(2, case, script=tmp_path / "ends.py", TORCHELASTIC_USE_AGENT_STORE="False")
    said = {rank: (kind, text) for rank, kind, text in map(json.loads, done.stdout.splitlines())}
    if case == "data":
        assert said[0] == ("RuntimeError", "tokens of the data server: Connection refused")
        assert said[1][0] == "RankLost" and re.match(
            r"another rank has ended; its log has the reason \(\[.*Connection (closed|reset) by peer",
            said[1][1],
        )
    else:
        assert (
            said[0][0] == "RankStalled" and said[1][0] == "RankLost"
        )  # the store has ended meanwhile
        assert said[0][1].startswith(
            "step 3: barrier over dp_shard timed out after 4 s (trainer.timeout.start): rank 1 is in ends.py:"
        )


ALONE = """
import os
import sys

from fp8cfg.__main__ import entry
from fp8cfg.parallel import process_group

rendezvous = process_group.rendezvous


def reported_rendezvous(*given, **named):
    print("ranks meet", file=sys.stderr, flush=True)
    return rendezvous(*given, **named)


process_group.rendezvous = reported_rendezvous
entry()
"""


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_signal_ends_a_rank_that_waits_for_the_others(
    rank: int, number: signal.Signals, tmp_path: Path
) -> None:
    """Which it does in C++, where Python calls no handler."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    words = [*small_words(), "trainer.micro_batch_size=1", f"log.folder={tmp_path / 'run'}"]
    with running(1, *words, script=script, **{**ranks_environment(2), "RANK": str(rank)}) as (
        processes,
        folder,
    ):
        said = folder / "0.err"
        until(lambda: said.exists() and "ranks meet" in said.read_text(), "no rendezvous")
        os.kill(processes[0].pid or 0, number)
        assert not ended(processes, 10)
        assert processes[0].exitcode == (75 if number is signal.SIGTERM else 130)
        assert said.read_text().splitlines()[-1] == (
            f"{number.name}: stopped while waiting for the other ranks, nothing was trained"
        )


MEETING = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (dict.fromkeys(MEETING), "WORLD_SIZE=2: RANK, MASTER_ADDR, MASTER_PORT must be set too;"),
        ({"MASTER_PORT": None}, "WORLD_SIZE=2: MASTER_PORT must be set too;"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http: not a port;"),
        ({"RANK": "2"}, "RANK=2: WORLD_SIZE=2 has the ranks 0 to 1;"),
        ({"MASTER_PORT": "taken"}, "MASTER_PORT={port}: another program uses this port;"),
    ],
)
def test_a_launch_that_cannot_meet_is_one_line(
    changes: dict[str, str | None],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(process_group, "_MEETING", [])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for name, value in {"WORLD_SIZE": "2", **MEETING, **changes}.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, port if value == "taken" else value)
        words = [*small_words(), "trainer.micro_batch_size=1", f"log.folder={tmp_path / 'run'}"]
        assert main(words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.removeprefix("rank 2: ").startswith("error: " + line.format(port=port))


LAYOUTS = {  # which ranks stand still, and how the others wait, some of them for those that wait themselves
    "stages of tensor-parallel ranks, the first of the second": (
        2,
        dict.fromkeys(
            (0, 1, 3),
            r"((batch_isend_irecv|isend|irecv|all_gather) over pp|all_reduce over (pp|tp|all ranks))",
        ),
        [
            "trainer.strategy.pipeline_model_parallel_size=2",
            "model.num_layers=2",
            "trainer.global_batch_size=4",
            "trainer.strategy.tensor_model_parallel_size=2",
            "model.num_query_groups=2",
        ],
    ),
    "data-parallel ranks, the first": (
        0,
        {1: r"(all_reduce|all_gather\w+|reduce_scatter\w+) over dp_shard"},
        ["trainer.micro_batch_size=1"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_that_stands_still_is_named(name: str, tmp_path: Path) -> None:
    """By the others, which end and say in which collective they waited; it is then killed as a launcher does."""
    stopped, waits, layout = LAYOUTS[name]
    run, size = tmp_path / "run", len(waits) + 1
    words = [
        *SAVES,
        *layout,
        f"trainer.devices={size}",
        f"log.folder={run}",
        "trainer.max_steps=100000",
        "trainer.timeout.start=90",
        "trainer.timeout.step=2",
        "checkpoint.every_n_steps=0",
    ]
    with running(size, *words, TORCHELASTIC_USE_AGENT_STORE="False") as (ranks, said):
        until(lambda: (run / "metrics.jsonl").exists() and len(steps(run)) > 2, "no third step")
        os.kill(ranks[stopped].pid or 0, signal.SIGSTOP)
        assert not ended([ranks[rank] for rank in waits], 60)
        lines = {
            rank: Path(said, f"{rank}.err").read_text().strip().splitlines()[-1] for rank in waits
        }
        assert {ranks[rank].exitcode for rank in waits} == {8}
    holds = stopped == 0
    silent = ", which holds the store, does not answer" if holds else " is silent"
    for rank, collective in waits.items():
        assert re.fullmatch(
            rf"{f'rank {rank}: ' if rank else ''}error: step \d+: {collective} (timed out after|was aborted by a rank after) "
            rf"2 s \(trainer\.timeout\.step\): rank {stopped}{silent}: stopped, or its machine is lost"
            rf"{'' if holds else ', or busy outside Python'}",
            lines[rank],
        )


KILLED_ONCE = """
import atexit, os
from fp8cfg.__main__ import entry

atexit.register(lambda: os.write(1, b"left as Python is left\\n"))
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    os.environ["FP8CFG_FAILPOINT"] = "shard:10"
entry()
"""
"""`fp8cfg` under torchrun, of which a rank is killed in its third save or a later one."""


@pytest.mark.slow
def test_a_launcher_that_starts_ranks_again_goes_on(tmp_path: Path) -> None:
    """torchrun --max-restarts, after a rank was killed: one run folder, and no step twice."""
    (tmp_path / "killed_once.py").write_text(KILLED_ONCE)
    words = [
        *SAVES,
        "trainer.micro_batch_size=1",
        f"log.folder={tmp_path}/run",
        "log.resume=auto",
        "trainer.max_steps=10",
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
            str(tmp_path / "killed_once.py"),
            *words,
        ],
        cwd=ROOT,
        env={**ranks_environment(1), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0 and f"resuming {tmp_path}/run from step-" in done.stdout, (
        done.stdout
    )
    assert steps(tmp_path / "run") == list(range(1, 11))
    assert done.stdout.count("left as Python is left") >= 2, (
        "a launcher's hooks run at the end of each rank"
    )
