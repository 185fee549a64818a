"""`sample`: generates text from a run, in its own precision or another."""

from __future__ import annotations

import math
import unicodedata

from fp8cfg.cli.argv import Arguments, before_end, split
from fp8cfg.cli.run_models import integer_option, load_model, models_in_precisions
from fp8cfg.data import DataError
from fp8cfg.data.chat import encode_prompt
from fp8cfg.data.tokenizer import Tokenizer
from fp8cfg.schema.errors import ConfigError, printable
from fp8cfg.schema.messages import say_on_stderr

USAGE = """
fp8cfg sample RUN_FOLDER PROMPT [--tokens N] [--temperature T] [--top-k K]
              [--seed S] [--precision NAME] [--step N] [--tokenizer PATH]
              [--accelerator NAME] [--chat]

Generate text from the newest checkpoint of a run.

Examples:
  fp8cfg sample runs/mine "Once upon a time"
  fp8cfg sample runs/mine "def f" --tokens 20 --temperature 0
  fp8cfg sample runs/mine "Who are you?" --chat --precision bf16

The run folder is not changed. Put a PROMPT that begins with a dash last,
after --.

Options:
  --tokens N           most tokens to generate; default 100
  --temperature T      0 picks the likeliest token; default 0.8
  --top-k K            sample from the K likeliest tokens; default all
  --seed S             another seed gives another text; default 0
  --precision NAME     compute in this preset, such as bf16; default as trained
  --step N             use the checkpoint of step N
  --tokenizer PATH     tokenizer.json or its folder, if it has moved
  --accelerator NAME   auto, cpu or cuda; default as in the run
  --chat               send PROMPT as a user message through the chat template
"""
_OPTIONS = (
    "--tokens",
    "--temperature",
    "--top-k",
    "--seed",
    "--precision",
    "--step",
    "--tokenizer",
    "--accelerator",
)


def run(argv: list[str]) -> int:
    """Prints generated text and returns the exit code."""
    arguments = _split(argv)
    tokens, top_k = (
        integer_option(arguments, "--tokens", 1, 100),
        integer_option(arguments, "--top-k", 1),
    )
    temperature, seed = _temperature(arguments), integer_option(arguments, "--seed", 0, 0)
    if temperature == 0 and (
        idle := [name for name in ("--top-k", "--seed") if arguments.one(name)]
    ):
        raise ConfigError(
            f"{idle[0]}: has no effect at --temperature 0, which takes the likeliest token"
        )
    if (names := arguments.one("--precision")) and "," in names:
        raise ConfigError(f"--precision {names}: one at a time; fp8cfg evaluate compares several")
    # Loads torch, so all arguments are checked before.
    found = load_model(arguments)
    from fp8cfg.training.finished_run import run_tokenizer, sample

    tokenizer = run_tokenizer(found, arguments.one("--tokenizer"))
    prompt = _prompt(arguments.plain[1], "--chat" in arguments.flags, tokenizer)
    title, model = next(models_in_precisions(found, names))
    say_on_stderr(printable(f"{arguments.plain[0]}: step {found.step}, {title}"))
    written = list[int]()
    for token in sample(
        model, prompt or [tokenizer.eos], tokens or 1, temperature, top_k, seed or 0, tokenizer.size
    ):
        if token == tokenizer.eos:
            break
        written.append(token)
    text = (
        tokenizer.decode(written)
        if "--chat" in arguments.flags
        else tokenizer.decode([*prompt, *written])
    )
    print(_shown(text))
    return 0


def _split(argv: list[str]) -> Arguments:
    """Splits the arguments into run folder, prompt and options."""
    # `split` would take a prompt with "=" or a leading "+" as an override.
    prompts: list[str] = []
    option_words: list[str] = []
    takes_value = False
    options = before_end(argv)
    for word in options:
        if takes_value:
            option_words.append(word)
            takes_value = False
        elif word.startswith("-") and word != "-":
            option_words.append(word)
            takes_value = word in _OPTIONS
        else:
            prompts.append(word)
    arguments = split(option_words, _OPTIONS, ("--chat",))
    prompts += argv[len(options) + 1 :]
    if len(prompts) != 2:
        raise ConfigError(
            'sample: needs a run folder and a prompt, as in: fp8cfg sample runs/NAME "def "'
        )
    arguments.plain = prompts
    return arguments


def _temperature(arguments: Arguments) -> float:
    """Parses --temperature. Raises ConfigError."""
    text = arguments.one("--temperature")
    try:
        value = 0.8 if text is None else float(text)
    except ValueError:
        value = math.nan
    # Also false for NaN.
    if not 0 <= value < math.inf:
        raise ConfigError(f"--temperature {str(text)[:40]}: needs a number of at least 0")
    return value


def _prompt(text: str, chat: bool, tokenizer: Tokenizer) -> list[int]:
    """Tokenizes the prompt, with `chat` through the chat template."""
    try:
        if chat:
            return [int(i) for i in encode_prompt([{"role": "user", "content": text}], tokenizer)]
        return [int(i) for i in tokenizer.encode([text.encode("utf-8", "surrogateescape")])[0]]
    except DataError as e:
        raise ConfigError(f"--chat: {e}") from None


def _shown(text: str) -> str:
    """Replaces control characters: a model may generate escape sequences for the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
