"""Run logs: the files of a run folder that grow step by step, with metrics, statistics of FP8 tensors and TensorBoard events."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from fp8cfg.config.errors import ConfigError
from fp8cfg.data import IGNORED, Batches
from fp8cfg.job import Job
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.quantization_statistics import collect
from fp8cfg.training.distributed.world import World
from fp8cfg.training.metrics import MetricsLog, TensorBoardLog, Value
from fp8cfg.training.microbatches import microbatches
from fp8cfg.training.run_files import RunFiles
from fp8cfg.training.run_folder import FP8_STATS, METRICS, RunFolder


class RunLogs:
    """What one run writes, as a context manager; nothing without a run folder, as on every rank but the first."""

    def __init__(self, job: Job, run: RunFolder | None, done: int) -> None:
        """Opens the files of `run` and drops what they say of steps after `done`. Raises ConfigError for files that cannot be
        read, and for what the recipe's `log` keys ask for and is not to be had; OSError."""
        self.job = job
        self._metrics: MetricsLog | None = None
        self._statistics: MetricsLog | None = None
        self._board: TensorBoardLog | None = None
        self._every = job.recipe.log.fp8_stats_every_n_steps if run or job.prepared.fsdp2 else 0
        with ExitStack() as opened:
            if run:
                self._open(run, done, opened)
            self._opened = opened.pop_all()

    def _open(self, run: RunFolder, done: int, opened: ExitStack) -> None:
        if self._every and not any(fp8_linears(self.job.model)):
            raise ConfigError(
                f"log.fp8_stats_every_n_steps={self._every}: backend {self.job.choice.backend} has"
                " no such statistics; write backend=native or drop it"
            )
        self._metrics = _log(run.files, METRICS, done, opened)
        if self._every or run.files.kind(FP8_STATS):
            self._statistics = _log(run.files, FP8_STATS, done, opened)
        if self.job.recipe.log.tensorboard:
            try:
                self._board = TensorBoardLog(run.files.folder("tensorboard", make=True).path)
            except ImportError as e:
                raise ConfigError(f"log.tensorboard=true: {e}") from None
            opened.callback(self._board.close)

    def write(self, done: int, values: dict[str, Value]) -> None:
        """Values of optimizer step `done`, the first being 1."""
        for log in (self._metrics, self._board):
            if log:
                log.write(done, values)

    def evaluated(self, done: int) -> bool:
        """Whether the file that was found has a validation loss of step `done`."""
        return self._metrics is None or self.found(done, "val_loss") is not None

    def found(self, done: int, name: str) -> Value:
        """The value of step `done` in the file that was found; None where it has none."""
        step, value = self._metrics.last.get(name, (0, None)) if self._metrics else (0, None)
        return value if step == done else None

    def statistics(self, batches: Batches, step: int, world: World) -> None:
        """Where they are due, the statistics of the FP8 tensors in the first microbatch of optimizer step `step`, the first
        being 0, which is about to begin. They take an eager forward and backward pass and change nothing. All ranks call it: where
        FSDP2 has the weights each takes the pass, and the first writes what it saw."""
        if not self._every or (step + 1) % self._every:
            return
        job, count = self.job, microbatches(self.job, world)
        batch = batches.batch(step, world.rank, world.size, 0, count)
        targets = int((batch[1] != IGNORED).sum()) if batches.samples.masked else 0
        if batches.samples.masked and not batches.target_count(step):
            return  # the step itself says that no token has a loss
        parts = (
            batches.target_count(step) / max(targets, 1)
            if batches.samples.masked
            else count * world.size
        )  # of no targets 0

        def run() -> None:
            with job.autocast():
                job.backward(job.model(*(t.to(job.device) for t in batch)), parts)

        job.optimizer.zero_grad()  # or two sets of gradients would need memory at once
        if job.prepared.fsdp2:
            from fp8cfg.training.distributed import fsdp  # inside: it takes a second to load

            fsdp.microbatch(job.model, job.prepared.shard, last=True)
        board: dict[str, Value] = {}
        for found in collect(job.model, run, job.optimizer.masters):
            if self._statistics:
                self._statistics.write(step + 1, found._asdict())
            board |= {
                f"fp8/{found.layer}/{found.tensor}/{name}": value
                for name, value in found._asdict().items()
            }
        if self._board:
            self._board.write(step + 1, board)

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)


def _log(files: RunFiles, name: str, done: int, opened: ExitStack) -> MetricsLog:
    try:
        return opened.enter_context(MetricsLog(files, name, done))
    except ValueError as e:
        raise ConfigError(str(e)) from None
