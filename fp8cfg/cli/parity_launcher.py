"""Training of a parity study through a launcher of Hydra, such as joblib or submitit_slurm.

Hydra sweeps over one number, the index of a run, so each job trains one run. Jobs call the same
function as training in this process. So they reuse and resume run folders too.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fp8cfg.cli import hydra as hydra_flags
from fp8cfg.cli.multirun import SweepError
from fp8cfg.composition.hydra_application import NAME, application
from fp8cfg.composition.overrides import quoted
from fp8cfg.execution.executor import REQUEUE
from fp8cfg.schema import messages
from fp8cfg.schema.errors import Fp8cfgError, printable, refuse_if

if TYPE_CHECKING:
    from fp8cfg.schema.messages import Say
    from fp8cfg.studies.parity_runs import PlannedRun, Study

ALLOWED = ("hydra/launcher=", "hydra.launcher.")
"""Prefixes of the supported Hydra settings."""


def train_runs(study: Study, hydra_words: Sequence[str], say: Say) -> None:
    """Trains all unfinished runs of a study through Hydra's launcher.

    Args:
        study: The study.
        hydra_words: The launcher and its settings.
        say: Called with each message.

    Raises:
        ConfigError: A setting is not one of a launcher.
        SweepError: The launcher or a run failed.
    """
    from fp8cfg.composition.config_groups import Library
    from fp8cfg.composition.sweep_overrides import read
    from fp8cfg.studies.parity_runs import is_finished

    refuse_if(
        [
            f"{word}: parity takes hydra/launcher=NAME and hydra.launcher.KEY=VALUE only"
            for word in hydra_words
            if not word.startswith(ALLOWED)
        ]
    )
    _, hydra_words = hydra_flags.hydra_split(list(hydra_words))
    missing = [run for run in study.runs if not is_finished(run)]
    reused = len(study.runs) - len(missing)
    say(f"{len(study.runs)} runs in {printable(str(study.folder))}, {reused} of them reused")
    if not missing:
        return
    # Hydra needs a complete config, of any recipe. A job only reads its number and trains a recipe
    # of `missing`, which is pickled with the task function.
    plan = read([], Library(None))
    # Hydra's own files: logs of the launcher, and no config of each job.
    folder = quoted(str((study.folder / "launcher").absolute()))
    overrides = [
        *plan.overrides,
        f"+parity_run={','.join(map(str, range(len(missing))))}",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
        "hydra.output_subdir=null",
        f"hydra.sweep.dir={folder}",
        *hydra_words,
        "hydra.mode=MULTIRUN",
    ]
    with application(plan.nodes) as hydra:
        try:
            hydra.multirun(NAME, functools.partial(_job, missing), overrides)
        except (Fp8cfgError, KeyboardInterrupt):
            raise
        except Exception as error:  # from any launcher: a missing queue, a lost job
            raise _launcher_error(error) from error
    # Jobs report their errors and don't raise them, so the run folders tell the result.
    failed = [run for run in missing if not is_finished(run)]
    if failed:
        raise SweepError(
            f"{len(failed)} of {len(missing)} runs failed, such as {failed[0].title}; their errors"
            " are above; the same command trains them again"
        )


def _job(missing: Sequence[PlannedRun], config: DictConfig) -> None:
    """Trains one run in a process of the launcher.

    Prints errors instead of raising them: some launchers stop all jobs after an exception.

    Args:
        missing: The unfinished runs.
        config: The job's config. Hydra passes it, and it has nothing to read.

    Raises:
        KeyboardInterrupt: A signal stopped the run. The launcher must end too.
    """
    from fp8cfg.checkpoint.saver import Diverged
    from fp8cfg.studies.parity_runs import fit_here

    run = missing[HydraConfig.get().job.num]
    title = f"run {HydraConfig.get().job.num + 1} of {len(missing)}: {run.title}"
    messages.say(title)
    try:
        fit_here(run, messages.say)
    except Diverged as error:
        messages.say(f"{title}: diverged: {printable(str(error))}")
    except Fp8cfgError as error:
        messages.say_on_stderr(f"error: {title}: {printable(str(error))}")
        # A signal to this job stops the study. Other errors let the next runs continue.
        if error.exit_code == REQUEUE:
            raise KeyboardInterrupt from None
    except Exception:  # a bug, or no memory: the other runs continue
        messages.say_on_stderr(f"error: {title}:")
        traceback.print_exc()


def _launcher_error(error: Exception) -> Exception:
    """Returns a launcher's error with a message for the user."""
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return error  # `application` shortens it to one line
    # Errors of joblib and submitit have whole tracebacks of other processes.
    first = (str(error).strip().splitlines() or ["no reason given"])[0]
    return SweepError(f"the launcher failed: {type(error).__name__}: {first}")
