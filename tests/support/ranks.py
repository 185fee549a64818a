"""Ranks: functions run by real processes over gloo, and commands run by several, as torchrun starts them and by torchrun.

Processes are forked from one that has done nothing (forked.py), so that each is as new as a spawned one.
"""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group is made, see fp8cfg/parallel/process_group.py

from fp8cfg.__main__ import entry
from fp8cfg.parallel.process_group import World
from tests.support.forked import processes

ROOT = Path(__file__).parents[2]
LIMIT = 300.0
"""Seconds after which ranks that have not ended are killed."""


def on_ranks(ranks: int, work: Callable[[World], Any], folder: Path) -> list[Any]:
    """Run `work`, a function at the top level of a module, on that many processes, and return the result of each: tensors, lists
    and dicts.
    """
    running = _start(_one, ranks, ranks, work, str(folder))
    while not running.join():
        pass
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def launch(
    ranks: int, *argv: str, script: Path | None = None, cwd: Path = ROOT, **environ: str
) -> subprocess.CompletedProcess[str]:
    """`fp8cfg`, or `script`, with `argv`, on one or more ranks with the environment that torchrun gives them, and `environ`. The exit code is that
    of the first rank that failed, or minus the signal that ended it."""
    with running(ranks, *argv, script=script, cwd=cwd, **environ) as (processes, said):
        late = ended(processes)
        out, err = (
            "".join(Path(said, f"{rank}.{name}").read_text() for rank in range(ranks))
            for name in ("out", "err")
        )
        assert not late, (
            f"{len(late)} of {ranks} ranks had not ended after {LIMIT:.0f} s\n{out}{err}"
        )
        return subprocess.CompletedProcess(
            argv, next((p.exitcode for p in processes if p.exitcode), 0), out, err
        )


@contextmanager
def running(
    ranks: int, *argv: str, script: Path | None = None, cwd: Path = ROOT, **environ: str
) -> Iterator[tuple[list[BaseProcess], Path]]:
    """The processes of `launch`, and a folder with RANK.out and RANK.err; those that have not ended are killed."""
    with TemporaryDirectory() as folder:
        started = _start(
            _command, ranks, script, argv, cwd, {**ranks_environment(ranks), **environ}, folder
        ).processes
        try:
            yield started, Path(folder)
        finally:
            for process in started:
                process.kill()
                process.join()


def ended(processes: Iterable[BaseProcess], limit: float = LIMIT) -> list[BaseProcess]:
    """Wait until all have ended; those that had not within so many seconds."""
    end = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    return [process for process in processes if process.is_alive()]


def torchrun(ranks: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """`fp8cfg` with `argv`, on several ranks under torchrun itself, which ends all where one fails."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "fp8cfg",
        *argv,
    ]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def _start(work: Callable[..., None], ranks: int, *args: Any) -> Any:
    """Processes that run `work(rank, *args)`."""
    return torch.multiprocessing.start_processes(
        work, args, ranks, join=False, start_method=processes.get_start_method()
    )


def ranks_environment(ranks: int) -> dict[str, str]:
    """This process's, and what torchrun says to each of several ranks alike."""
    if ranks == 1:
        return dict(os.environ)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _one(rank: int, ranks: int, work: Callable[[World], Any], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    torch.save(work(World(rank, ranks)), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _command(
    rank: int,
    script: Path | None,
    argv: tuple[str, ...],
    cwd: Path,
    environ: dict[str, str],
    folder: str,
) -> None:
    for name, stream in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(folder, f"{rank}.{name}"), os.O_WRONLY | os.O_CREAT), stream)
    os.environ.clear()
    os.environ.update(environ)
    if "WORLD_SIZE" in environ:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(cwd)
    torch.set_num_threads(1)
    sys.argv = [str(script or "fp8cfg"), *argv]
    if script:
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    else:
        entry()
