"""Python API reference: the public names of `fp8cfg` by topic, with signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

import fp8cfg
from fp8cfg.schema.node import Node
from fp8cfg.schema.presets import PRESETS
from tools.reference.markdown import code, plain, table

HEAD = """# Python

The public names of `fp8cfg`, by what you want to do. `import fp8cfg` loads neither torch, Hydra nor
Fiddle; each name is imported on first use. `fp8cfg.recipes` has a function for each
[recipe](presets.md#recipe)."""
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)
TITLES = {"Args": "Arguments"}
WIDTH = 72
"""Characters of a signature on one line."""

TOPICS = {
    "Make a recipe": (
        "Start from a function of `fp8cfg.recipes` or from words as on the command line.",
        "compose recipe from_yaml to_yaml structured_config",
    ),
    "Look before you train": (
        "What will run in FP8, how much memory it takes, and why a key has its value.",
        "plan Plan coverage explain Explanation",
    ),
    "Build and train": (
        "`fit` trains a recipe or a job. `resume` continues a run.",
        "build Job fit resume run_data Callback RunFolder averaged Average",
    ),
    "Look at runs": (
        "Read run folders, compare runs, and write a page with their curves.",
        "find_runs read_run RunData compare_runs Comparison write_report",
    ),
    "Does FP8 train as well here?": (
        "Measure which precision fits your model, and compare losses with a baseline.",
        "parity ParityReport advise advise_model Advice",
    ),
    "Convert your own model": (
        "FP8 for any module, with your own training loop.",
        "convert_model convert_back has_fp8_layers collect_statistics",
    ),
    "Replace Accelerate's FP8": (
        "Functions of Accelerate with the same names and arguments.",
        "apply_fp8_autowrap contextual_fp8_autocast has_transformer_engine_layers",
    ),
    "Launch on several GPUs": (
        "Run a recipe in other processes: locally, with torchrun, or in a Slurm job.",
        "run Execution Executor Command LocalExecutor TorchrunExecutor SlurmExecutor",
    ),
    "Edit the Fiddle graph": ("A recipe lowered to the graph that builds the job.", "lower"),
    "Errors": (
        "All errors derive from `fp8cfg.schema.errors.Fp8cfgError`. See [exit codes](exit-codes.md).",
        "ConfigError NotFP8Error exit_codes",
    ),
}
"""Each topic with its introduction and its public names."""


def page() -> str:
    """Returns the page.

    Raises:
        AssertionError: A public function or class has no topic.
    """
    public = {name: getattr(fp8cfg, name) for name in fp8cfg.__all__}
    nodes = {name for name, value in public.items() if _is_class(value, Node)}
    modules = {name for name, value in public.items() if inspect.ismodule(value)}
    in_topics = {name for _, names in TOPICS.values() for name in names.split()}
    rest = set(public) - nodes - modules - set(PRESETS) - in_topics
    assert not rest, f"no topic in tools/reference/python.py: {sorted(rest)}"

    parts = [HEAD]
    for topic, (introduction, names) in TOPICS.items():
        parts += [f"## {topic}", introduction]
        for name in names.split():
            value = public[name]
            parts.append(_class(name, value) if _is_class(value) else _function(name, value))
    presets = ", ".join(code(name) for name in public if name in PRESETS)
    return "\n\n".join(
        [
            *parts,
            "## Nodes of a recipe",
            "Typed, checked at construction and at assignment. Their fields are the [keys](keys.md).",
            _summary("class", public, nodes),
            "## Precision presets",
            "Functions without arguments that return a `Precision`. The page of presets shows"
            f" [what each sets](presets.md#precision).\n\n{presets}.",
            "## Modules",
            _summary("module", public, modules),
        ]
    )


def _is_class(value: Any, base: type = object) -> bool:
    return inspect.isclass(value) and issubclass(value, base)


def _summary(kind: str, public: dict[str, Any], names: set[str]) -> str:
    rows = [[code(name), _first_sentence(value)] for name, value in public.items() if name in names]
    return table([kind, "contents"], rows)


def _function(name: str, function: Any) -> str:
    return f"### {name}\n\n```text\n{name}{_signature(function)}\n```\n\n{_described(function)}"


def _class(name: str, cls: Any) -> str:
    rows = []
    for member, value in vars(cls).items():
        is_method = inspect.isfunction(value)
        if member.startswith("_") or not (is_method or isinstance(value, property)):
            continue
        if inspect.getdoc(value):
            call = f"{member}{_signature(value)}" if is_method else member
            rows.append([code(call), _first_sentence(value)])
    text = f"### {name}\n\n{_described(cls)}"
    return f"{text}\n\n{table(['member', 'what it does'], rows)}" if rows else text


def _described(thing: Any) -> str:
    """Returns the docstring as Markdown: text, then lists of arguments, returns and errors."""
    # The text before the first section, then a title and a body for each section.
    text, *sections = SECTION.split(inspect.getdoc(thing) or "")
    blocks = [plain(text.rstrip())]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        lines = inspect.cleandoc(body)
        if title == "Returns":
            blocks.append(f"**Returns** {plain(' '.join(lines.split()))}")
            continue
        blocks.append(f"**{TITLES.get(title, title)}**")
        # An entry begins at the margin. Its further lines are indented.
        entries = re.split(r"\n(?=\S)", lines)
        blocks.append("\n".join(f"- {_entry(entry)}" for entry in entries))
    return "\n\n".join(block for block in blocks if block)


def _entry(entry: str) -> str:
    """Returns `name: text` with the name as code. Some entries have only text."""
    entry = " ".join(entry.split())
    named = re.match(r"(\*{0,2}[\w.]+): (.*)", entry)
    return f"`{named[1]}`: {plain(named[2])}" if named else plain(entry)


def _signature(function: Any) -> str:
    """Returns the signature without `self`, with one parameter per line if it is long."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    signature = signature.replace(parameters=parameters)
    text = _readable(str(signature))
    if len(text) <= WIDTH or not parameters:
        return text
    bare = signature.replace(parameters=[], return_annotation=inspect.Signature.empty)
    returned = str(signature.replace(parameters=[])).removeprefix(str(bare))
    lines = [f"    {parameter}," for parameter in parameters]
    # Python 3.13 has Signature.format(max_width=...), which does all of this.
    keyword_only = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters]
    if any(keyword_only):
        lines.insert(keyword_only.index(True), "    *,")
    return _readable("\n".join(["(", *lines, f"){returned}"]))


def _readable(signature: str) -> str:
    """Removes the quotes of annotations and the addresses of functions that are defaults."""
    named = re.sub(r"<function (\w+) at 0x\w+>", r"\1", signature.replace("'", ""))
    return re.sub(r"<function [^ ]+ at 0x\w+>", "...", named)


def _first_sentence(thing: Any) -> str:
    paragraph = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return plain(paragraph.partition(". ")[0].rstrip(".:"))
