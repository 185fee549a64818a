"""Translation of recipes through the key table of another project, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8cfg.composition.flatten import assigned, flat
from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.fp8 import ONLY_UNDER, power_2_scales, weights_2d
from fp8cfg.config.key_names import PLUGIN, full, short
from fp8cfg.config.precision import Precision
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import gathered, level, resolved, sharding
from fp8cfg.interop import implications
from fp8cfg.interop.key_table import SILENT, TYPO, Dialect, Read, Values, Written
from fp8cfg.interop.precision_effect import changed, without_effect
from fp8cfg.interop.value_spellings import printable, shown


def read(dialect: Dialect, data: Mapping[str, Any], base: Recipe | None = None) -> Read:
    """The recipe that `data` means, by the names that `dialect` knows, on top of `base`, whose precision it replaces. It is not
    yet checked as a whole. Raises ConfigError with a line for each value that cannot be, and then for each unknown key too.
    """
    theirs, spelled, problems = _named(dialect, data)
    remarks, vague, unknown = list[str](), list[str](), dialect.strange(theirs)
    try:
        remarks = dialect.prepare(theirs)
    except ConfigError as e:
        problems += [f"{dialect.name}: {line}" for line in e.problems]
    except ValueError as e:  # a value that its own entry refuses too, as a rule, and by its name
        vague = [f"{dialect.name}: {e}"]
    ours, origin = dict[str, Any](), dict[str, str]()
    for entry in dialect.entries:
        if entry.theirs in theirs:
            try:
                found = entry.read(theirs[entry.theirs])
            except ValueError as e:
                line = (
                    f"{shown(spelled.get(entry.theirs, entry.theirs), theirs[entry.theirs])}: {e}"
                )
                (vague if entry.theirs.isupper() else problems).append(line)
                continue
            ours |= found
            if entry.theirs in spelled and theirs[entry.theirs] != dialect.defaults.get(
                entry.theirs, SILENT
            ):
                origin |= dict.fromkeys(found, shown(spelled[entry.theirs], theirs[entry.theirs]))
    remarks += without_effect(ours, origin)
    problems += implications.contradictions(ours, origin)
    remarks += implications.by_backend(ours, origin)
    remarks += [
        f"{origin[k]}: is so here; {why}"
        for k, why in dialect.doubts.items()
        if k in origin and k in changed(ours)
    ]
    recipe = (base or Recipe()).model_copy(deep=True)
    recipe.precision = Precision()
    unsaid, more = _rest(dialect, theirs, spelled)
    unknown += more
    try:
        recipe = assigned(recipe, {full(k): v for k, v in ours.items()})
    except ConfigError as e:
        problems += [_in_their_words(line, origin) for line in e.problems]
    problems = problems or vague
    problems += [
        f"{shown(spelled[name], theirs[name])}: is a section, with keys such as {first}"
        for name in spelled
        if name in theirs and (first := dialect.within(name))
    ]
    refuse_if([*problems, *unknown] if problems else [])
    remarks += implications.gpus(recipe, ours) + (implications.output_layer(recipe) if base else [])
    return Read(recipe, tuple(remarks + unsaid), tuple(unknown))


def write(dialect: Dialect, recipe: Recipe) -> Written:
    """`recipe` by the names of `dialect`, as a flat table. What it cannot say is what reading it back does not give. Raises
    ConfigError where the recipe breaks a rule, or is one that cannot be written there."""
    recipe.check()
    ours = table(recipe)
    refuse_if(dialect.refuse(ours))
    data = {
        e.theirs: value
        for e in dialect.entries
        if e.when(ours) and (value := e.write(ours)) is not SILENT
    }
    back = table(read(dialect, data).recipe)
    scope = [k for k in ours if full(k).startswith(f"{PLUGIN}.") or k in dialect.beyond]
    auto = {
        k for k, v in flat(recipe).items() if v == "auto"
    }  # these follow from others, which are listed
    different = [
        k
        for k in scope
        if ours[k] != back[k] and (full(k) not in auto or implications.rescaled(k, ours, back))
    ]
    lost = [
        f"{shown(k, ours[k])}: {implications.why(k, ours, back) or _why(dialect, k)}"
        for k in different
    ]
    lost += [
        f"{shown(k, ours[k])}: is written, but {why}"
        for k, why in dialect.doubts.items()
        if k in changed(ours) and k not in different
    ]
    return Written(data, (*lost, *dialect.differs(ours)))


def table(recipe: Recipe) -> dict[str, Any]:
    """Every value of `recipe` by its short key, with what `auto` and null come to: two recipes with equal tables train alike."""
    p = recipe.precision
    found = {short(k): v for k, v in flat(recipe).items()}
    found |= {f"storage.{column}": codec for column, codec in resolved(p).items()}
    found["opt_level"] = level(p)
    found["storage.shard"] = sharding(p, 1)  # what others split by themselves is their own default
    if p.storage.shard == "fsdp":
        found["storage.gather"] = gathered(p, p.backend)
    if p.fp8.scaling in ONLY_UNDER["use_power_2_scales"]:
        found["fp8.use_power_2_scales"] = power_2_scales(p.fp8)
    if p.fp8.scaling in ONLY_UNDER["enable_2d_quantization"]:
        found["fp8.enable_2d_quantization"] = weights_2d(p.fp8)
    return found


def _why(dialect: Dialect, key: str) -> str:
    return (
        dialect.why.get(key)
        or dialect.why.get(key.partition(".")[0] + ".")
        or f"{dialect.name} has no key for it"
    )


def _in_their_words(line: str, origin: Mapping[str, str]) -> str:
    """A line about a value of ours, with what somebody wrote for it, where somebody did."""
    head, _, reason = line.partition(": ")
    return f"{origin.get(head.partition('=')[0], head)}: {reason}"


def _named(
    dialect: Dialect, data: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Their values by the names of the table, with what they are called in `data`, and the lines of keys given twice. A null says
    nothing."""
    theirs, spelled, problems = dict(dialect.defaults), dict[str, str](), list[str]()
    for key, value in data.items():
        if value is None:
            continue
        name = dialect.named(key)
        if name in spelled and theirs[name] != value:
            twice = shown(spelled[name], theirs[name])
            problems.append(
                f"{shown(printable(key), value)}: one key with {twice}; drop one of the two"
            )
        theirs[name], spelled[name] = value, spelled.get(name, printable(key))
    return theirs, spelled, problems


def _rest(
    dialect: Dialect, theirs: Values, spelled: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The lines of what has no counterpart, one for each reason, and those of what is no key of theirs."""
    known, reasons, unknown = (
        {e.theirs for e in dialect.entries},
        dict[str, list[str]](),
        list[str](),
    )
    for name, key in spelled.items():
        if name not in theirs or dialect.within(name):  # dialect.prepare has seen to it, or `read`
            continue
        value, lacking = theirs[name], dialect.unsaid.get(name)
        if not lacking and name not in known and not dialect.like(name, TYPO):
            lacking = dialect.lacks(name)
        if lacking and not any(
            value == usual and type(value) is type(usual) for usual in lacking.usual
        ):
            reasons.setdefault(lacking.why, []).append(shown(key, value))
        elif name not in known and not lacking:
            flag, near = key.startswith("--"), dialect.near(name)
            meant = f"--{near.replace('_', '-')}" if flag and near else near
            unknown.append(
                f"{key}: no such {'flag' if flag else 'key'} of {dialect.name}"
                + (f"; did you mean {meant!r}?" if meant else "")
            )
    return [f"{', '.join(keys)}: {why}" for why, keys in reasons.items()], unknown


def where(source: str, error: ConfigError) -> ConfigError:
    """`error` with its source before each line that does not name it."""
    return ConfigError(
        [line if line.startswith(source) else f"{source}: {line}" for line in error.problems]
    )
