"""torchtitan configurations: the sections of FP8 and MXFP8 linear layers under each of the names that they have had."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8cfg.interop.key_table import (
    SILENT,
    Dialect,
    Entry,
    Unsaid,
    Values,
    boolean,
    is_on,
    one_of,
    option,
    read_only,
    runs_fp8,
    same,
    shown,
    write_only,
)
from fp8cfg.interop.source_files import Said, constants, last, literal, resolved, short
from fp8cfg.interop.torchao import gather, gathers
from fp8cfg.schema.errors import ConfigError, nearest, refuse_if, suggest
from fp8cfg.schema.scalings import SCALINGS

CONVERTERS = {
    "Float8LinearConverter": "quantize.linear.float8",
    "MXLinearConverter": "quantize.linear.mx",
    "MXFP8LinearConverter": "quantize.linear.mx",
    "MXFP8Converter": "quantize.linear.mx",
}
_NOT_HERE = ("NVFP4LinearConverter",)
TRAINING = ("dtype", "mixed_precision_param", "mixed_precision_reduce")
_IGNORED = ("model_compile_enabled",)


@dataclass
class Settings:
    """What a configuration says about precision, so far."""

    converters: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> Settings:
        return Settings(list(self.converters), dict(self.training))

    def by_key(self) -> Said:
        """The settings by the keys of the table. Raises ConfigError for converters that nothing here stands for."""
        named = [CONVERTERS[name] for name, _ in self.converters if name in CONVERTERS]
        data: dict[str, Any] = {"training.mixed_precision_param": "bfloat16"}
        data |= {f"training.{key}": value for key, value in self.training.items()}
        if named:
            data["model.converters"] = named
        for name, values in self.converters:
            if name in CONVERTERS:
                data |= {f"{CONVERTERS[name]}.{key}": value for key, value in values.items()}
        refuse_if(
            [
                f"{name}: NVFP4 of torchao has no counterpart; precision=bf16_nvfp4 is Transformer"
                " Engine's"
                for name, _ in self.converters
                if name in _NOT_HERE
            ]
        )
        lost = tuple(
            f"{name}: has no counterpart here"
            for name, _ in self.converters
            if name not in CONVERTERS
        )
        return Said(data, lost, called=True)


def is_config(node: ast.AST) -> bool:
    """Whether `node` is a call such as Trainer.Config(...)."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "Config"
    )


class FieldReader:
    """Reads fields, and notes a problem for each thing that is no literal.

    `constants` and `functions` are the file's; `names`, of each method, are constants of the function at hand.
    """

    def __init__(self, constants: dict[str, ast.expr], functions: frozenset[str]) -> None:
        self.constants, self.functions = constants, functions
        self.problems: list[str] = []

    def field(
        self, settings: Settings, name: str, value: ast.expr, names: dict[str, ast.expr]
    ) -> None:
        """One field of a configuration."""
        value = resolved(value, {**self.constants, **names})
        if name == "training" and isinstance(value, ast.Call):
            settings.training = {}
            for word in value.keywords:
                if word.arg in TRAINING:
                    self.take(settings.training, str(word.arg), word.value, names)
                elif word.arg is None:
                    self.refuse(value, f"**{short(word.value)}: not read; write its fields out")
        elif name != "training":
            settings.converters = self.converters(value, names)

    def converters(
        self, value: ast.expr, names: dict[str, ast.expr]
    ) -> list[tuple[str, dict[str, Any]]]:
        """The converters in a call of model_registry or ModelConvertersContainer.Config."""
        words = value.keywords if isinstance(value, ast.Call) else []
        given = next((word.value for word in words if word.arg == "converters"), None)
        if (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
            and value.func.id in self.functions
        ):
            self.refuse(
                value, f"{value.func.id}(): not read; write model_registry(...) with its converters"
            )
        if given is None:
            return []
        listed = resolved(given, {**self.constants, **names})
        if not isinstance(listed, (ast.List, ast.Tuple)):
            self.refuse(given, f"converters: expected a list, not {short(given)}")
            return []
        function: Any = value.func  # type: ignore[attr-defined]
        owner = last(getattr(function, "value", value))
        usual = "tensorwise" if owner == "ModelConvertersContainer" else "rowwise"
        found = []
        for each in listed.elts:
            each = resolved(each, {**self.constants, **names})
            if not is_config(each):
                self.refuse(
                    each,
                    "converters: expected calls such as Float8LinearConverter.Config(), not"
                    f" {short(each)}",
                )
                continue
            found.append(self.converter(each, usual, names))  # type: ignore[arg-type]
        return found

    def converter(
        self, call: ast.Call, usual: str, names: dict[str, ast.expr]
    ) -> tuple[str, dict[str, Any]]:
        """A converter's class and its fields. `usual` is Float8LinearConverter's recipe_name where none is given: rowwise since it
        is one of model_registry's converters (#3127), tensorwise before."""
        name = last(call.func.value)  # type: ignore[attr-defined]
        values: dict[str, Any] = {"recipe_name": usual} if name == "Float8LinearConverter" else {}
        if name.startswith("MXFP8"):  # which have fqns instead, and convert the output layer too
            values["filter_fqns"] = []
        for word in call.keywords if name in CONVERTERS else ():
            if word.arg is None:
                self.refuse(
                    call, f"{name}.Config(**{short(word.value)}): not read; write its fields out"
                )
            elif word.arg not in _IGNORED:
                self.take(values, word.arg, word.value, names)
        return name, values

    def take(
        self, into: dict[str, Any], key: str, value: ast.expr, names: dict[str, ast.expr]
    ) -> None:
        """Put a literal into a table; None is as if it were not given."""
        try:
            made = literal(resolved(value, {**self.constants, **names}))
        except ValueError:
            return self.refuse(value, f"{key}: expected a literal, not {short(value)}")
        if made is not None:
            into[key] = made

    def refuse(self, node: ast.AST, line: str) -> None:
        """Note a line about what stands at `node`."""
        self.problems.append(f"line {getattr(node, 'lineno', 1)}: {line}")


_GW = "fp8.override_linear_precision.wgrad"
_ROW = {"fp8.granularity": "row", "fp8.format": "e4m3", "fp8.use_power_2_scales": True}
_RECIPES: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "rowwise": _ROW,
    "rowwise_with_gw_hp": {**_ROW, _GW: True},
}
_MX_RECIPES = {
    "mxfp8_cublas": {},
    "mxfp8_cublas_rceil": {},
    "mxfp8_emulated": {"fp8.emulate": True},
}
LAYERS = {
    "*.linear_qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "*.linear_proj": ("attention.wo",),
    "*.linear_fc1": ("feed_forward.w1", "feed_forward.w3"),
    "*.linear_fc2": ("feed_forward.w2",),
}
"""Our patterns of linear layers, and torchtitan's names of the layers that they are."""
_NAMES = {
    **{f"layers.*.{leaf}": leaf for names in LAYERS.values() for leaf in names},
    "lm_head": "lm_head",
}
_MX_FILTER = ("output",)
"""Its default, up to the converters of April 2026 (#3127), whose `fqns` choose layers instead."""
_CONVERTERS = {
    "float8": "float8",
    "quantize.linear.float8": "float8",
    "quantize.dense.float8": "float8",
    "mx": "mx",
    "quantize.linear.mx": "mx",
    "quantize.dense.mx": "mx",
}
_SCALINGS = {scaling.torchao: name for name, scaling in SCALINGS.items() if scaling.torchao}
_EXPERTS = ("quantize.grouped_mm.", "quantize.moe.")
_EXPERT_KEYS = tuple(
    f"{section}{kind}.{key}"
    for section in _EXPERTS
    for kind in ("float8", "mx")
    for key in ("fqns", "recipe_name")
)
_FLOAT8, _MX = "quantize.linear.float8", "quantize.linear.mx"
_GATHER = f"{_FLOAT8}.enable_fsdp_float8_all_gather"


def _float8(ours: Values) -> bool:
    return runs_fp8(ours) and SCALINGS[ours["fp8.scaling"]].torchao == "float8"


def _mx(ours: Values) -> bool:
    return runs_fp8(ours) and SCALINGS[ours["fp8.scaling"]].torchao == "mx"


def _recipe(ours: Values) -> str:
    """The recipe_name nearest to ours, which is the same where it reads back equal."""
    if ours["fp8.granularity"] == "tensor":
        return "tensorwise"
    return "rowwise_with_gw_hp" if ours[_GW] else "rowwise"


def listed(value: Any) -> list[str]:
    """A list, also one that is written with commas."""
    if not isinstance(value, (str, list, tuple, type(None))):
        raise ValueError("model.converters and filter_fqns are lists of names")
    return [
        str(name).strip()
        for name in (value.split(",") if isinstance(value, str) else value or ())
        if str(name).strip()
    ]


def _opposite(chosen: list[str]) -> list[str]:
    """The filter_fqns that leave the layers which MXFP8LinearConverter's `fqns` choose: those whose name holds one of them."""
    return [leaf for name, leaf in _NAMES.items() if not any(each in name for each in chosen)]


def _filter(value: Any) -> dict[str, Any]:
    """Our patterns of the layers that stay out; the output layer runs in FP8 unless it is named."""
    names = listed(value)
    whole = [ours for ours, theirs in LAYERS.items() if set(theirs) <= set(names)]
    whole.sort(key=lambda ours: names.index(LAYERS[ours][0]))
    return {"fp8.output_layer": not {"output", "lm_head"} & set(names), "fp8.exclude": tuple(whole)}


def _filtered(ours: Values) -> list[str]:
    named = [name for pattern in ours["fp8.exclude"] for name in LAYERS.get(pattern, ())]
    return named if ours["fp8.output_layer"] else [*named, "output"]


def _prepare(theirs: dict[str, Any]) -> list[str]:
    """Which converter is on says the scaling; a line for layers that are one here and two or three there."""
    named = listed(theirs.get("model.converters"))
    lines = [
        f"model.converters={name}: has no counterpart"
        for name in named
        if name.startswith(_EXPERTS)
    ]
    kinds = {_CONVERTERS.get(name) for name in named}
    if is_on(theirs.pop("float8.enable_float8_linear", None)):
        kinds.add("float8")
    theirs.pop("model.converters", None)
    for kind, section in (("float8", _FLOAT8), ("mx", _MX)):
        if kind in kinds:
            theirs["ON"] = kind
            names = theirs["FILTER"] = listed(
                theirs.pop(f"{section}.filter_fqns", () if kind == "float8" else _MX_FILTER)
            )
            if chosen := listed(theirs.pop(f"{section}.fqns", ())):
                theirs["FILTER"] = names = _opposite(chosen)
                lines += [
                    f"fqns={n}: no layer of its own here; `fp8cfg plan` lists layers for"
                    " fp8.exclude"
                    for n in chosen
                    if not any(n in name for name in _NAMES)
                ]
            known = {
                "output",
                "lm_head",
                *(n for ours in LAYERS.values() if set(ours) <= set(names) for n in ours),
            }
            lines += [
                f"filter_fqns={n}: no layer of its own here; `fp8cfg plan` lists layers for"
                " fp8.exclude"
                for n in names
                if n not in known
            ]
        else:
            idle = [k for k in theirs if k.startswith(f"{section}.")]
            lines += (
                [f"{section}: has no effect, model.converters does not name it"] if idle else []
            )
            for key in idle:
                del theirs[key]
    scales = str(theirs.get(f"{_FLOAT8}.recipe_name", "tensorwise"))
    if scales != "tensorwise" and is_on(theirs.get(_GATHER)):
        lines.append(
            f"{shown(_GATHER, theirs.pop(_GATHER))}: has no effect under {scales}; of tensorwise"
            " alone"
        )
    refuse_if(
        ["model.converters: float8 and mx are both on; drop one"]
        if kinds >= {"float8", "mx"}
        else []
    )
    return lines


def _strange(theirs: Values) -> list[str]:
    """Converters that nothing here is known of: of a misspelled one nothing else would tell."""
    try:
        named = listed(theirs.get("model.converters"))
    except ValueError:
        return []
    return [
        f"{shown('model.converters', name)}: no such converter of"
        f" torchtitan{suggest(name, _CONVERTERS)}"
        for name in named
        if name not in _CONVERTERS and not name.startswith(_EXPERTS)
    ]


def _refuse(ours: Values) -> list[str]:
    if runs_fp8(ours) and not _float8(ours) and not _mx(ours):
        return [
            f"fp8.scaling={ours['fp8.scaling']}: torchtitan has no such scaling; it has"
            f" {' and '.join(_SCALINGS.values())}"
        ]
    return []


def _on(kind: Any) -> dict[str, Any]:
    return {"fp8.enabled": True, "backend": "torchao", "fp8.scaling": _SCALINGS[kind]}


_WHOLE = {
    "storage.weight": "bf16",
    "storage.master_weight": "none",
    "storage.weight_grad": "bf16",
    "storage.exp_avg": "bf16",
    "storage.exp_avg_sq": "bf16",
}
"""What training.dtype=bfloat16 stands for: parameters, gradients and optimizer state, without float32 beside them."""
_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_ALIKE = Unsaid("kernels and experts of torchtitan have no key", (False, None, ""))
TORCHTITAN = Dialect(
    "torchtitan",
    (
        option("training.mixed_precision_param", "precision.compute", _DTYPES),
        Entry(
            "training.dtype",
            lambda name: one_of(name, {"bfloat16": _WHOLE, "float32": {}}),
            lambda ours: "bfloat16" if all(ours[k] == v for k, v in _WHOLE.items()) else SILENT,
        ),
        option(
            "training.mixed_precision_reduce",
            "storage.comm",
            {"float32": "fp32", "bfloat16": "bf16"},
        ),
        write_only("model.converters", lambda ours: [_MX if _mx(ours) else _FLOAT8], runs_fp8),
        read_only("ON", _on),
        Entry(f"{_FLOAT8}.recipe_name", lambda name: one_of(name, _RECIPES), _recipe, _float8),
        read_only("FILTER", _filter),
        read_only("float8.enable_float8_linear", lambda _: {}),
        write_only(f"{_FLOAT8}.filter_fqns", _filtered, _float8),
        write_only(f"{_MX}.filter_fqns", _filtered, _mx),
        read_only(f"{_MX}.fqns", lambda _: {}),
        same(
            f"{_FLOAT8}.emulate",
            "fp8.emulate",
            boolean,
            lambda ours: _float8(ours) and ours["fp8.emulate"],
        ),
        Entry(_GATHER, gather, gathers, gathers),
        write_only(f"{_FLOAT8}.precompute_float8_dynamic_scale_for_fsdp", gathers, gathers),
        Entry(
            f"{_MX}.recipe_name",
            lambda name: one_of(name, _MX_RECIPES),
            lambda ours: "mxfp8_emulated" if ours["fp8.emulate"] else "mxfp8_cublas",
            _mx,
        ),
    ),
    {
        f"{old}.{key}": f"quantize.linear.{kind}.{key}"
        for old, kind in (
            ("float8", "float8"),
            ("quantize.dense.float8", "float8"),
            ("mx", "mx"),
            ("quantize.dense.mx", "mx"),
        )
        for key in (
            "recipe_name",
            "filter_fqns",
            "fqns",
            "emulate",
            "enable_fsdp_float8_all_gather",
            "force_recompute_fp8_weight_in_bwd",
            "precompute_float8_dynamic_scale_for_fsdp",
            "mxfp8_dim1_cast_kernel_choice",
        )
    },
    unsaid={
        **{
            f"{_FLOAT8}.{k}": _ALIKE
            for k in ("force_recompute_fp8_weight_in_bwd", "moe_fqns_prototype")
        },
        **{f"{_MX}.{k}": _ALIKE for k in ("mxfp8_dim1_cast_kernel_choice", "moe_fqns_prototype")},
        **dict.fromkeys(
            (*_EXPERTS, *_EXPERT_KEYS), Unsaid("models here have no experts", (False, [], None))
        ),
    },
    prepare=_prepare,
    refuse=_refuse,
    strange=_strange,
    why={
        "storage.shard": "its section parallelism says that (data_parallel_shard_degree)",
        "fp8.exclude": (
            "torchtitan's filter_fqns are names of its own layers; *.linear_qkv, _proj, _fc1 and"
            " _fc2 have some"
        ),
        "fp8.format": "follows from recipe_name: hybrid under tensorwise, e4m3 under rowwise",
        "fp8.use_power_2_scales": (
            "follows from recipe_name: false under tensorwise, true under rowwise"
        ),
    },
)
SECTIONS = (
    "model.converters",
    "float8.",
    "mx.",
    "quantize.",
    "training.mixed_precision_",
    "training.dtype",
)
"""What of a TOML file is about precision."""

_RELEVANT = ("model_spec", "model_converters", "training")
_PRECISION = re.compile("quant|convert|float8|fp8|precision")
"""Parts of names that no other field of a configuration has."""


def configuration(text: str, name: str = "") -> Said:
    """What the function `name` says, or the only one of the file; of a file without functions its statements. Raises ConfigError,
    with a line for each thing of it that is no literal, where there is no such function or `name` is wanting.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        at = f"line {e.lineno}: " if isinstance(e, SyntaxError) and e.lineno else ""
        raise ConfigError(f"{at}not Python") from None
    reader = _Reader(module)
    found = reader.configurations
    if name and name not in found:
        raise ConfigError(f"{name}: no such configuration in it{suggest(name, found)}")
    if not name and len(found) > 1:
        shown = ", ".join(found[:12]) + (
            f" and {len(found) - 12} others" if len(found) > 12 else ""
        )
        raise ConfigError(
            f"has {len(found)} configurations; name one, as in FILE.py:{found[0]}; they are {shown}"
        )
    try:
        settings = reader.function(name or found[0]) if found else reader.body(module.body, {})
    except RecursionError:
        raise ConfigError("nested too deeply") from None
    refuse_if(
        reader.fields.problems
        or (
            [] if settings else ["no configuration of torchtitan's, which is a Trainer.Config(...)"]
        )
    )
    assert settings is not None
    return settings.by_key()


class _Reader:
    def __init__(self, module: ast.Module) -> None:
        self.functions = {
            node.name: node for node in module.body if isinstance(node, ast.FunctionDef)
        }
        self.fields = FieldReader(constants(module.body), frozenset(self.functions))
        self.made: dict[str, Settings | None] = {}
        self.open: list[str] = []

    @functools.cached_property
    def configurations(self) -> list[str]:
        """The functions that return a configuration."""
        return [
            name
            for name, node in self.functions.items()
            if not name.startswith("_")
            and (_annotated(node) or any(is_config(each) for each in ast.walk(node)))
        ]

    def function(self, name: str) -> Settings | None:
        """What a function of the file returns; each is read once."""
        if name in self.made:
            return self.made[name]
        if name in self.open:
            raise ConfigError(f"{name}: calls itself")
        self.open.append(name)
        node = self.functions[name]
        self.made[name] = self.body(node.body, constants(node.body))
        self.open.pop()
        return self.made[name]

    def body(self, statements: Sequence[ast.stmt], names: dict[str, ast.expr]) -> Settings | None:
        """The configuration that statements make, one after the other."""
        made: dict[str, Settings] = {}
        final: Settings | None = None
        for node in statements:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name) and (
                        settings := self.settings(node.value, names, made)
                    ):
                        final = made[target.id] = settings
                    elif isinstance(target, ast.Attribute):
                        self.assign(target, node.value, names, made)
            elif isinstance(node, ast.Return) and node.value:
                settings = self.settings(node.value, names, made)
                if settings is None:
                    self.fields.refuse(
                        node,
                        f"{short(node.value)}: not read; expected a configuration of this file",
                    )
                return settings or final
            elif isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)) and any(
                map(_relevant, ast.walk(node))
            ):
                self.fields.refuse(
                    node,
                    f"{short(node).splitlines()[0]} what stands below is not decided here; write it"
                    " without",
                )
        return final

    def settings(
        self, node: ast.expr, names: dict[str, ast.expr], made: dict[str, Settings]
    ) -> Settings | None:
        """The configuration that an expression is; None for one that is none."""
        if isinstance(node, ast.Name):
            return made.get(node.id)
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Name):
            if node.func.id in self.configurations:
                return made_there.copy() if (made_there := self.function(node.func.id)) else None
            return None
        if not is_config(node) or last(node.func.value) != "Trainer":  # type: ignore[attr-defined]
            return None
        found = Settings()
        for word in node.keywords:
            if word.arg is None:
                self.fields.refuse(node, f"**{short(word.value)}: not read; write its fields out")
            elif word.arg in _RELEVANT:
                self.fields.field(found, word.arg, word.value, names)
            else:
                self.other(word.arg, word)
        return found

    def assign(
        self,
        target: ast.Attribute,
        value: ast.expr,
        names: dict[str, ast.expr],
        made: dict[str, Settings],
    ) -> None:
        """A statement such as config.model_spec = model_registry(...)."""
        parts = ast.unparse(target).split(".")
        if parts[1] not in _RELEVANT:
            return self.other(parts[1], target, value)
        if parts[0] not in made:
            self.fields.refuse(target, f"{parts[0]}: what it is is not in this file")
        elif len(parts) == 2:
            self.fields.field(made[parts[0]], parts[1], value, names)
        elif parts[1] == "training" and parts[2] in TRAINING:
            self.fields.take(made[parts[0]].training, parts[2], value, names)

    def other(self, name: str, *nodes: ast.AST) -> None:
        """A field that is not about precision, unless its name or what it is given says that it is."""
        names = (node.id for each in nodes for node in ast.walk(each) if isinstance(node, ast.Name))
        if _PRECISION.search(name) or any(each.endswith("Converter") for each in names):
            near = f"; did you mean {near!r}?" if (near := nearest(name, _RELEVANT)) else ""
            self.fields.refuse(nodes[0], f"{name}: no field of a configuration that is read{near}")


def _annotated(node: ast.FunctionDef) -> bool:
    return isinstance(node.returns, ast.Attribute) and node.returns.attr == "Config"


def _relevant(node: ast.AST) -> bool:
    """Whether a node has to do with precision."""

    def test(name: str) -> bool:
        return name in (*_RELEVANT[:2], *TRAINING) or name.endswith("Converter")

    return (isinstance(node, ast.Attribute) and test(node.attr)) or (
        isinstance(node, ast.Name) and test(node.id)
    )
