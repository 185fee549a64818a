"""`completion`: shell completion, the script for a shell and the words themselves.

The words come without the schema, whose import alone takes a tenth of a second: classes and options are read from the
source files of `config/`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from fp8cfg.backends import SHIPPED
from fp8cfg.cli import GROUPS, VERBS, WORDS, hydra
from fp8cfg.cli.help import choices
from fp8cfg.planning.hardware import GPUS
from fp8cfg.schema.errors import ConfigError, suggest

SCRIPTS = {
    "bash": (
        r"""# fp8cfg: add to ~/.bashrc: source <(fp8cfg completion bash)
_fp8cfg() {
    # Whole words up to the cursor: bash itself would split them at = and :
    local line=${COMP_LINE:0:COMP_POINT} words candidate IFS=$' \t\n'
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local current=${words[${#words[@]}-1]} keep=""
    # What stands before the last = or : is there already, and is not to be given again.
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

Prints a script that makes the shell complete verbs, options, presets, keys and
values of fp8cfg. To install it, add to ~/.bashrc, ~/.zshrc (after compinit) or
~/.config/fish/config.fish:
  bash   source <(fp8cfg completion bash)
  zsh    source <(fp8cfg completion zsh)
  fish   fp8cfg completion fish | source
"""
SHORT = {"precision.backend": "backend", "precision.opt_level": "opt_level"}
"""Keys whose short name is not that of their node with their own."""
NEXT = {**hydra.CHOICES, "--package": (), "--allow": (), "--gpu": tuple(GPUS)}
"""Options with a value of a few, or, where empty, with a key."""


def run(argv: list[str]) -> int:
    """Print the script of a shell, or after --words what completes the last of the words. Returns the exit code."""
    if argv[:1] == ["--words"]:
        print("".join(f"{word}\n" for word in completions(argv[1:])), end="")
        return 0
    if len(argv) != 1 or argv[0] not in SCRIPTS:
        given = " ".join(["completion", *argv])
        what = "no such shell" if argv else "needs a shell"
        raise ConfigError(f"{given}: {what}{suggest(given.partition(' ')[2], SCRIPTS)}")
    print(SCRIPTS[argv[0]], end="")
    return 0


def completions(words: list[str]) -> list[str]:
    """What the last of `words`, all after the command's name, can be completed to; in full, and sorted."""
    *before, current = words or [""]
    named = before[0] if before and before[0] in WORDS else "train"
    verb = VERBS.get(named)  # help is none
    found: Iterable[str]
    option = hydra.SHORT.get(before[-1], before[-1]) if before else ""
    if option == "--config-dir" or (verb and verb.path and len(before) == 1):
        found = ()  # the shell completes files
    elif option in NEXT:
        found = NEXT[option] or keys()
    elif "=" in current:
        found = _valued(current, before)
    elif current.startswith("-"):
        found = options(named)
    elif verb is None:
        found = WORDS
    elif verb.words is not None:
        found = verb.words
    else:
        found = [*(() if before else WORDS), *_keys_below(current)]
        if before == ["explain"]:  # a key alone
            found = [key.rstrip("=") for key in found]
    return sorted({f for f in found if f.startswith(current)})


def options(verb: str) -> list[str]:
    """The options of `verb`, as its USAGE names them; read, not imported."""
    file = Path(__file__).with_name(f"{verb}.py")
    source = file.read_text(encoding="utf-8") if file.exists() else ""
    usage = re.search(r'^USAGE = f?"""(.*?)"""', source, re.DOTALL | re.MULTILINE)
    text = re.sub(r"torchrun.*", "", usage[1] if usage else "")
    return sorted({"--help", *re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)})


def _valued(word: str, before: list[str]) -> list[str]:
    """What completes the value of `word`, after the last comma of a sweep; presets of a --config-dir `before` it included."""
    key, _, value = word.partition("=")
    ready = f"{key}={value[: value.rfind(',') + 1]}"
    folders = [Path(folder, key) for option, folder in pairwise(before) if option == "--config-dir"]
    own = [file.stem for folder in folders for file in folder.glob("*.yaml")]
    if key == SHORT["precision.backend"]:
        from fp8cfg.schema.backends import (
            offered,  # not above: looking through the installed packages takes a while
        )

        own += offered()
    return [
        ready + found for found in [*(choices(key) if key in GROUPS else keys().get(key, ())), *own]
    ]


def _keys_below(start: str) -> list[str]:
    """The groups and keys that begin with `start`, each up to its next dot."""
    found = [f"{group}=" for group in GROUPS]
    for key in keys():
        rest, dot, _ = key[len(start) :].partition(".")
        found += [start + rest + (dot or "=")] if key.startswith(start) else []
    return found


@functools.cache
def keys() -> dict[str, tuple[str, ...]]:
    """Every key by its short name, with the words that its value can be where they are few: options, true, false, null."""
    package = Path(__file__).parents[1]
    trees = [
        ast.parse(file.read_text(encoding="utf-8")) for file in (package / "schema").glob("*.py")
    ]
    classes = {
        c.name: (home, c)
        for tree in trees
        for c in tree.body
        if isinstance(c, ast.ClassDef) and (home := _home(c)) is not None and c.name != "Node"
    }
    named = {
        t.id: s.value
        for tree in trees
        for s in tree.body
        if isinstance(s, ast.Assign)
        for t in s.targets
        if isinstance(t, ast.Name) and isinstance(s.value, ast.Subscript)
    }
    found: dict[str, tuple[str, ...]] = {}
    for home, c in classes.values():
        for field in c.body:
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and field.target.id != "home"
                and ast.unparse(field.annotation) not in classes
            ):
                key = f"{home}.{field.target.id}" if home else field.target.id
                found[SHORT.get(key, key)] = _options(field.annotation, named)
    return found


def _home(c: ast.ClassDef) -> str | None:
    """The `home` that the class of a node has: where it stands in the recipe."""
    for s in c.body:
        if (
            isinstance(s, ast.AnnAssign)
            and isinstance(s.target, ast.Name)
            and s.target.id == "home"
            and s.value
        ):
            return str(ast.literal_eval(s.value))
    return None


def _options(annotation: ast.expr, named: Mapping[str, ast.expr]) -> tuple[str, ...]:
    if isinstance(annotation, ast.Name):
        if annotation.id == "Backend":
            return ("auto", *SHIPPED)
        return (
            ("true", "false")
            if annotation.id == "bool"
            else _options(named[annotation.id], named)
            if annotation.id in named
            else ()
        )
    if isinstance(annotation, ast.BinOp):
        return _options(annotation.left, named) + _options(annotation.right, named)
    if isinstance(annotation, ast.Constant):
        return ("null",)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        return tuple(str(o) for o in ast.literal_eval(annotation.slice))
    return ()
