"""`launch`: trains a recipe through an executor: torchrun on this machine, or a Slurm job."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fp8cfg.cli import WORDS
from fp8cfg.cli.argv import VERBOSE, Arguments, add_verbose, split
from fp8cfg.cli.recipe_arguments import command_lines, recipe_file, resolve_recipe, say_notes
from fp8cfg.composition.overrides import parsed
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.execution import executor as runs
from fp8cfg.execution.executor import TorchrunExecutor
from fp8cfg.execution.slurm import SBATCH, SlurmExecutor, setting_errors
from fp8cfg.planning import hardware as machine
from fp8cfg.planning import preflight, smoke, training_data
from fp8cfg.planning.fit_search import CommandLine
from fp8cfg.planning.layout import place_on_gpus
from fp8cfg.schema.errors import ConfigError, printable, refuse_if
from fp8cfg.schema.keys import full
from fp8cfg.schema.messages import say
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.violation import Violation

USAGE = """
fp8cfg launch --local N [recipe=NAME | FILE.yaml] [key=value ...]
fp8cfg launch --slurm KEY=VALUE,... [--wait] [recipe=NAME | FILE.yaml]
              [key=value ...]

Train a recipe through an executor, like fp8cfg.run in Python.

Examples:
  fp8cfg launch --local 2 recipe=llama_tiny precision=bf16_fp8
  fp8cfg launch --slurm partition=gpu,time=240 mine.yaml
  fp8cfg launch --slurm partition=gpu --wait mine.yaml

Options:
  --local N            start N processes on this machine through torchrun
  --slurm KEY=VALUE,.. submit a Slurm job of trainer.num_nodes x trainer.devices
                       ranks with these sbatch settings, through submitit
                       (pip install 'fp8cfg[slurm]'). Before its time limit the
                       job saves, is requeued and resumes
  --wait               wait until the job has ended
  --config-dir FOLDER  your own recipes and presets
  --verbose            print the planned and the observed tables too
"""


def run(argv: list[str]) -> int:
    """Trains the recipe through an executor and returns the exit code."""
    arguments = split(argv, ("--config-dir", "--local", "--slurm"), ("--wait", VERBOSE))
    add_verbose(arguments)
    file = recipe_file(arguments.plain, WORDS)
    executor = _executor(arguments)
    ranks = executor.ranks if isinstance(executor, TorchrunExecutor) else None

    def settle(words: Sequence[str]) -> ResolvedRecipe:
        """Composes the recipe of overrides for the ranks of --local."""
        found = resolve_recipe(words, arguments.one("--config-dir"), file)
        if ranks is None or found.recipe.trainer.smoke:  # a smoke run adapts to its ranks
            return found
        # --local also sets trainer.devices: the layout must fit these ranks.
        return resolve_recipe(
            [*words, f"trainer.devices={ranks}"], arguments.one("--config-dir"), file
        )

    found = settle(arguments.words)
    whole_line = command_lines(arguments, settle, "launch", "--local", str(ranks))
    problems = [] if ranks and found.layout_alone else found.problems
    lines: list[str | Violation] = [
        *_two_counts(arguments.words, found.recipe, ranks),
        *_too_many(found.recipe, ranks),
        *problems,
        *training_data.unintended_data(found.recipe),
    ]
    refuse_if([*_other_machines(found.recipe, ranks, None if lines else whole_line), *lines])
    say_notes(found.notes)
    if ranks is not None:
        _refuse(found, ranks, whole_line)
    done = runs.run(found.recipe, executor)
    if done.exit_code is None:
        say(f"run folder: {printable(str(done.folder))}")
    return done.exit_code or 0


def _two_counts(words: Sequence[str], recipe: Recipe, ranks: int | None) -> list[str]:
    """Returns an error if an override contradicts --local. Smoke runs adapt to any number."""
    typed = {full(key): value for key, value, _ in map(parsed, words)}.get("trainer.devices", ranks)
    if ranks is None or recipe.trainer.smoke or typed == ranks:
        return []
    return [
        f"--local {ranks}: trainer.devices={typed} is another number of processes; drop it, or"
        f" write --local {typed}"
    ]


def _too_many(recipe: Recipe, ranks: int | None) -> list[str]:
    """Returns an error if this machine has fewer GPUs than ranks."""
    # Without any GPU, accelerator=auto runs on the CPU, with any number of ranks.
    if ranks and recipe.trainer.accelerator != "cpu" and 0 < (gpus := machine.count_gpus()) < ranks:
        return [
            f"--local {ranks}: each process takes a GPU, and this machine has {gpus}; write --local"
            f" {gpus}"
        ]
    return []


def _other_machines(recipe: Recipe, ranks: int | None, whole_line: CommandLine | None) -> list[str]:
    """Returns an error if the recipe needs several machines, with --local.

    If nothing else is wrong, `whole_line` adds a command for this machine.
    """
    t = recipe.trainer
    if ranks is None or t.num_nodes == 1 or t.smoke:
        return []
    lines = [
        f"trainer.num_nodes={t.num_nodes}: --local has one machine; write trainer.num_nodes=1, or"
        " launch with --slurm"
    ]
    if whole_line is None:
        return lines
    here, hardware = place_on_gpus(recipe, 1, ranks), machine.find_hardware(t.accelerator)
    return preflight.append_runs(lines, here, hardware, whole_line, ranks)


def _refuse(found: ResolvedRecipe, ranks: int, whole_line: CommandLine) -> None:
    """Raises ConfigError if the layout or the memory of this machine does not suffice.

    The error has a command for this machine. This check comes before the run folder is created.
    Each rank checks the free memory of its GPU later.
    """
    from fp8cfg.training.data import refuse_absent

    recipe = smoke.cut_recipe(found.recipe, ranks)
    preflight.check_run(
        recipe, machine.find_hardware(recipe.trainer.accelerator), whole_line, found.problems, ranks
    )
    refuse_absent(recipe)


def _executor(arguments: Arguments) -> TorchrunExecutor | SlurmExecutor:
    """Returns the executor of --local or --slurm. Raises ConfigError for none, both or a typo."""
    local, slurm = arguments.one("--local"), arguments.one("--slurm")
    if (local is None) == (slurm is None):
        raise ConfigError("launch: needs one of --local N and --slurm KEY=VALUE,...")
    if local is not None:
        if "--wait" in arguments.flags:
            raise ConfigError("--wait: is of --slurm; processes of this machine are waited for")
        if not local.isdecimal() or not int(local):
            raise ConfigError(f"--local {local}: expected a number of processes, as in --local 2")
        return TorchrunExecutor(int(local))
    parameters = {
        key: int(value) if value.isdecimal() else value
        for key, value in settings(slurm or "").items()
    }
    return SlurmExecutor(parameters, "--wait" in arguments.flags)


def settings(said: str, submitit: bool = True) -> dict[str, str]:
    """Parses sbatch settings such as `partition=gpu,nodelist=a,b`.

    Args:
        said: Settings as KEY=VALUE, with commas or spaces between them. A value can be a list.
        submitit: Whether parameters of submitit are valid keys.

    Returns:
        Values by key.

    Raises:
        ConfigError: A setting has another form, or a key is unknown or given twice.
    """
    refuse_if(
        [f"--slurm {said!r}: has a line break; write one line"]
        if len(said.splitlines()) > 1
        else []
    )
    pairs: list[list[str]] = []
    for part in _between_settings(said) if said else ():
        key, _, value = part.partition("=")
        if key and value and " " not in key:
            pairs.append([key, value])
        # No "=" and no option of sbatch: a further element of the last value.
        elif part and pairs and "=" not in part and part.replace("-", "_") not in SBATCH:
            pairs[-1][1] += f",{part}"
        else:
            raise ConfigError(
                f"--slurm {part or repr(said)}: not of the form key=value, as in --slurm"
                " partition=gpu,time=240"
            )
    found = dict(pairs)
    keys = [key for key, _ in pairs]
    refuse_if(
        [f"--slurm {key}: given {keys.count(key)} times" for key in found if keys.count(key) > 1]
    )
    refuse_if([f"--slurm {line}" for line in setting_errors(found, submitit)])
    refuse_if(
        [
            f"--slurm {key}={value}: has a space; put a comma between settings"
            for key, value in found.items()
            if " " in value and key not in _WITH_SPACES
        ]
    )
    return found


_WITH_SPACES = ("setup", "teardown", "comment", "wrap", "srun_args", "srun-args")
"""Settings with spaces in their values."""


def _between_settings(said: str) -> list[str]:
    """Splits at commas, and at spaces before the name of an option and `=`."""
    return re.split(rf",|\s+(?=(?:{'|'.join(sorted(SBATCH))})=)", said.strip().replace(", ", ","))
