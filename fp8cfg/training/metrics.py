"""Training metrics: metrics.jsonl, fp8_stats.jsonl and the loggers."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from fp8cfg.data import IGNORED, Batches
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.statistics import collect_statistics
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.file_names import FP8_STATS, METRICS
from fp8cfg.run_folder.files import RunFiles, write_all
from fp8cfg.run_folder.metrics_file import Value, complete_lines, parse_line, to_json_value
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training.microbatches import count_microbatches

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.run_folder.run_folder import RunFolder
    from fp8cfg.training.loggers.run_loggers import RunLoggers

SHOWN_GAPS = 4
"""Number of gaps in metrics.jsonl that a note lists."""


class MetricsLog:
    """Appends metrics to a JSON Lines file, one object per line.

    Each line is written at once, so a killed process leaves at most one incomplete line. Floats
    round-trip bit for bit. If the disk is full, lines are buffered until there is space again.
    """

    def __init__(self, folder: RunFiles, name: str, done: int | None = None) -> None:
        """Opens a log and copies the lines of an existing one.

        Drops an incomplete last line. Also drops lines of steps after `done`, since the resumed run
        writes these again.

        Args:
            folder: Run folder.
            name: File name.
            done: Optimizer steps of the checkpoint. None keeps all lines, unread.

        Raises:
            OSError: The file cannot be written.
            StrangeFile: The file is not a regular file.
            ValueError: A line is not a JSON object with a step.
        """
        self._folder = folder
        self._name = name
        self.last: dict[str, tuple[int, Value]] = {}
        """Step and value of the last copied line of each metric, if `done` is given."""
        self.gaps: list[tuple[int, int]] = []
        """First and last step of each gap in the copied lines, up to step `done`."""
        self._unwritten = bytearray()
        with ExitStack() as stack:
            old_lines: Iterable[bytes] = ()
            if folder.kind(name):
                old_lines = complete_lines(stack.enter_context(folder.open(name)))
            if done is not None:
                old_lines = self._check_lines(old_lines, done)
            with folder.replacing(name) as new_file:
                for line in old_lines:
                    write_all(new_file, line)
                # `replacing` closes `new_file` after the rename. The duplicate stays open.
                self._file = open(os.dup(new_file.fileno()), "ab", buffering=0)  # noqa: SIM115

    def _check_lines(self, lines: Iterable[bytes], done: int) -> Iterator[bytes]:
        """Yields the lines of steps up to `done`. Fills `last` and `gaps`."""
        path = self._folder.path / self._name
        next_step = 1  # without a line so far
        for number, line in enumerate(lines, 1):
            values = parse_line(f"{path}:{number}", line)
            step = values["step"]
            if step > done:
                continue
            if step > next_step:
                self.gaps.append((next_step, step - 1))
            next_step = max(next_step, step + 1)
            for metric, value in values.items():
                self.last[metric] = (step, value)
            yield line
        if next_step <= done:
            self.gaps.append((next_step, done))

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Appends one line.

        Args:
            step: Optimizer step, counted from 1.
            values: Metrics by name.

        Raises:
            TypeError: JSON cannot represent a value, such as a tensor.
            OSError: Writing failed for another reason than a full disk.
        """
        fields: dict[str, Value] = {"step": step}
        for name, value in values.items():
            if name != "step":
                fields[name] = to_json_value(value)
        self._unwritten += json.dumps(fields, allow_nan=False).encode() + b"\n"
        try:
            self._flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def close(self) -> None:
        """Writes buffered lines and closes the file. Raises OSError if the disk is still full."""
        try:
            if not self._file.closed:
                self._flush()
        except OSError as error:
            path = self._folder.path / self._name
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except OSError:
            # The error that ends the run is more useful than a full disk.
            if kind is None:
                raise

    def _flush(self) -> None:
        # A full disk can take a part of the bytes. The rest stays for the next call.
        while self._unwritten:
            num_written = self._file.write(self._unwritten)
            del self._unwritten[:num_written]


class RunLogs:
    """Log files and loggers of a run: metrics.jsonl, fp8_stats.jsonl, log.loggers.

    A context manager.

    Only the first rank has a run folder and writes. Other ranks make the same calls, because
    `write_statistics` runs collectives.
    """

    def __init__(self, job: Job, run: RunFolder | None, done: int, loggers: RunLoggers) -> None:
        """Opens the log files of a run.

        Args:
            job: The job.
            run: Run folder, None on ranks that write nothing.
            done: Optimizer steps done. Lines of later steps are dropped.
            loggers: Get the same metrics.

        Raises:
            ConfigError: A log is damaged, or the backend has no FP8 statistics.
            OSError: A log cannot be written.
        """
        self.job = job
        self._metrics: MetricsLog | None = None
        self._statistics: MetricsLog | None = None
        self.loggers = loggers
        self._statistics_interval = 0
        # The statistics take a forward and backward pass. Under FSDP2 this pass gathers weights, so
        # all ranks must run it.
        if run or job.prepared.fsdp2:
            self._statistics_interval = job.recipe.log.fp8_stats_every_n_steps
        # If a later log cannot be opened, the stack closes the earlier ones.
        with ExitStack() as logs:
            if run:
                self._open_logs(run, done, logs)
            self._logs = logs.pop_all()

    def _open_logs(self, run: RunFolder, done: int, logs: ExitStack) -> None:
        interval = self._statistics_interval
        if interval and not any(fp8_linears(self.job.model)):
            raise ConfigError(
                f"log.fp8_stats_every_n_steps={interval}: backend={self.job.choice.backend} has"
                " no FP8 statistics; set backend=native or remove it"
            )
        self._metrics = _open_log(run.files, METRICS, done, logs)
        # An existing log is opened even without an interval, to drop its later lines.
        if interval or run.files.kind(FP8_STATS):
            self._statistics = _open_log(run.files, FP8_STATS, done, logs)

    def rewind(self, run: RunFolder | None, done: int) -> None:
        """Drops the lines of steps after `done`: the run writes these steps again."""
        for log in (self._metrics, self._statistics):
            if log:
                log.close()
        if self._metrics and run:
            self._metrics = _open_log(run.files, METRICS, done, self._logs)
        if self._statistics and run:
            self._statistics = _open_log(run.files, FP8_STATS, done, self._logs)

    def write(self, done: int, values: dict[str, Value]) -> None:
        """Writes metrics of optimizer step `done`, counted from 1."""
        if self._metrics:
            self._metrics.write(done, values)
        self.loggers.write(done, values)

    def gap_note(self) -> str:
        """Returns a note about finished steps without a line in metrics.jsonl, or ""."""
        if not self._metrics or not self._metrics.gaps:
            return ""
        gaps = []
        for first, last in self._metrics.gaps:
            gaps.append(str(first) if first == last else f"{first} to {last}")
        text = ", ".join(gaps[:SHOWN_GAPS])
        if len(gaps) > SHOWN_GAPS:
            text += f" and {len(gaps) - SHOWN_GAPS} more gaps"
        return (
            f"note: {METRICS} has no lines for steps {text}; a crash of the"
            " machine or an edit lost them, but training continues from the checkpoint as usual"
        )

    def has_val_loss(self, done: int) -> bool:
        """Whether metrics.jsonl had a validation loss of step `done` when it was opened.

        True on ranks without the file, so that they agree with the rank that has it.
        """
        return self._metrics is None or self.value_of_step(done, "val_loss") is not None

    def value_of_step(self, done: int, name: str) -> Value:
        """Returns the value that metrics.jsonl had for step `done` when it was opened, or None."""
        if self._metrics is None:
            return None
        step, value = self._metrics.last.get(name, (0, None))
        if step != done:
            return None
        return value

    def write_statistics(self, batches: Batches, step: int, world: World) -> None:
        """Writes FP8 statistics of the first microbatch of a step, if the step is due.

        Runs an extra eager forward and backward pass. It changes no FP8 state. All ranks call it.

        Args:
            batches: Training data.
            step: The next step, counted from 0.
            world: Ranks of the run.
        """
        if not self._statistics_interval or (step + 1) % self._statistics_interval:
            return
        job = self.job
        num_microbatches = count_microbatches(job, world)
        batch = batches.batch(step, world.rank, world.size, 0, num_microbatches)
        num_shares: float = num_microbatches * world.size
        if batches.samples.masked:
            # Masked microbatches have different numbers of targets. Their loss gets the weight that
            # it has in the step, so gradients have the same size as in training.
            num_targets = batches.target_count(step)
            if not num_targets:
                return  # the training step reports this error
            num_shares = num_targets / max(int((batch[1] != IGNORED).sum()), 1)

        def run_pass() -> None:
            with job.autocast():
                loss = job.model(*(tensor.to(job.device) for tensor in batch))
                job.backward(loss, num_shares)

        # Frees the gradients of the last step before this pass allocates new ones.
        job.optimizer.zero_grad()
        if job.prepared.fsdp2:
            from fp8cfg.parallel import fsdp  # here: it takes a second to load

            fsdp.prepare_microbatch(job.model, job.prepared.shard, last=True)
        values: dict[str, Value] = {}
        for tensor in collect_statistics(job.model, run_pass, job.optimizer.masters):
            fields = tensor._asdict()
            if self._statistics:
                self._statistics.write(step + 1, fields)
            for name, value in fields.items():
                values[f"fp8/{tensor.layer}/{tensor.tensor}/{name}"] = value
        self.loggers.write(step + 1, values)

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._logs.__exit__(kind, error, trace)


def _open_log(files: RunFiles, name: str, done: int, logs: ExitStack) -> MetricsLog:
    """Opens a log that `logs` closes. Raises ConfigError if it is damaged."""
    try:
        return logs.enter_context(MetricsLog(files, name, done))
    except ValueError as error:
        raise ConfigError(str(error)) from None
