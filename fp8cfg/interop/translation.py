"""Translation between recipes and the settings of another project, by its key table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8cfg.composition.recipe_yaml import assigned, flat
from fp8cfg.interop.imported_values import (
    PARALLEL_SIZES,
    apply_backend,
    backend_reason,
    changed_keys,
    default_value,
    drop_ineffective_values,
    exclude_output_layer,
    find_contradictions,
    fit_batch_sizes,
    fit_gpus,
    fit_warmup,
    has_msamp_scales,
)
from fp8cfg.interop.key_table import (
    OMIT,
    TYPO_SIMILARITY,
    KeyTable,
    Read,
    Values,
    Written,
    format_setting,
)
from fp8cfg.schema.errors import ConfigError, printable, refuse_if
from fp8cfg.schema.fp8 import ONLY_UNDER, power_2_scales, weights_2d
from fp8cfg.schema.keys import PLUGIN, full, short
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.presets import precision_preset
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.storage import gathered, level, resolved, sharding
from fp8cfg.schema.training import Strategy


def import_settings(
    table: KeyTable,
    data: Mapping[str, Any],
    base: Recipe | None = None,
    preset: str | None = None,
    keeps_layout: bool = False,
) -> Read:
    """Imports settings of another project into a recipe. The result is not checked yet.

    Args:
        table: Key table of the project.
        data: Settings by key, in any spelling. None is the same as a missing key.
        base: The recipe for all other values. Its precision is replaced.
        preset: Name of the precision preset that the settings change.
        keeps_layout: Whether parallel sizes that are missing in `data` come from `base`. By
            default they are 1 as soon as `data` has one of the sizes.

    Raises:
        ConfigError: With one line for each invalid setting, followed by the unknown keys.
    """
    settings, source_keys, problems = _canonical_settings(table, data)
    remarks: list[str] = []
    # Problems of combined settings. Usually the entry of a single setting has the same problem,
    # and can name its key. So these are reported only if there are no others.
    combined_problems: list[str] = []
    try:
        remarks = table.prepare(settings)
    except ConfigError as error:
        problems += [f"{table.name}: {line}" for line in error.problems]
    except ValueError as error:
        combined_problems.append(f"{table.name}: {error}")

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for entry in table.entries:
        if entry.key not in settings:
            continue
        setting = settings[entry.key]
        text = format_setting(source_keys.get(entry.key, entry.key), setting)
        try:
            entry_values = entry.read(setting)
        except ValueError as error:
            is_combined = entry.key.isupper()
            (combined_problems if is_combined else problems).append(f"{text}: {error}")
            continue
        values |= entry_values
        # Defaults of the project have no origin. Remarks are only about the user's settings.
        is_default = setting == table.defaults.get(entry.key, OMIT)
        if entry.key in source_keys and not is_default:
            origins |= dict.fromkeys(entry_values, text)

    if preset is None:
        remarks += drop_ineffective_values(values, origins)
        problems += find_contradictions(values, origins)
        remarks += apply_backend(values, origins)
    else:
        # The preset replaces the project's defaults of precision. It also decides which settings
        # have an effect.
        values = _without_precision_defaults(values, origins)
        preset_values = {**_changes_of_preset(preset), **values}
        remarks += drop_ineffective_values(preset_values, origins)
        values = {key: value for key, value in preset_values.items() if key in values}
    changed = changed_keys(values)
    for key, caveat in table.caveats.items():
        if key in origins and key in changed:
            remarks.append(f"{origins[key]}: imported, but {caveat}")

    recipe = (base or Recipe()).model_copy(deep=True)
    recipe.precision = Precision() if preset is None else precision_preset(preset)
    if not keeps_layout and any(key in values for key in PARALLEL_SIZES):
        recipe.trainer.strategy = Strategy()
    try:
        recipe = assigned(recipe, {full(key): value for key, value in values.items()})
    except ConfigError as error:
        problems += [_with_origin(line, origins) for line in error.problems]

    unsupported, unknown = _other_settings(table, settings, source_keys)
    problems = problems or combined_problems
    problems += _section_problems(table, settings, source_keys)
    refuse_if([*problems, *unknown] if problems else [])
    remarks += fit_gpus(recipe, values)
    remarks += fit_batch_sizes(recipe, values)
    remarks += fit_warmup(recipe, values)
    if base is not None:
        remarks += exclude_output_layer(recipe)
    return Read(recipe, (*remarks, *unsupported), tuple(unknown))


def export_recipe(table: KeyTable, recipe: Recipe) -> Written:
    """Exports a recipe as settings of another project, by dotted key.

    Raises:
        ConfigError: The recipe breaks a rule, or the project cannot express it.
    """
    recipe.check()
    values = effective_values(recipe)
    refuse_if(table.export_errors(values))
    settings: dict[str, Any] = {}
    for entry in table.entries:
        if not entry.applies(values):
            continue
        setting = entry.write(values)
        if setting is not OMIT:
            settings[entry.key] = setting

    # A value is lost if importing the settings does not return it.
    imported = effective_values(import_settings(table, settings).recipe)
    # Keys at auto follow from other keys. A remark on those is enough.
    auto_keys = {key for key, value in flat(recipe).items() if value == "auto"}
    lost_keys = []
    for key, value in values.items():
        is_in_scope = _is_precision_key(key) or key in table.extra_keys
        follows = full(key) in auto_keys and not has_msamp_scales(key, values, imported)
        if is_in_scope and value != imported[key] and not follows:
            lost_keys.append(key)

    lost = []
    for key in lost_keys:
        reason = backend_reason(key, values, imported) or _reason(table, key)
        lost.append(f"{format_setting(key, values[key])}: {reason}")
    changed = changed_keys(values)
    for key, caveat in table.caveats.items():
        if key in changed and key not in lost_keys:
            lost.append(f"{format_setting(key, values[key])}: exported, but {caveat}")
    return Written(settings, (*lost, *table.export_remarks(values)))


def effective_values(recipe: Recipe) -> dict[str, Any]:
    """Returns the values of a recipe by short key, with auto and null resolved.

    Recipes with equal values train alike.
    """
    precision = recipe.precision
    values = {short(key): value for key, value in flat(recipe).items()}
    values |= {f"storage.{column}": dtype for column, dtype in resolved(precision).items()}
    values["opt_level"] = level(precision)
    # Other projects decide about sharding without a key, so auto is the same as none.
    values["storage.shard"] = sharding(precision, ranks=1)
    if precision.storage.shard == "fsdp":
        values["storage.gather"] = gathered(precision, precision.backend)
    scaling = precision.fp8.scaling
    if scaling in ONLY_UNDER["use_power_2_scales"]:
        values["fp8.use_power_2_scales"] = power_2_scales(precision.fp8)
    if scaling in ONLY_UNDER["enable_2d_quantization"]:
        values["fp8.enable_2d_quantization"] = weights_2d(precision.fp8)
    return values


def with_source(source: str, error: ConfigError) -> ConfigError:
    """Returns `error` with the name of the source at the beginning of each line."""
    return ConfigError(
        [line if line.startswith(source) else f"{source}: {line}" for line in error.problems]
    )


def _canonical_settings(
    table: KeyTable, data: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Returns settings by the table's names, keys of `data` by these names, and problems.

    The settings include the project's defaults. These have no key of `data`.
    """
    settings = dict(table.defaults)
    source_keys: dict[str, str] = {}
    problems: list[str] = []
    for key, value in data.items():
        if value is None:
            continue
        name = table.canonical_name(key)
        if name in source_keys and settings[name] != value:
            first = format_setting(source_keys[name], settings[name])
            second = format_setting(printable(key), value)
            problems.append(f"{second}: the same key as {first}; remove one")
        settings[name] = value
        source_keys.setdefault(name, printable(key))
    return settings, source_keys, problems


def _without_precision_defaults(values: Values, origins: Mapping[str, str]) -> dict[str, Any]:
    return {
        key: value for key, value in values.items() if key in origins or not _is_precision_key(key)
    }


def _changes_of_preset(preset: str) -> dict[str, Any]:
    """Returns the changed values of a precision preset."""
    values = flat(precision_preset(preset), PLUGIN)
    by_short_key = {short(key): value for key, value in values.items()}
    return {key: value for key, value in by_short_key.items() if value != default_value(key)}


def _is_precision_key(key: str) -> bool:
    return full(key).startswith(f"{PLUGIN}.")


def _with_origin(problem: str, origins: Mapping[str, str]) -> str:
    """Replaces `key=value` at the beginning of a problem by the setting of the source."""
    assignment, _, reason = problem.partition(": ")
    key = assignment.partition("=")[0]
    return f"{origins.get(key, assignment)}: {reason}"


def _reason(table: KeyTable, key: str) -> str:
    """Returns why the project has no key for a recipe key."""
    node = f"{key.partition('.')[0]}."
    return table.reasons.get(key) or table.reasons.get(node) or f"{table.name} has no key for it"


def _section_problems(
    table: KeyTable, settings: Mapping[str, Any], source_keys: Mapping[str, str]
) -> list[str]:
    """Returns an error for each section with a value instead of keys."""
    problems = []
    for name, source_key in source_keys.items():
        example = table.first_key(name)
        if example and name in settings:
            text = format_setting(source_key, settings[name])
            problems.append(f"{text}: is a section, with keys such as {example}")
    return problems


def _other_settings(
    table: KeyTable, settings: Mapping[str, Any], source_keys: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Returns remarks on the settings without an entry.

    Returns:
        Remarks on unsupported settings, one for each reason. Then remarks on unknown keys.
    """
    entries = {entry.key for entry in table.entries}
    by_reason: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name, source_key in source_keys.items():
        # `prepare` removes settings that it has read. Sections are errors.
        if name not in settings or table.first_key(name):
            continue
        # A key can be exported and still be unsupported: the import then accepts the usual
        # settings only.
        unsupported = table.unsupported.get(name)
        if unsupported is None and name in entries:
            continue
        # A typo of a key is not a key of an unsupported section.
        if unsupported is None and not table.most_similar_key(name, TYPO_SIMILARITY):
            unsupported = table.find_unsupported(name)
        if unsupported is None:
            unknown.append(_unknown_key(table, name, source_key))
        # True == 1 in Python, but not in a configuration.
        elif not any(
            settings[name] == usual and type(settings[name]) is type(usual)
            for usual in unsupported.usual
        ):
            text = format_setting(source_key, settings[name])
            by_reason.setdefault(unsupported.reason, []).append(text)
    remarks = [f"{', '.join(texts)}: {reason}" for reason, texts in by_reason.items()]
    return remarks, unknown


def _unknown_key(table: KeyTable, name: str, source_key: str) -> str:
    kind = "key"
    suggestion = table.suggest_key(name)
    if source_key.startswith("--"):
        kind = "flag"
        if suggestion:
            suggestion = f"--{suggestion.replace('_', '-')}"
    hint = f"; did you mean {suggestion!r}?" if suggestion else ""
    return f"{source_key}: no such {kind} of {table.name}{hint}"
