"""`evaluate`: measures the loss of a run on held-out data, in one precision or several."""

from __future__ import annotations

import math
import re
from pathlib import Path

from fp8cfg.cli.argv import split
from fp8cfg.cli.run_models import integer_option, load_model, models_in_precisions
from fp8cfg.data import Samples
from fp8cfg.schema.data import NO_ADDRESS
from fp8cfg.schema.errors import ConfigError, printable
from fp8cfg.schema.messages import say_on_stderr
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import table

USAGE = """
fp8cfg evaluate RUN_FOLDER [--data PATH] [--precision NAME,...] [--step N]
                [--samples N] [--accelerator NAME]

Measure the loss of a run on held-out data, in one precision or several.

Examples:
  fp8cfg evaluate runs/mine
  fp8cfg evaluate runs/mine --precision bf16,bf16_fp8
  fp8cfg evaluate runs/mine --data test.jsonl --samples 200

It prints the mean loss in nats per token for each precision, and the
difference. The run folder is not changed.

Options:
  --data PATH          text or a table, of the same kind as the training data;
                       default the held-out part
  --precision NAME,... compute in these presets; default as trained
  --step N             use the checkpoint of step N
  --samples N          use N samples, spread evenly; default all
  --accelerator NAME   auto, cpu or cuda; default as in the run
"""


def run(argv: list[str]) -> int:
    """Prints the losses and returns the exit code."""
    arguments = split(argv, ("--data", "--precision", "--step", "--samples", "--accelerator"))
    if len(arguments.plain) != 1 or arguments.words:
        raise ConfigError(
            "evaluate: needs one run folder, as in: fp8cfg evaluate runs/NAME --precision"
            " bf16,bf16_fp8"
        )
    path = arguments.one("--data")
    if path and "://" in path:
        raise ConfigError(f"--data {path}: {NO_ADDRESS}")
    limit = integer_option(arguments, "--samples", 1)
    found = load_model(arguments)
    # Imported late: a wrong argument is an error before torch is loaded.
    from fp8cfg.training.finished_run import held_out_loss, load_held_out

    samples = load_held_out(found.recipe) if path is None else _samples_of(found.recipe, path)
    if not len(samples):
        raise ConfigError(
            f"--data: has no sample of model.seq_length={found.recipe.model.seq_length} tokens"
        )
    losses, targets = list[tuple[str, float]](), 0
    for name, model in models_in_precisions(found, arguments.one("--precision")):
        measured = held_out_loss(model, samples, limit)
        losses.append((name, measured.loss))
        targets = measured.targets
    say_on_stderr(
        printable(
            f"{arguments.plain[0]}: step {found.step}, {targets} tokens of"
            f" {path or 'its held-out part'}"
        )
    )
    rows = [
        [name, f"{loss:.4f}", _difference(loss - losses[0][1]), f"{_perplexity(loss):.3f}"]
        for name, loss in losses
    ]
    print(table(["precision", "loss", "difference", "perplexity"], rows, right=(1, 2, 3)))
    return 0


def _samples_of(recipe: Recipe, path: str) -> Samples:
    """Loads all samples at `path`. Raises ConfigError with the option instead of the key."""
    from fp8cfg.training.finished_run import load_samples

    try:
        return load_samples(recipe, path)
    except ConfigError as e:
        raise ConfigError([_of_option(problem, path) for problem in e.problems]) from None


def _of_option(problem: str, path: str) -> str:
    """Replaces data=NAME by --data at the start of a problem."""
    said = re.sub(r"^data=\w+: ", "", problem)
    if said == problem:  # the problem is about another key
        return problem
    return f"--data {said}" if said.startswith(str(Path(path))) else f"--data {path}: {said}"


def _perplexity(loss: float) -> float:
    """Returns exp(loss), or infinity above 700."""
    # math.exp overflows with an error above 709.
    return math.inf if loss >= 700 else math.exp(loss)


def _difference(by: float) -> str:
    """Formats a difference with its sign."""
    return "nan" if math.isnan(by) else f"{by:+.4f}"
