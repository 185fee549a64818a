"""`advise`: advises a precision for a model, and the layers to keep out of FP8."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fp8cfg.checkpoint.resume_rules import matches
from fp8cfg.cli.argv import Arguments, split, wrong_words
from fp8cfg.cli.output import write_new
from fp8cfg.cli.recipe_arguments import command_line, compose_recipe, recipe_file
from fp8cfg.composition.overrides import parsed
from fp8cfg.planning.hardware import find_gpu
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.keys import full
from fp8cfg.schema.messages import say_on_stderr

USAGE = """
fp8cfg advise [recipe=NAME | FILE.yaml] [precision=NAME] [key=value ...]
              [--steps N] [--every N] [--gpu NAME] [--output FILE.yaml] [--json]
              [--config-dir FOLDER]

Find out which precision a model can train in, and which layers must stay out.

Examples:
  fp8cfg advise recipe=llama_tiny
  fp8cfg advise recipe=llama_1b precision=bf16_fp8_current --gpu h100
  fp8cfg advise mine.yaml --steps 50 --output advised.yaml

It trains a few steps without FP8 and quantizes the operands of each linear
layer on the side, under every scaling of the hardware. It prints the error of
each layer, the tensor to blame, and the overrides to use. With a precision in
FP8 the advice is about its scaling. No run folder is written.

Options:
  --steps N            optimizer steps; default 20
  --every N            measure every N steps, and the last one; default 5
  --gpu NAME           compare the scalings of this GPU, as in fp8cfg plan;
                       default this machine, where a CPU emulates all
  --output FILE.yaml   write the advised recipe
  --json               print JSON
  --config-dir FOLDER  your own recipes and presets
"""


def run(argv: list[str]) -> int:
    """Prints the advice. Returns the exit code."""
    options = ("--config-dir", "--steps", "--every", "--gpu", "--output")
    arguments = split(argv, options, ("--json",))
    try:
        file = recipe_file(arguments.plain, ())
        steps = _count(arguments, "--steps")
        every = _count(arguments, "--every")
        gpu = arguments.one("--gpu")
        if gpu is not None:
            find_gpu(gpu)
        # Before training, although the file is written at the end.
        output = arguments.one("--output")
        if output is not None and os.path.lexists(output):
            raise ConfigError(f"--output {output}: exists already; remove it or write to another")
    except ConfigError as error:
        # One message with all problems of the command line.
        raise ConfigError(error.problems + wrong_words(arguments)) from None
    folder = arguments.one("--config-dir")
    recipe = compose_recipe(arguments.words, folder, file)
    from fp8cfg.parallel.process_group import world
    from fp8cfg.planning.hardware import find_hardware
    from fp8cfg.studies import advice

    # All ranks train, as under torchrun. Only the first one prints.
    with world(find_hardware(recipe.trainer.accelerator).device, recipe.trainer) as ranks:
        result = advice.advise(
            recipe,
            steps or advice.STEPS,
            every or advice.EVERY,
            gpu,
            folder,
            say=say_on_stderr,
        )
        is_first = ranks.first
    if not is_first:
        return 0
    is_json = "--json" in arguments.flags
    print(json.dumps(result.data(), indent=1) if is_json else result)
    if output is not None:
        write_new(Path(output), result.yaml())
        say_on_stderr(f"wrote {output}")
    elif result.overrides:
        if result.remedy is None:
            # A recipe without FP8 rejects overrides of it.
            arguments.words = [word for word in arguments.words if not _is_of_fp8(word)]
        say_on_stderr(f"train with: {command_line(arguments, list(result.overrides))}")
    return 0


def _is_of_fp8(word: str) -> bool:
    """Returns whether an override has no effect without FP8."""
    return matches(full(parsed(word)[0]), ("trainer.plugins.fp8", "trainer.plugins.backend"))


def _count(arguments: Arguments, option: str) -> int | None:
    """Returns the number of steps in an option, None without the option."""
    text = arguments.one(option)
    if text is None:
        return None
    # The length first: int() rejects texts of more than 4300 digits with an error of its own.
    if not text.isdecimal() or len(text) > 7 or int(text) < 1:
        raise ConfigError(f"{option} {text[:40]}: expected a number of steps, 1 to 9999999")
    return int(text)
