"""CLI reference: the help text of each verb, and a common mistake with its answer."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile

from fp8cfg.__main__ import main
from fp8cfg.cli import VERBS
from fp8cfg.cli.help import usage

HEAD = """# Command line

`fp8cfg` and `python -m fp8cfg` are the same program. Each section has the text of
`fp8cfg VERB --help`, which begins with examples that work. Below it is a common mistake with the
answer that you get. All answers name the key or argument and tell you what to change.

[Exit codes](exit-codes.md) are the same for all verbs. A mistake on the command line is 2.
"""

MISTAKES = {
    "train": "fp8cfg train recipe=lama_tiny precision=bf16_fp8 fp8.magrin=1",
    "launch": "fp8cfg launch recipe=llama_tiny --nodes 2",
    "sweep": "fp8cfg sweep recipe=llama_tiny precision=bf16,bf16_fb8",
    "resume": "fp8cfg resume runs/llama-8b",
    "rerun": "fp8cfg rerun runs/llama_tiny --steps 10",
    "watch": "fp8cfg watch runs/llama-8b",
    "plan": "fp8cfg plan recipe=llama_8b precision=bf16_fp8 --gpu h1000",
    "check": "fp8cfg check recipe=llama_tiny precision=bf16_mxfp8 fp8.margin=1",
    "advise": "fp8cfg advise recipe=llama_tiny --steps 0",
    "doctor": "fp8cfg doctor --verbos",
    "list": "fp8cfg list presets",
    "explain": "fp8cfg explain fp8.history",
    "diff": "fp8cfg diff recipe=llama_8b",
    "runs": "fp8cfg runs . --where precison=bf16_fp8",
    "compare": "fp8cfg compare runs/fp8",
    "report": "fp8cfg report runs/llama-8b",
    "parity": "fp8cfg parity recipe=llama_tiny precision=bf16,bf16_fb8",
    "sample": "fp8cfg sample recipe=llama_tiny",
    "evaluate": "fp8cfg evaluate runs/llama-8b precision=fp8",
    "export": "fp8cfg export nemo2 recipe=llama_8b",
    "init": "fp8cfg init recipe=llama_8b",
    "import": "fp8cfg import recipe.yml",
    "data": "fp8cfg data data.path=corpus.txt",
    "schema": "fp8cfg schema recipe=llama_8b",
    "completion": "fp8cfg completion powershell",
}
"""A command with a common mistake for each verb."""


def page() -> str:
    """Returns the page. Raises KeyError for a verb without a mistake."""
    parts = [HEAD, _help(None)]
    for verb in VERBS:
        command = MISTAKES[verb]
        parts.append(_help(verb))
        parts.append(f"A mistake:\n\n```text\n$ {command}\n{answer(command)}\n```\n")
    return "\n".join(parts)


def _help(verb: str | None) -> str:
    return f"## {verb or 'fp8cfg'}\n\n```text\n{usage(verb)}\n```\n"


def answer(command: str) -> str:
    """Runs `command` in an empty folder and returns its error lines. It must exit with 2."""
    errors = io.StringIO()
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(errors):
        os.chdir(folder)
        try:
            code = main(shlex.split(command)[1:])
        finally:
            os.chdir(before)
    assert code == 2, f"{command}: exit code {code}, {errors.getvalue()}"
    return re.sub(rf"{re.escape(folder)}/?", "", errors.getvalue()).rstrip()
