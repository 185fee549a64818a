"""Ranks that stand still: the others say in which collective, who is missing, and end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from fp8cfg.config.errors import RankStalled
from fp8cfg.config.training_nodes import Timeout
from fp8cfg.training.distributed import stalled_ranks
from tests.support.ranks import ROOT, ranks_environment
from tests.training.test_log_folder import SAVES, steps


def test_where_a_thread_is() -> None:
    ready, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        go_on.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    assert thread.ident is not None
    assert re.match(r"fp8cfg/tests/training/test_stalled_ranks\.py:\d+, wait$|threading\.py:\d+$", stalled_ranks._where(sys._current_frames()[thread.ident]))
    go_on.set()
    thread.join()
    assert stalled_ranks._where(None) == "no Python" and stalled_ranks._ranks([3]) == "rank 3" and stalled_ranks._ranks(list(range(20))).endswith("15 and 4 more")


def test_not_all_ranks_come() -> None:
    with pytest.raises(RankStalled, match=r"not all ranks came within 1 s \(trainer\.timeout\.start\)"), stalled_ranks.all_started(Timeout(start=1)):
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=2, timeout=stalled_ranks.timedelta(seconds=1))


def _until(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 100
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.1)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    """By the others, which end; it is then killed as a launcher does."""
    words = [*SAVES, "trainer.micro_batch_size=1", f"log.folder={tmp_path}/run", "trainer.max_steps=100000", "trainer.timeout.start=90", "trainer.timeout.step=3", "checkpoint.every_n_steps=0"]
    environ = {**ranks_environment(2), "OMP_NUM_THREADS": "1"}
    first, second = (subprocess.Popen([sys.executable, "-m", "fp8cfg", *words], cwd=ROOT, env={**environ, "RANK": rank, "LOCAL_RANK": rank},
                                      stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for rank in "01")
    try:
        _until(lambda: (tmp_path / "run/metrics.jsonl").exists() and len(steps(tmp_path / "run")) > 2, "no third step")
        second.send_signal(signal.SIGSTOP)
        _, said = first.communicate(timeout=60)
    finally:
        for rank in (first, second):
            rank.kill()
            rank.communicate()
    line = said.strip().splitlines()[-1]
    assert re.fullmatch(r"error: step \d+: \w+ over all ranks was not done in 3 s \(trainer\.timeout\.step\): rank 1 is silent: "
                        "stopped, or gone with the machine", line), said
    assert first.returncode == 1


@pytest.mark.slow
def test_a_launcher_that_starts_ranks_again_goes_on(tmp_path: Path) -> None:
    """torchrun --max-restarts, after a rank was killed: one run folder, and no step twice."""
    words = [*SAVES, "trainer.micro_batch_size=1", f"log.folder={tmp_path}/run", "log.resume=auto", "trainer.max_steps=40"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "fp8cfg", *words]
    running = subprocess.Popen(command, cwd=ROOT, env=ranks_environment(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    _until(lambda: running.poll() is not None or ((tmp_path / "run/metrics.jsonl").exists() and len(steps(tmp_path / "run")) > 2), "no third step")
    rank = subprocess.run(["pgrep", "-f", f"^[^ ]*python[^ ]* -u -m fp8cfg .*{tmp_path}"], capture_output=True, text=True, check=True).stdout.split()[-1]
    os.kill(int(rank), signal.SIGKILL)
    out, _ = running.communicate(timeout=200)
    assert running.returncode == 0 and f"resuming {tmp_path}/run from step-" in out, out
    assert steps(tmp_path / "run") == list(range(1, 41))
