"""`completion`: prints the completion script of a shell, and computes completions.

Each press of Tab starts this process, so it loads neither torch nor Hydra.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from fp8cfg.cli import GROUPS, VERBS, WORDS, hydra
from fp8cfg.cli.help import choices, usage
from fp8cfg.planning.hardware import GPUS
from fp8cfg.schema.errors import ConfigError, suggest
from fp8cfg.schema.keys import short
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import fields
from fp8cfg.schema.value_errors import options as literal_options

SCRIPTS = {
    "bash": (
        r"""# fp8cfg: add to ~/.bashrc: source <(fp8cfg completion bash)
_fp8cfg() {
    # Whole words up to the cursor: bash itself would split them at = and :
    local line=${COMP_LINE:0:COMP_POINT} words candidate IFS=$' \t\n'
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local current=${words[${#words[@]}-1]} keep=""
    # The line has the text before the last = or : already, so do not repeat it.
    [[ $COMP_WORDBREAKS == *=* && $current == *=* ]] && keep=${current%"${current##*=}"}
    [[ $COMP_WORDBREAKS == *:* && $current == *:* ]] && keep=${current%"${current##*:}"}
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate#"$keep"}")
    done < <("${words[0]/#\~/$HOME}" completion --words "${words[@]:1}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
}
complete -o default -F _fp8cfg fp8cfg
"""
    ),
    "zsh": (
        r"""# fp8cfg: add to ~/.zshrc, after compinit: source <(fp8cfg completion zsh)
_fp8cfg() {
    local -a found open
    local program=${(Q)words[1]/#\~/$HOME}
    found=("${(@f)$($program completion --words "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    found=(${found:#})
    if (( ! ${#found} )); then
        _files
        return
    fi
    open=(${(M)found:#*[=.]})
    found=(${found:#*[=.]})
    compadd -Q -S '' -- $open
    compadd -Q -- $found
}
compdef _fp8cfg fp8cfg
"""
    ),
    "fish": (
        r"""# fp8cfg: add to ~/.config/fish/config.fish: fp8cfg completion fish | source
function __fp8cfg_words
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($before[1] completion --words $before[2..-1] "$current" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c fp8cfg -f -a '(__fp8cfg_words)'
"""
    ),
}

USAGE = """
fp8cfg completion bash|zsh|fish

Print a script that completes verbs, options, presets, keys and values.

Examples:
  bash   source <(fp8cfg completion bash)
  zsh    source <(fp8cfg completion zsh)
  fish   fp8cfg completion fish | source

Add the line to ~/.bashrc, to ~/.zshrc after compinit, or to
~/.config/fish/config.fish.
"""
OPTION_VALUES = {
    **hydra.CHOICES,
    "--package": (),
    "--allow": (),
    "--gpu": tuple(GPUS),
    "--precision": tuple(choices("precision")),
    "--dtype": ("bf16", "fp16", "fp32"),
    "--fp8": ("block", "tensor"),
}
"""Options with a fixed set of values. An empty tuple means any key."""
FILE_OPTIONS = ("--config-dir", "--output")
"""Options with a file or folder."""
TRAINED = ("hf", "peft")
"""Exports that read a run folder."""


def run(argv: list[str]) -> int:
    """Prints the script of a shell, or the completions after --words. Returns the exit code."""
    # Scripts call --words. It is not in the usage text.
    if argv[:1] == ["--words"]:
        print("".join(f"{word}\n" for word in completions(argv[1:])), end="")
        return 0
    if len(argv) != 1 or argv[0] not in SCRIPTS:
        problem = "no such shell" if argv else "needs a shell"
        hint = suggest(" ".join(argv), SCRIPTS)
        raise ConfigError(f"{' '.join(['completion', *argv])}: {problem}{hint}")
    print(SCRIPTS[argv[0]], end="")
    return 0


def completions(words: list[str]) -> list[str]:
    """Returns the completions of the last word.

    Args:
        words: Words after `fp8cfg`, up to the cursor. The last one may be empty.

    Returns:
        Complete words, sorted. Empty if the shell should complete files.
    """
    *previous, current = words or [""]
    verb_name = "train"
    if previous and previous[0] in WORDS:
        verb_name = previous[0]
    verb = VERBS.get(verb_name)  # None for help
    option = ""
    if previous:
        option = hydra.SHORT.get(previous[-1], previous[-1])
    takes_path = verb is not None and verb.path
    takes_path = takes_path and len(previous) == 1 and not current.startswith("-")
    candidates: Iterable[str]
    # Without candidates the shell completes files.
    if option in FILE_OPTIONS or takes_path or _expects_file(previous, current):
        candidates = ()
    elif option in OPTION_VALUES:
        candidates = OPTION_VALUES[option] or keys()
    elif "=" in current:
        candidates = _value_candidates(current, previous)
    elif current.startswith("-"):
        candidates = options(verb_name)
    elif verb is None:
        candidates = WORDS
    elif verb.words is not None:
        candidates = verb.words
    elif previous == ["import"]:  # the project comes first
        candidates = _projects("import")
    elif previous == ["export"]:
        candidates = [*_key_candidates(current), *_projects("export")]
    elif previous == ["explain"]:  # keys without a value
        candidates = [key.rstrip("=") for key in _key_candidates(current)]
    elif previous:
        candidates = _key_candidates(current)
    else:
        candidates = [*WORDS, *_key_candidates(current)]
    return sorted({candidate for candidate in candidates if candidate.startswith(current)})


def _projects(verb: str) -> list[str]:
    """Returns the words after `import` and `export`: projects and other formats."""
    if verb not in ("import", "export"):
        return []
    # Imported after the check, so that other verbs complete without it.
    from fp8cfg.interop.projects import PROJECTS

    if verb == "import":
        return [*PROJECTS]
    return [*PROJECTS, *TRAINED, "slurm"]


def _expects_file(previous: list[str], current: str) -> bool:
    """Returns whether the next argument is a project's file or a run folder."""
    if len(previous) != 2 or current.startswith("-") or "=" in current:
        return False
    verb, project = previous
    if verb == "import":
        return project in _projects(verb)
    return verb == "export" and project in TRAINED


def options(verb: str) -> list[str]:
    """Returns the options of a verb.

    Args:
        verb: Name of the verb, or "help".
    """
    if verb == "help":
        return ["--help"]
    # From the usage text, so there is no second list. torchrun's options in examples are not ours.
    text = re.sub(r"torchrun.*", "", usage(verb))
    return sorted({"--help", *re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)})


def _value_candidates(word: str, previous: list[str]) -> list[str]:
    """Completes the value of `word`, after the last comma of a sweep."""
    key, _, value = word.partition("=")
    finished_values = value[: value.rfind(",") + 1]
    names = choices(key) if key in GROUPS else keys().get(key, [])
    candidates = [f"{key}={finished_values}{name}" for name in names]
    # Presets of a --config-dir earlier on the line are choices too.
    for option, folder in pairwise(previous):
        if option == "--config-dir":
            for file in Path(folder, key).glob("*.yaml"):
                candidates.append(f"{key}={finished_values}{file.stem}")
    return candidates


def _key_candidates(start: str) -> list[str]:
    """Returns groups and keys that begin with `start`, each up to its next dot."""
    candidates = [f"{group}=" for group in GROUPS]
    for key in keys():
        if key.startswith(start):
            node, dot, _ = key[len(start) :].partition(".")
            candidates.append(start + node + (dot or "="))
    return candidates


@functools.cache
def keys() -> dict[str, list[str]]:
    """Returns the values of each key by short name. Empty for keys with any value."""
    values = {}
    for key, field in fields().items():
        types = (field.annotation, *typing.get_args(field.annotation))
        if isinstance(field.annotation, type) and issubclass(field.annotation, Node):
            continue
        words = literal_options(field.annotation)
        if bool in types:
            words += ["true", "false"]
        if type(None) in types:
            words.append("null")
        values[short(key)] = words
    return values
