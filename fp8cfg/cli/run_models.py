"""Models of a run for `sample` and `evaluate`: loads a checkpoint in one precision or several."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fp8cfg.cli.argv import Arguments
from fp8cfg.run_folder.files import MAX_BYTES, RunFiles, StrangeFile
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema import scalings
from fp8cfg.schema.backends import EMULATE
from fp8cfg.schema.errors import ConfigError, printable
from fp8cfg.schema.presets import precision_preset
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.training import Trainer

if TYPE_CHECKING:
    from fp8cfg.training.trained_model import RunModel


def read_object(folder: RunFiles, name: str) -> dict[str, Any]:
    """Reads a JSON object from a run folder.

    Args:
        folder: The run folder.
        name: Name of the file.

    Raises:
        ConfigError: The file is missing, too large or not a JSON object.
    """
    path = folder.path / name
    try:
        data = json.loads(folder.read(name))
    except FileNotFoundError:
        raise ConfigError(f"{path}: is not there") from None
    except StrangeFile as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        if error.errno == errno.EFBIG:
            problem = f"larger than {MAX_BYTES // 1024} KB"
        raise ConfigError(f"{path}: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return data


def load_model(arguments: Arguments) -> RunModel:
    """Loads the model of a run in its own precision.

    Args:
        arguments: The run folder, --accelerator and --step.

    Raises:
        ConfigError: An option is wrong, or the hardware cannot run the precision.
        RunFolderError: Not a run folder.
    """
    path = Path(arguments.plain[0])
    change = _accelerator_change(arguments.one("--accelerator"))
    step = integer_option(arguments, "--step", 0)
    # Raises an error for a wrong folder before torch is loaded. Not `path`: an address such as
    # hf://o/n would lose a slash in the message.
    RunFolder.open(arguments.plain[0], lock=False).close()
    from fp8cfg.training import trained_model

    with _errors_with_options():
        return trained_model.load(path, _say, change, step)


def _accelerator_change(accelerator: str | None) -> Callable[[Recipe], None] | None:
    """Returns a function that sets trainer.accelerator, None without the option."""
    if accelerator is None:
        return None
    accelerators = get_args(Trainer.model_fields["accelerator"].annotation)
    if accelerator not in accelerators:
        names = f"{', '.join(accelerators[:-1])} or {accelerators[-1]}"
        raise ConfigError(f"--accelerator {accelerator[:40]}: write {names}")

    def change(recipe: Recipe) -> None:
        recipe.trainer.accelerator = accelerator  # type: ignore[assignment]

    return change


def models_in_precisions(run: RunModel, names: str | None) -> Iterator[tuple[str, RunModel]]:
    """Yields a title and the model for each precision, one after the other.

    Args:
        run: The model as trained.
        names: Presets, separated by commas. None for the trained precision.

    Raises:
        ConfigError: A name is unknown. Raised before the first model.
    """
    if names is None:
        yield title(run), run
        return
    from fp8cfg.training import trained_model

    for name in names.split(","):
        precision_preset(name)
    for name in names.split(","):
        with _errors_with_options():
            model = trained_model.in_precision(run, name, _say)
        yield name, model


@contextmanager
def _errors_with_options() -> Iterator[None]:
    """Context manager that replaces keys by options in errors about hardware."""
    try:
        yield
    except ConfigError as error:
        problems = []
        for problem in error.problems:
            problem = problem.replace(EMULATE, "write --accelerator cpu to emulate")
            problems.append(problem.replace(" precision=", " --precision "))
        raise ConfigError(problems) from None


def title(run: RunModel) -> str:
    """Describes the precision of a model in words.

    Args:
        run: The model.
    """
    precision = run.recipe.precision
    if not precision.fp8.enabled:
        return precision.compute
    return f"{precision.compute}, {scalings.title(precision.fp8.scaling)}"


def integer_option(
    arguments: Arguments, option: str, least: int, default: int | None = None
) -> int | None:
    """Parses an integer option.

    Args:
        arguments: Arguments of the command.
        option: Name of the option.
        least: Minimum.
        default: Value without the option.

    Raises:
        ConfigError: Not an integer, or out of range.
    """
    text = arguments.one(option)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{option} {text[:40]}: needs a whole number") from None
    # Seeds and counts are int64 in torch.
    if not least <= value < 2**63:
        raise ConfigError(f"{option} {text[:40]}: must be at least {least}")
    return value


def _say(line: str) -> None:
    """Prints a message to standard error, because standard output has the result."""
    print(printable(line), file=sys.stderr)
