"""`data prepare`: tokenizes text into token files."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fp8cfg.cli.argv import is_recipe_file, split
from fp8cfg.cli.recipe_arguments import compose_recipe, open_library, recipe_path
from fp8cfg.composition.overrides import Overrides
from fp8cfg.data import DataError
from fp8cfg.data.corpus import prepare
from fp8cfg.data.tokenizer import Tokenizer, load_tokenizer, padded_vocabulary
from fp8cfg.schema.errors import ConfigError, NotWritable, printable, refuse_if
from fp8cfg.schema.hub import tokenizer_path
from fp8cfg.schema.keys import short
from fp8cfg.schema.recipe import Recipe

USAGE = """
fp8cfg data prepare OUT data=NAME [FILE.yaml] [data.path=PATH]
                    [data.text_key=COLUMN] [data.tokenizer=FILE_OR_FOLDER]
                    [--config-dir FOLDER]

Tokenize text once into token files, so that training starts immediately.

Examples:
  fp8cfg data prepare tokens/a data=jsonl data.path=a.jsonl data.tokenizer=tok
  fp8cfg data prepare tokens/b data=text data.path=docs
  fp8cfg data=tokens data.path=tokens/a data.tokenizer=tok

It writes OUT.bin and OUT.idx in the format of Megatron's preprocess_data.py,
with an end token after each document. A source is stdlib, tiny, text, jsonl,
csv, parquet or dataset, of any size. Losses equal a run on the source.

Options:
  --config-dir FOLDER  your own recipes and presets
"""

_READ = ("data.name", "data.path", "data.text_key", "data.tokenizer", "data.mixture")


def run(argv: list[str]) -> int:
    """Writes token files and returns the exit code."""
    arguments = split(argv, ("--config-dir",))
    file = next((word for word in arguments.plain[2:] if is_recipe_file(word)), None)
    if arguments.plain[:1] != ["prepare"] or len(arguments.plain) != 2 + bool(file):
        raise ConfigError(
            "data: writes token files, as in: fp8cfg data prepare OUT data=text data.path=FOLDER"
        )
    out = arguments.plain[1]
    if "://" in out:
        raise ConfigError(
            f"{out}: token files are written here, not to an address; write a path, as in"
            " runs/tokens"
        )
    folder = arguments.one("--config-dir")
    recipe = compose_recipe(arguments.words, folder, recipe_path(file) if file else None)
    data = recipe.data
    library = open_library(folder)
    # Only the source and the tokenizer matter here. Other overrides would be lost silently.
    keys = {short(key) for key in Overrides.parse(arguments.words, library).keys}
    problems = []
    for key in sorted(keys - {*_READ}):
        problems.append(f"{key}: has no effect on token files; set it for the training run")
    refuse_if(problems)
    if data.mixture:
        raise ConfigError(
            "data.mixture: token files are written one by one and mixed in training; prepare each"
            " data.path"
        )
    start = time.perf_counter()
    try:
        with _exit_on_sigterm():
            tokenizer = _load_tokenizer(data.tokenizer)
            files = prepare(out, data.name, data.path, data.text_key, tokenizer)
    except DataError as error:
        raise ConfigError(f"data={data.name}: {error}") from None
    except OSError as error:
        raise NotWritable(f"{out}: cannot be written ({error.strerror or error})") from None
    seconds = time.perf_counter() - start
    print(
        f"wrote {printable(str(files.path))}.bin and .idx: {files.tokens} tokens of"
        f" {files.documents} documents in {seconds:.1f} s"
    )
    print(f"train on it: {_training_command(files.path, data.tokenizer, tokenizer)}")
    return 0


def _load_tokenizer(name: str | None) -> Tokenizer:
    """Loads the tokenizer. Raises ConfigError with the key."""
    try:
        return load_tokenizer(tokenizer_path(name))
    except DataError as error:
        problem = str(error).removeprefix(f"{name}: ")
        raise ConfigError(f"data.tokenizer={name}: {problem}") from None


def _training_command(path: Path, tokenizer_name: str | None, tokenizer: Tokenizer) -> str:
    """Returns the command to train on the files."""
    command = ["fp8cfg", "data=tokens", f"data.path={path}"]
    if tokenizer_name:
        command.append(f"data.tokenizer={tokenizer_name}")
    size = padded_vocabulary(tokenizer)
    if size != Recipe().model.vocab_size:
        command.append(f"model.vocab_size={size}")
    return printable(shlex.join(command))


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Context manager to raise SystemExit after SIGTERM. Incomplete files are then deleted."""

    def stop(number: int, frame: FrameType | None) -> None:
        """Signal handler: exits with the code of a shell for this signal."""
        sys.exit(128 + number)

    # Python sets signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
