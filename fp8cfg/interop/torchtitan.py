"""torchtitan's Python configurations: the fields of FP8 and MXFP8 linear layers and of training."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8cfg.interop.key_table import (
    Dialect,
    Entry,
    Unsaid,
    boolean,
    integer,
    is_on,
    number,
    one_of,
    read_only,
    shown,
)
from fp8cfg.interop.python_items import position, rest_of
from fp8cfg.interop.source_files import Said, constants, last, literal, resolved, short
from fp8cfg.interop.torchao import gather
from fp8cfg.schema.errors import ConfigError, nearest, refuse_if, suggest
from fp8cfg.schema.scalings import SCALINGS

CONVERTERS = {
    "Float8LinearConverter": "float8",
    "MXLinearConverter": "mx",
    "MXFP8LinearConverter": "mx",
    "MXFP8Converter": "mx",
}
"""The classes of converters, and the library class of torchao that each stands for."""
_NOT_HERE = ("NVFP4LinearConverter",)
_SIZES = {
    "steps": "trainer.max_steps",
    "seq_len": "model.seq_length",
    "local_batch_size": "trainer.micro_batch_size",
    "global_batch_size": "trainer.global_batch_size",
}
TRAINING = ("dtype", "mixed_precision_param", "mixed_precision_reduce", "max_norm", *_SIZES)
_IGNORED = ("model_compile_enabled",)


@dataclass
class Settings:
    """What a configuration says about precision, so far."""

    converters: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> Settings:
        return Settings(list(self.converters), dict(self.training))

    def by_key(self) -> Said:
        """Returns the settings by the keys of the table.

        Raises:
            ConfigError: A converter has no counterpart here, or two of them exclude each other.
        """
        data: dict[str, Any] = {"training.mixed_precision_param": "bfloat16"}
        data |= {f"training.{key}": value for key, value in self.training.items()}
        problems: list[str] = []
        lost: list[str] = []
        for name, values in self.converters:
            kind = CONVERTERS.get(name)
            if name in _NOT_HERE:
                problems.append(
                    f"{name}: NVFP4 of torchao has no counterpart; precision=bf16_nvfp4 is"
                    " Transformer Engine's"
                )
            elif kind is None:
                lost.append(f"{name}: has no counterpart here")
            elif data.get("converter", kind) != kind:
                problems.append("converters: float8 and mx are both on; drop one")
            else:
                data |= {"converter": kind, **values}
        refuse_if(problems)
        return Said(data, tuple(lost), called=True)


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
        self.positions: set[tuple[int, int]] = set()
        """Lines and columns of the values that are read."""

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
        self.positions.add(position(call))
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
        self.positions.add(position(value))
        try:
            made = literal(resolved(value, {**self.constants, **names}))
        except ValueError:
            return self.refuse(value, f"{key}: expected a literal, not {short(value)}")
        if made is not None:
            into[key] = made

    def refuse(self, node: ast.AST, line: str) -> None:
        """Note a line about what stands at `node`."""
        self.problems.append(f"line {getattr(node, 'lineno', 1)}: {line}")


_ROWWISE = {"fp8.granularity": "row", "fp8.format": "e4m3", "fp8.use_power_2_scales": True}
_RECIPES: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "rowwise": _ROWWISE,
    "rowwise_with_gw_hp": {**_ROWWISE, "fp8.override_linear_precision.wgrad": True},
    "mxfp8_cublas": {},
    "mxfp8_cublas_rceil": {},
    "mxfp8_emulated": {"fp8.emulate": True},
}
_LAYERS = {
    "*.linear_qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "*.linear_proj": ("attention.wo",),
    "*.linear_fc1": ("feed_forward.w1", "feed_forward.w3"),
    "*.linear_fc2": ("feed_forward.w2",),
}
"""Our patterns of linear layers, and torchtitan's names of the layers that they are."""
_NAMES = {
    **{f"layers.*.{leaf}": leaf for names in _LAYERS.values() for leaf in names},
    "lm_head": "lm_head",
}
_OUTPUT_LAYER = ("output", "lm_head")
_SCALINGS = {scaling.torchao: name for name, scaling in SCALINGS.items() if scaling.torchao}
_GATHER = "enable_fsdp_float8_all_gather"
_STATE_IN_BF16 = {
    "storage.weight": "bf16",
    "storage.master_weight": "none",
    "storage.weight_grad": "bf16",
    "storage.exp_avg": "bf16",
    "storage.exp_avg_sq": "bf16",
}
_KERNELS = (
    "force_recompute_fp8_weight_in_bwd",
    "moe_fqns_prototype",
    "mxfp8_dim1_cast_kernel_choice",
)


def _names(value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("fqns and filter_fqns are lists of names")
    return [str(name) for name in value]


def _filter(names: list[str]) -> dict[str, Any]:
    """Our patterns of the layers that stay out; the output layer runs in FP8 unless it is named."""
    whole = [pattern for pattern, theirs in _LAYERS.items() if set(theirs) <= set(names)]
    whole.sort(key=lambda pattern: names.index(_LAYERS[pattern][0]))
    return {
        "fp8.output_layer": not set(_OUTPUT_LAYER) & set(names),
        "fp8.exclude": tuple(whole),
    }


def _prepare(theirs: dict[str, Any]) -> list[str]:
    """Makes one filter of `filter_fqns` and `fqns`, with a line for each layer that has no match."""
    # MXLinearConverter has filtered the output layer unless another filter was given.
    usual = ("output",) if theirs.get("converter") == "mx" else ()
    filtered = _names(theirs.pop("filter_fqns", usual))
    chosen = _names(theirs.pop("fqns", ()))
    if "converter" not in theirs:
        return []
    known = set(_OUTPUT_LAYER)
    unmatched: list[str] = []
    if chosen:
        filtered = [
            leaf for name, leaf in _NAMES.items() if not any(each in name for each in chosen)
        ]
        unmatched = [f"fqns={each}" for each in chosen if not any(each in name for name in _NAMES)]
    for leaves in _LAYERS.values():
        if set(leaves) <= set(filtered):
            known |= set(leaves)
    unmatched += [f"filter_fqns={name}" for name in filtered if name not in known]
    theirs["FILTER"] = filtered
    lines = [
        f"{each}: no layer of its own here; `fp8cfg plan` lists layers for fp8.exclude"
        for each in unmatched
    ]
    scales = theirs.get("recipe_name", "tensorwise")
    if scales != "tensorwise" and is_on(theirs.get(_GATHER)):
        line = shown(_GATHER, theirs.pop(_GATHER))
        lines.append(f"{line}: has no effect under {scales}; of tensorwise alone")
    return lines


def _on(kind: Any) -> dict[str, Any]:
    return {
        "fp8.enabled": True,
        "backend": "torchao",
        "fp8.scaling": one_of(kind, {str(name): ours for name, ours in _SCALINGS.items()}),
    }


def _choice(theirs: str, options: Mapping[str, dict[str, Any]]) -> Entry:
    return read_only(theirs, lambda name: one_of(name, options))


def _size(theirs: str, ours: str) -> Entry:
    """A size, where -1 is torchtitan's default."""
    return read_only(
        f"training.{theirs}",
        lambda value: {} if integer(value) == -1 else {ours: integer(value)},
    )


TORCHTITAN = Dialect(
    "torchtitan",
    (
        _choice(
            "training.mixed_precision_param",
            {
                "bfloat16": {"precision.compute": "bf16"},
                "float32": {"precision.compute": "fp32"},
                "float16": {"precision.compute": "fp16"},
            },
        ),
        # Parameters, gradients and optimizer state, without float32 beside them.
        _choice("training.dtype", {"bfloat16": _STATE_IN_BF16, "float32": {}}),
        _choice(
            "training.mixed_precision_reduce",
            {"float32": {"storage.comm": "fp32"}, "bfloat16": {"storage.comm": "bf16"}},
        ),
        *(_size(theirs, ours) for theirs, ours in _SIZES.items()),
        read_only("training.max_norm", lambda value: {"trainer.gradient_clip_val": number(value)}),
        read_only("converter", _on),
        _choice("recipe_name", _RECIPES),
        read_only("FILTER", _filter),
        read_only("filter_fqns", lambda _: {}),
        read_only("fqns", lambda _: {}),
        read_only("emulate", lambda on: {"fp8.emulate": boolean(on)}),
        read_only(_GATHER, gather),
        read_only("precompute_float8_dynamic_scale_for_fsdp", lambda _: {}),
    ),
    unsaid=dict.fromkeys(
        _KERNELS, Unsaid("kernels and experts of torchtitan have no key", (False, None, ""))
    ),
    prepare=_prepare,
)
"""The fields of a configuration's converter by their names, with `converter` for its class."""

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
    visited = [reader.functions[name] for name in reader.made]
    tree = ast.Module(body=[*visited] if found else module.body, type_ignores=[])
    said = settings.by_key()
    return said._replace(items=tuple(rest_of(tree, reader.fields.positions)))


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
