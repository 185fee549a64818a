"""`launch`: trains a recipe through an executor: torchrun on this machine, or a Slurm job."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

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
    ranks = None
    if isinstance(executor, TorchrunExecutor):
        ranks = executor.ranks
    config_dir = arguments.one("--config-dir")

    def resolve(words: Sequence[str]) -> ResolvedRecipe:
        """Composes the recipe of overrides for the ranks of --local."""
        resolved = resolve_recipe(words, config_dir, file)
        if ranks is None or resolved.recipe.trainer.smoke:  # a smoke run adapts to its ranks
            return resolved
        # --local also sets trainer.devices: the layout must fit these ranks.
        return resolve_recipe([*words, f"trainer.devices={ranks}"], config_dir, file)

    resolved = resolve(arguments.words)
    recipe = resolved.recipe
    write_command = command_lines(arguments, resolve, "launch", "--local", str(ranks))
    problems: list[str | Violation] = [
        *_device_conflicts(arguments.words, recipe, ranks),
        *_missing_gpus(recipe, ranks),
    ]
    # `_check_ranks` reports problems of the layout, with commands for this machine.
    if ranks is None or not resolved.layout_alone:
        problems += resolved.problems
    problems += training_data.unintended_data(recipe)
    node_problems = _missing_nodes(recipe, ranks, None if problems else write_command)
    refuse_if([*node_problems, *problems])
    say_notes(resolved.notes)
    if ranks is not None:
        _check_ranks(resolved, ranks, write_command)
    result = runs.run(recipe, executor)
    if result.exit_code is None:  # not waited for
        say(f"run folder: {printable(str(result.folder))}")
    return result.exit_code or 0


def _device_conflicts(words: Sequence[str], recipe: Recipe, ranks: int | None) -> list[str]:
    """Returns an error if an override contradicts --local. Smoke runs adapt to any number."""
    devices: Any = ranks
    for key, value, _ in map(parsed, words):
        if full(key) == "trainer.devices":
            devices = value
    if ranks is None or recipe.trainer.smoke or devices == ranks:
        return []
    return [
        f"--local {ranks}: trainer.devices={devices} is another number of processes; drop it, or"
        f" write --local {devices}"
    ]


def _missing_gpus(recipe: Recipe, ranks: int | None) -> list[str]:
    """Returns an error if this machine has fewer GPUs than ranks."""
    if not ranks or recipe.trainer.accelerator == "cpu":
        return []
    num_gpus = machine.count_gpus()
    # Without any GPU, accelerator=auto runs on the CPU, with any number of ranks.
    if num_gpus == 0 or num_gpus >= ranks:
        return []
    return [
        f"--local {ranks}: each process takes a GPU, and this machine has {num_gpus}; write --local"
        f" {num_gpus}"
    ]


def _missing_nodes(
    recipe: Recipe, ranks: int | None, write_command: CommandLine | None
) -> list[str]:
    """Returns an error if the recipe needs several machines, with --local.

    If nothing else is wrong, `write_command` adds a command for this machine.
    """
    trainer = recipe.trainer
    if ranks is None or trainer.num_nodes == 1 or trainer.smoke:
        return []
    lines = [
        f"trainer.num_nodes={trainer.num_nodes}: --local has one machine; write"
        " trainer.num_nodes=1, or launch with --slurm"
    ]
    if write_command is None:
        return lines
    local_recipe = place_on_gpus(recipe, 1, ranks)
    hardware = machine.find_hardware(trainer.accelerator)
    return preflight.append_runs(lines, local_recipe, hardware, write_command, ranks)


def _check_ranks(resolved: ResolvedRecipe, ranks: int, write_command: CommandLine) -> None:
    """Raises ConfigError if the layout or the memory of this machine does not suffice.

    The error has a command for this machine. This check comes before the run folder is created.
    Each rank checks the free memory of its GPU later.
    """
    from fp8cfg.training.data import refuse_absent

    recipe = smoke.cut_recipe(resolved.recipe, ranks)
    hardware = machine.find_hardware(recipe.trainer.accelerator)
    preflight.check_run(recipe, hardware, write_command, resolved.problems, ranks)
    refuse_absent(recipe)


def _executor(arguments: Arguments) -> TorchrunExecutor | SlurmExecutor:
    """Returns the executor of --local or --slurm. Raises ConfigError for none, both or a typo."""
    local, slurm = arguments.one("--local"), arguments.one("--slurm")
    if (local is None) == (slurm is None):
        raise ConfigError("launch: needs one of --local N and --slurm KEY=VALUE,...")
    if local is not None:
        if "--wait" in arguments.flags:
            raise ConfigError("--wait: for --slurm only; --local always waits; remove --wait")
        if not local.isdecimal() or len(local) > 7 or not int(local):
            raise ConfigError(
                f"--local {local[:40]}: expected a number of processes, as in --local 2"
            )
        return TorchrunExecutor(int(local))
    parameters: dict[str, int | str] = {}
    for key, value in settings(slurm or "").items():
        parameters[key] = int(value) if value.isdecimal() else value
    return SlurmExecutor(parameters, "--wait" in arguments.flags)


def settings(text: str, submitit: bool = True) -> dict[str, str]:
    """Parses sbatch settings such as `partition=gpu,nodelist=a,b`.

    Args:
        text: Settings as KEY=VALUE, with commas or spaces between them. A value can be a list.
        submitit: Whether parameters of submitit are valid keys.

    Returns:
        Values by key.

    Raises:
        ConfigError: A setting has another form, or a key is unknown or given twice.
    """
    if len(text.splitlines()) > 1:
        raise ConfigError(f"--slurm {text!r}: has a line break; write one line")
    pairs: list[list[str]] = []
    for part in _between_settings(text) if text else ():
        key, _, value = part.partition("=")
        if key and value and " " not in key:
            pairs.append([key, value])
        # No "=" and no option of sbatch: a further element of the last value.
        elif part and pairs and "=" not in part and part.replace("-", "_") not in SBATCH:
            pairs[-1][1] += f",{part}"
        else:
            raise ConfigError(
                f"--slurm {part or repr(text)}: not of the form key=value, as in --slurm"
                " partition=gpu,time=240"
            )
    values = dict(pairs)
    counts = Counter(key for key, _ in pairs)
    refuse_if([f"--slurm {key}: given {count} times" for key, count in counts.items() if count > 1])
    refuse_if([f"--slurm {line}" for line in setting_errors(values, submitit)])
    problems = []
    for key, value in values.items():
        if " " in value and key not in _WITH_SPACES:
            problems.append(f"--slurm {key}={value}: has a space; put a comma between settings")
    refuse_if(problems)
    return values


_WITH_SPACES = ("setup", "teardown", "comment", "wrap", "srun_args", "srun-args")
"""Settings with spaces in their values."""


def _between_settings(text: str) -> list[str]:
    """Splits at commas, and at spaces before the name of an option and `=`."""
    return re.split(rf",|\s+(?=(?:{'|'.join(sorted(SBATCH))})=)", text.strip().replace(", ", ","))
