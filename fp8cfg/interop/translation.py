"""Translation of recipes through the key table of another project, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from fp8cfg.composition.recipe_yaml import assigned, flat
from fp8cfg.interop.key_table import SILENT, TYPO, Dialect, Read, Values, Written, printable, shown
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.fp8 import ONLY_UNDER, power_2_scales, weights_2d
from fp8cfg.schema.keys import PLUGIN, full, short
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.presets import precision_preset
from fp8cfg.schema.recipe import Recipe, fields
from fp8cfg.schema.rules_precision import FSDP_COLUMNS
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import COLUMNS, gathered, level, of_level, resolved, sharding
from fp8cfg.schema.training import Strategy

_LOSS_SCALE = {
    f"precision.{k}"
    for k in (
        "loss_scale",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
    )
}


def without_effect(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    """Take the values out that would do nothing; a line for each that somebody wrote, in their words (`origin`), and that is not
    our default anyway."""
    lines = []
    for key in list(ours):
        why = _idle(key, ours)
        if why:
            value = ours.pop(key)
            if key in origin and (value != default(key) or why == _FINE):
                lines.append(f"{origin[key]}: {why}")
    formats = SCALINGS[ours.get("fp8.scaling", "delayed")].formats
    if ours.get("fp8.enabled") and len(formats) == 1:
        ours["fp8.format"] = formats[0]
    return list(dict.fromkeys(lines))


_FINE = (
    "MXFP8 and NVFP4 are E4M3 both ways here; E5M2 gradients under fine-grained scales make"
    " training diverge"
)


def _idle(key: str, ours: Values) -> str | None:
    """Why a value does nothing, or None where it does something."""
    scaling = ours.get("fp8.scaling", "delayed")
    if not ours.get("fp8.enabled") and (key.startswith("fp8.") or key in ("backend", "opt_level")):
        return "has no effect, nothing there turns FP8 on"
    if key.startswith("fp8.") and scaling not in ONLY_UNDER.get(
        key.removeprefix("fp8."), (scaling,)
    ):
        return f"has no effect under {scaling} scaling"
    if key == "fp8.format" and ours[key] not in SCALINGS[scaling].formats:
        return _FINE
    if key == "fp8.amax_compute_algo" and ours.get("fp8.amax_history_len") == 1:
        return "has no effect with a history of one"
    if key in _LOSS_SCALE and ours.get("precision.compute") != "fp16":
        return "has no effect, loss scaling is for fp16"
    if key in _LOSS_SCALE and key != "precision.loss_scale" and ours.get("precision.loss_scale"):
        return f"has no effect, the loss scale is {ours['precision.loss_scale']:g} throughout"
    return None


def changed(ours: Values) -> list[str]:
    """The keys that are not our defaults."""
    return [k for k, v in ours.items() if v != default(k)]


def default(key: str) -> Any:
    """Our default of a short key."""
    return fields()[full(key)].get_default(call_default_factory=True)


_KEPT = tuple(f"fp8.override_linear_precision.{gemm}" for gemm in ("fprop", "dgrad", "wgrad"))
_MSAMP = {"fp8.amax_history_len": 16, "fp8.reduce_amax": False, "storage.accumulate": "stored"}
"""What MS-AMP does that is not our default."""
_PARALLEL = tuple(
    f"trainer.strategy.{kind}_parallel_size"
    for kind in ("tensor_model", "pipeline_model", "context")
)
NOT_GIVEN = "not given there"
"""What a line on a value that the source lacks says."""
_ALONE = "MS-AMP shards, and has O3, through DeepSpeed alone"


def by_backend(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    """Put into `ours` what the backend does that it names, or another backend where that one could not run it. A line for each
    thing that is not as somebody wrote it, in their words (`origin`)."""
    lines = _under_fsdp(ours, origin) if ours.get("storage.shard") == "fsdp" else []
    under = {"te": _under_te, "msamp": _under_msamp}.get(ours.get("backend", "auto"))
    return lines + (under(ours, origin) if under else []) + _compiled(ours, origin)


def contradictions(ours: Values, origin: Mapping[str, str]) -> list[str]:
    """Lines on what that library has not either: MS-AMP's levels beside weights that are split."""
    levelled = ours.get("fp8.enabled") and (ours.get("backend") == "msamp" or ours.get("opt_level"))
    if not levelled or ours.get("storage.shard") != "fsdp":
        return []
    both = list(
        dict.fromkeys(
            origin[key] for key in ("storage.shard", "opt_level", "backend") if key in origin
        )
    )[:2]
    return [
        f"{' and '.join(both)}: MS-AMP splits no weights; write DeepSpeed's ZeRO stage 1 or 2, or"
        " drop MS-AMP"
    ]


def _compiled(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    backend = ours.get("backend", "auto")
    if ours.get("trainer.compile") != "on" or capabilities(backend).compiles:
        return []
    del ours["trainer.compile"]
    return [
        f"{origin.get('trainer.compile', 'trainer.compile=on')}: layers of backend={backend} are"
        " not compiled here"
    ]


def _under_fsdp(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    sums = ("fp32", "bf16", ours.get("precision.compute", "bf16"))
    kept = {f"storage.{column}": (codec,) for column, codec in FSDP_COLUMNS.items()} | {
        "storage.comm": sums
    }
    others = [key for key, codecs in kept.items() if ours.get(key, codecs[0]) not in codecs]
    for key in others:
        del ours[key]
    why = (
        "storage.shard=fsdp keeps weights, gradients and moments in float32, and sums gradients in"
        " that or bf16"
    )
    return [
        f"{said}: {why}" for said in dict.fromkeys(origin[key] for key in others if key in origin)
    ]


def _under_te(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    delayed = SCALINGS[ours.get("fp8.scaling", "delayed")].history
    kept = [key for key in _KEPT if ours.get(key)]
    both = not delayed and kept == [*_KEPT[1:]]  # its backward_override
    lacking = [
        key
        for key in ("fp8.interval", "fp8.multi_head_attention", *(() if both else kept))
        if key in changed(ours)
    ]
    lacking += ["storage.shard=fsdp"] if ours.get("storage.shard") == "fsdp" else []
    if lacking:
        del ours["backend"]
        return (
            [f"{origin['backend']}: backend stays auto, backend=te has no {', '.join(lacking)}"]
            if "backend" in origin
            else []
        )
    if delayed:
        ours["fp8.first_step"] = "te"
    return []


def _under_msamp(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    columns = [key for column in COLUMNS if (key := f"storage.{column}") in ours]
    lines = [
        f"{origin[key]}: MS-AMP's level says what is stored and sent"
        for key in columns
        if key in origin
    ]
    for key in columns:
        del ours[key]
    ours |= _MSAMP
    if ours.get("opt_level") == "O3" or ours.get("storage.shard", "none") not in ("auto", "none"):
        stored = of_level(Precision(backend="msamp", opt_level=ours.get("opt_level")))
        ours |= {
            f"storage.{column}": codec for column, codec in stored.items() if codec == "fp8_pow2"
        }
        ours |= {"backend": "native", "opt_level": ours.get("opt_level", "O2")}
        lines += (
            [f"{origin['backend']}: backend=native with the same storage; {_ALONE}"]
            if "backend" in origin
            else []
        )
    return list(dict.fromkeys(lines))


def rescaled(key: str, ours: Values, back: Values) -> bool:
    """Whether `key` is a column that MS-AMP, by which a recipe is read back, holds under scales of its own."""
    return (ours[key], back[key]) == ("fp8", "fp8_pow2")


def why(key: str, ours: Values, back: Values) -> str:
    """Why `key` is read back otherwise, where the other side's library is the reason; empty where it is not."""
    if key == "backend":
        reasons = {
            ("te", "auto"): "backend=te has not all that is asked for",
            ("msamp", "native"): _ALONE,
        }
        return reasons.get((ours[key], back[key]), "")
    if key == "fp8.first_step" and back[key] == "te":
        return "Transformer Engine begins with scale 1"
    if rescaled(key, ours, back) or (
        back["opt_level"] and key in _MSAMP and back[key] == _MSAMP[key]
    ):
        return f"MS-AMP has {str(back[key]).lower()}"
    return ""


def output_layer(recipe: Recipe) -> list[str]:
    """Leave the output layer of `recipe` in high precision where its sizes fit no FP8; a line on that."""
    if not recipe.fp8.output_layer:
        return []
    try:
        plan_layers(recipe)
    except ConfigError as e:
        misfits = [line for line in e.problems if line.startswith("fp8.output_layer=")]
        recipe.fp8.output_layer = recipe.fp8.output_layer and not misfits
        return [
            line.replace("has no effect, its layers stay", "this one stays") for line in misfits
        ]
    return []


def gpus(recipe: Recipe, ours: Values) -> list[str]:
    """Give `recipe` as many GPUs as the parallel sizes in `ours` multiply to, unless it has a multiple of them; a line on that.

    GPUs that the source gives stay.
    """
    trainer, size = recipe.trainer, recipe.trainer.strategy.size
    if trainer.num_nodes * trainer.devices % size == 0 or not any(key in ours for key in _PARALLEL):
        return []
    devices = gcd(size, 8)
    if "trainer.num_nodes" in ours:
        devices = size // trainer.num_nodes
    if "trainer.devices" in ours:
        devices = trainer.devices
    nodes = trainer.num_nodes if "trainer.num_nodes" in ours else size // devices
    if nodes * devices != size:
        return []  # which the check of the recipe rejects
    trainer.num_nodes = nodes
    trainer.devices = devices
    sizes = {"trainer.num_nodes": nodes, "trainer.devices": devices}
    new = " and ".join(f"{key}={value}" for key, value in sizes.items() if key not in ours)
    return [f"{new}: {NOT_GIVEN}; tensor x pipeline x context parallel = {size} GPUs"]


def batches(recipe: Recipe, ours: Values) -> list[str]:
    """Fits the batch sizes that the source doesn't give to its ranks. Returns a line on the change."""
    trainer = recipe.trainer
    replicas = max(trainer.num_nodes * trainer.devices // trainer.strategy.size, 1)
    if trainer.global_batch_size % (trainer.micro_batch_size * replicas) == 0:
        return []
    if "trainer.micro_batch_size" not in ours and trainer.global_batch_size % replicas == 0:
        trainer.micro_batch_size = gcd(
            trainer.micro_batch_size, trainer.global_batch_size // replicas
        )
        key = "trainer.micro_batch_size"
    elif "trainer.global_batch_size" not in ours:
        step = trainer.micro_batch_size * replicas
        trainer.global_batch_size = -(-trainer.global_batch_size // step) * step
        key = "trainer.global_batch_size"
    else:
        return []  # which the check of the recipe rejects
    value = getattr(trainer, key.rpartition(".")[2])
    return [f"{key}={value}: {NOT_GIVEN}; set to fit {replicas} data-parallel replicas"]


def warmup(recipe: Recipe, ours: Values) -> list[str]:
    """Fits a warmup that the source doesn't give to its steps. Returns a line on the change."""
    optim = recipe.optim
    longest = max(recipe.trainer.max_steps - optim.constant_steps, 0)
    if "optim.warmup_steps" in ours or optim.warmup_steps <= longest:
        return []
    optim.warmup_steps = longest
    return [
        f"optim.warmup_steps={longest}: {NOT_GIVEN}; set to fit"
        f" trainer.max_steps={recipe.trainer.max_steps}"
    ]


def read(
    dialect: Dialect,
    data: Mapping[str, Any],
    base: Recipe | None = None,
    preset: str | None = None,
    keeps_layout: bool = False,
) -> Read:
    """The recipe that `data` means, by the names that `dialect` knows, on top of `base`, whose precision it replaces. It is not
    yet checked as a whole. `preset` is the precision that `data` changes. If `data` gives a parallel size, the sizes that it does
    not give are 1, or those of `base` with `keeps_layout`. Raises ConfigError with a line for each value that
    cannot be, and then for each unknown key too.
    """
    theirs, spelled, problems = _named(dialect, data)
    remarks, vague = list[str](), list[str]()
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
    if preset is None:
        remarks += without_effect(ours, origin)
        problems += contradictions(ours, origin)
        remarks += by_backend(ours, origin)
    else:
        ours = _without_defaults(ours, origin)
        together = {**_changes(preset), **ours}
        remarks += without_effect(together, origin)
        ours = {key: value for key, value in together.items() if key in ours}
    remarks += [
        f"{origin[k]}: is so here; {why}"
        for k, why in dialect.doubts.items()
        if k in origin and k in changed(ours)
    ]
    recipe = (base or Recipe()).model_copy(deep=True)
    recipe.precision = Precision() if preset is None else precision_preset(preset)
    if not keeps_layout and any(key in ours for key in _PARALLEL):
        recipe.trainer.strategy = Strategy()
    unsaid, unknown = _rest(dialect, theirs, spelled)
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
    remarks += gpus(recipe, ours) + batches(recipe, ours) + warmup(recipe, ours)
    remarks += output_layer(recipe) if base else []
    return Read(recipe, tuple(remarks + unsaid), tuple(unknown))


def _changes(preset: str) -> dict[str, Any]:
    """Returns the values of a preset that are not our defaults."""
    values = {short(key): value for key, value in flat(precision_preset(preset), PLUGIN).items()}
    return {key: value for key, value in values.items() if value != default(key)}


def _without_defaults(ours: Values, origin: Mapping[str, str]) -> dict[str, Any]:
    """Returns `ours` without the other project's defaults of precision, which its preset replaces."""
    return {
        key: value
        for key, value in ours.items()
        if key in origin or not full(key).startswith(f"{PLUGIN}.")
    }


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
        k for k in scope if ours[k] != back[k] and (full(k) not in auto or rescaled(k, ours, back))
    ]
    lost = [f"{shown(k, ours[k])}: {why(k, ours, back) or _why(dialect, k)}" for k in different]
    lost += [
        f"{shown(k, ours[k])}: is written, but {doubt}"
        for k, doubt in dialect.doubts.items()
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
