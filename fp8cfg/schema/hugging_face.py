"""Hugging Face families: converts config.json of transformers to the `model` node and back.

Each module of recipes/ registers its families and the names of their weights. A model is exported as
the first family with a config.json for all of its keys.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8cfg.schema.errors import ConfigError, PlainWarning, did_you_mean, nearest
from fp8cfg.schema.hub import CONFIG, PREFIX, local_folder, pinned
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.model import Model, RopeScaling
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.regular_file import open_regular
from fp8cfg.schema.value_errors import shown_value

CONFIG_FILE = "config.json"
FROM_HF = "from_hf"
MAX_BYTES = 1 << 20
"""Bytes of config.json that are read. A longer file is no valid JSON then."""
MAX_SEQ_LENGTH = 4096
"""Upper bound of model.seq_length. config.json only has the longest context of the model."""

Names = Mapping[str, tuple[str, ...]]
"""Modules of fp8cfg, with `{}` for the layer number, and the modules of transformers for each.

Several modules of transformers form one of ours: q, k and v, or gate and up.
"""
KEYS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "layernorm_epsilon",
    "tie_word_embeddings": "share_embeddings_and_output_weights",
    "initializer_range": "init_method_std",
    "max_position_embeddings": "max_position_embeddings",
}
"""Keys of config.json in most families, and the keys of the `model` node."""
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
"""Keys of config.json with one supported value in most families. Others change the computation."""
WEIGHTS: Names = {
    "embedding": ("model.embed_tokens",),
    "final_layernorm": ("model.norm",),
    "output_layer": ("lm_head",),
    "layers.{}.input_layernorm": ("model.layers.{}.input_layernorm",),
    "layers.{}.self_attention.linear_qkv": (
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.k_proj",
        "model.layers.{}.self_attn.v_proj",
    ),
    "layers.{}.self_attention.q_layernorm": ("model.layers.{}.self_attn.q_norm",),
    "layers.{}.self_attention.k_layernorm": ("model.layers.{}.self_attn.k_norm",),
    "layers.{}.self_attention.linear_proj": ("model.layers.{}.self_attn.o_proj",),
    "layers.{}.pre_mlp_layernorm": ("model.layers.{}.post_attention_layernorm",),
    "layers.{}.mlp.linear_fc1": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    "layers.{}.mlp.linear_fc2": ("model.layers.{}.mlp.down_proj",),
}
"""Names of the modules in Llama and most other families."""
LLAMA3_SCALING = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
"""Keys of rope_type=llama3 in config.json, and of model.rope_scaling."""
_INTEGER_KEYS = (
    "num_hidden_layers",
    "n_layer",
    "hidden_size",
    "n_embd",
    "max_position_embeddings",
    "n_positions",
    "sliding_window",
    "sliding_window_pattern",
)


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    Attributes:
        model_type: Its name in config.json.
        architecture: Its class in transformers.
        model: Values common to all sizes, and defaults of keys missing from config.json.
        keys: Keys of config.json in addition to KEYS, or in place of them.
        fixed: Values in addition to FIXED, or in place of them.
        weights: Names in addition to WEIGHTS, or in place of them. An empty tuple removes one.
        conv1d: Whether linear weights are stored as [in, out], as in GPT-2's Conv1D.
    """

    model_type: str
    architecture: str
    model: Model
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    weights: Names = field(default_factory=dict)
    conv1d: bool = False

    @property
    def names(self) -> Names:
        """Modules of fp8cfg with the modules of transformers."""
        return {**WEIGHTS, **self.weights}

    @property
    def spelled(self) -> dict[str, str]:
        """Keys of config.json with the keys of the `model` node."""
        overridden = set(self.keys.values())
        common = {theirs: ours for theirs, ours in KEYS.items() if ours not in overridden}
        return {**common, **self.keys}

    def read(self, config: Mapping[str, Any]) -> Model:
        """Converts a config.json to a model node.

        Raises:
            ConfigError: A key is missing, has the wrong type, or asks for another computation.
        """
        _check_types(config)
        self._check_fixed(config)
        values = {}
        for theirs, ours in self.spelled.items():
            if config.get(theirs) is not None:
                values[ours] = config[theirs]
        theirs_of = {ours: theirs for theirs, ours in self.spelled.items()}
        required = ("num_layers", "hidden_size", "num_attention_heads")
        missing = [theirs_of[key] for key in required if key not in values]
        if missing:
            raise ConfigError([f"config.json: {key} is missing" for key in missing])
        # GPT-2's n_inner is null, which means four times the hidden size.
        if "ffn_hidden_size" not in values:
            values["ffn_hidden_size"] = 4 * values["hidden_size"]
        # Families without grouped-query attention have a key head for each query head.
        if "num_query_groups" not in values:
            values["num_query_groups"] = values["num_attention_heads"]
        if self.model.position_embedding_type == "rope":
            values.update(read_rope(config, self.model))
        values.update(_read_windows(config, self.model, values["num_layers"]))
        positions = values.get("max_position_embeddings", MAX_SEQ_LENGTH)
        values["seq_length"] = min(MAX_SEQ_LENGTH, positions)
        return self.model.model_copy(update=values)

    def _check_fixed(self, config: Mapping[str, Any]) -> None:
        """Raises ConfigError for values that this package does not compute with."""
        problems = []
        for key, value in {**FIXED, **self.fixed}.items():
            if config.get(key) not in (None, value):
                problems.append(
                    f"config.json: {key}={config[key]}: not supported, {self.model_type} needs"
                    f" {value}"
                )
        if problems:
            raise ConfigError(problems)

    def write(self, model: Model) -> dict[str, Any]:
        """Returns the config.json of `model`. The inverse of `read`."""
        values = {theirs: getattr(model, ours) for theirs, ours in self.spelled.items()}
        positions = "n_positions" if "n_positions" in values else "max_position_embeddings"
        values[positions] = model.max_position_embeddings or model.seq_length
        # model.kv_channels may be null. config.json needs the number.
        if "head_dim" in values:
            values["head_dim"] = model.head_dim
        for key, value in values.items():
            # transformers writes Gemma's query_pre_attn_scalar as an integer.
            if key.endswith("scalar") and isinstance(value, float) and value.is_integer():
                values[key] = int(value)
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            # A recipe does not know these tokens. Without a null, transformers uses its own defaults.
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            **values,
            **FIXED,
            **self.fixed,
            **(write_rope(model) if model.position_embedding_type == "rope" else {}),
            **self._write_windows(model),
        }

    def _write_windows(self, model: Model) -> dict[str, Any]:
        """Returns sliding_window and layer_types, for families with windows."""
        windows: dict[str, Any] = {}
        if self.model.sliding_window:
            windows["sliding_window"] = model.sliding_window
        interval = model.window_attn_skip_freq
        if self.model.window_attn_skip_freq and interval:
            layer_types = []
            # Every interval-th layer has full attention, counted from 1 (window_attn_skip_freq).
            for number in range(1, model.num_layers + 1):
                kind = "full" if number % interval == 0 else "sliding"
                layer_types.append(f"{kind}_attention")
            windows["layer_types"] = layer_types
        return windows


FAMILIES: dict[str, Family] = {}
"""Registered families by model_type."""


def family(model_type: str, architecture: str, model: Model, **fields: Any) -> Family:
    """Registers a family and returns it. Takes the fields of Family as arguments."""
    new = Family(model_type, architecture, model, **fields)
    FAMILIES[model_type] = new
    return new


def registered_families() -> dict[str, Family]:
    """Returns all families by model_type, in the search order of `family_of_model`."""
    from fp8cfg.schema import recipe_registry

    # Importing the modules of the recipes registers their families.
    recipe_registry.recipes()
    # Several families compute the same. Most tools can load llama and mistral, so these come first.
    common = ("llama", "mistral")
    other_names = sorted(name for name in FAMILIES if name not in common)
    names = [*(name for name in common if name in FAMILIES), *other_names]
    return {name: FAMILIES[name] for name in names}


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json. Raises ConfigError if it is unknown."""
    families = registered_families()
    model_type = str(config.get("model_type"))
    if model_type not in families:
        hint = did_you_mean(nearest(model_type, families))
        raise ConfigError(
            f"config.json: model_type={model_type}: not supported{hint}; supported are"
            f" {', '.join(families)}"
        )
    return families[model_type]


def family_of_model(model: Model) -> Family:
    """Returns the family for the export of `model`.

    Raises:
        ConfigError: No family computes the same. The message has the nearest family.
    """
    # A family fits if the model survives writing and reading back.
    keys = computed_keys(model)
    nearest: list[str] = []
    for candidate in registered_families().values():
        try:
            candidate_keys = computed_keys(candidate.read(candidate.write(model)))
        except ConfigError:
            continue
        different = [key for key in keys if keys[key] != candidate_keys[key]]
        if not different:
            return candidate
        if not nearest or len(different) < len(nearest):
            nearest = [
                f"{candidate.model_type} has no model.{key}={keys[key]}" for key in different
            ]
    raise ConfigError(f"transformers has no such model: {'; '.join(nearest)}")


def computed_keys(model: Model) -> dict[str, Any]:
    """Returns the keys of a model that affect its computation, with their values.

    Two models with equal values compute the same function of tokens and weights.
    """
    # layernorm_zero_centered_gamma is left out: norm weights around 0 and 1 convert into each other.
    # kv_channels, query_pre_attn_scalar and add_qkv_bias are resolved below, so that null and an
    # equal number compare equal.
    values = model.model_dump(
        exclude={
            "seq_length",
            "max_position_embeddings",
            "recompute_granularity",
            "init_method_std",
            "path",
            "weights",
            "layernorm_zero_centered_gamma",
            "add_qkv_bias",
        }
    )
    values["kv_channels"] = model.head_dim
    values["add_qkv_bias"] = model.add_qkv_bias or model.add_bias_linear
    if model.query_pre_attn_scalar is None:
        values["query_pre_attn_scalar"] = model.head_dim
    return values


def read_rope(config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Reads the rotary keys of the `model` node.

    Args:
        config: A config.json. transformers 5 has rope_parameters, with one object for all layers or
            one per kind of layer. Older versions have rope_theta and rope_scaling.
        model: Defaults of keys missing from config.json.

    Returns:
        rotary_base, rotary_percent and rope_scaling, and rotary_base_local for Gemma 3.

    Raises:
        ConfigError: The scaling is unknown.
    """
    parameters = config.get("rope_parameters") or {}
    full = parameters.get("full_attention", parameters)
    local = parameters.get("sliding_attention", {})
    if not isinstance(full, Mapping) or not isinstance(local, Mapping):
        raise ConfigError("config.json: rope_parameters: expected an object for each layer type")
    base = config.get("rope_theta", model.rotary_base)
    share = config.get("partial_rotary_factor", model.rotary_percent)
    scaling = full if parameters else config.get("rope_scaling") or {}
    values = {
        "rotary_base": full.get("rope_theta", base),
        "rotary_percent": full.get("partial_rotary_factor", share),
        "rope_scaling": _read_rope_scaling(scaling),
    }
    if model.rotary_base_local is not None:
        local_base = config.get("rope_local_base_freq", model.rotary_base_local)
        values["rotary_base_local"] = local.get("rope_theta", local_base)
    # rope_theta is often written as an integer. The schema is strict and takes floats there.
    for key, value in values.items():
        if isinstance(value, int):
            values[key] = float(value)
    return values


def _read_rope_scaling(scaling: Mapping[str, Any]) -> RopeScaling:
    """Converts rope_scaling. Raises ConfigError for an unknown type, such as yarn."""
    # Older versions of transformers wrote "type" for "rope_type".
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("linear", "llama3") and "factor" not in scaling:
        raise ConfigError(f"config.json: rope_type={kind}: factor is missing")
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(factor=scaling["factor"], rope_type="linear")
    if kind == "llama3":
        values = {
            ours: scaling[theirs] for theirs, ours in LLAMA3_SCALING.items() if theirs in scaling
        }
        return RopeScaling(factor=scaling["factor"], **values)
    raise ConfigError(
        f"config.json: rope_type={kind}: not supported; use default, linear or llama3"
    )


def write_rope(model: Model) -> dict[str, Any]:
    """Returns the rotary keys of config.json, spelled for transformers 4 and 5."""
    scaling = model.rope_scaling
    shown_scaling: dict[str, Any] = {"rope_type": "default"}
    if scaling.factor != 1.0:
        shown_scaling = {"rope_type": scaling.rope_type, "factor": scaling.factor}
        if scaling.rope_type == "llama3":
            for theirs, ours in LLAMA3_SCALING.items():
                shown_scaling[theirs] = getattr(scaling, ours)
    values = {
        "rope_theta": model.rotary_base,
        "rope_scaling": shown_scaling if scaling.factor != 1.0 else None,
    }
    parameters = {"rope_theta": model.rotary_base, **shown_scaling}
    if model.rotary_percent != 1.0:
        values["partial_rotary_factor"] = model.rotary_percent
        parameters["partial_rotary_factor"] = model.rotary_percent
    if model.rotary_base_local is None:
        return {**values, "rope_parameters": parameters}
    # Gemma 3: windowed layers have their own base and no scaling.
    local = {"rope_theta": model.rotary_base_local, "rope_type": "default"}
    return {
        **values,
        "rope_local_base_freq": model.rotary_base_local,
        "rope_parameters": {"full_attention": parameters, "sliding_attention": local},
    }


def _read_windows(config: Mapping[str, Any], model: Model, num_layers: int) -> dict[str, Any]:
    """Reads sliding_window and window_attn_skip_freq.

    Args:
        config: A config.json.
        model: Defaults of keys missing from config.json.
        num_layers: Number of layers.

    Raises:
        ConfigError: The layers with a window do not follow one interval, or their kind is unknown.
    """
    layer_types = config.get("layer_types")
    window = config.get("sliding_window", model.sliding_window)
    # Qwen has a sliding_window in every config.json, and this key, by default false, enables it.
    # Families without windows ignore their sliding_window.
    if not config.get("use_sliding_window", model.sliding_window is not None):
        window = None
    # Gemma 3 had sliding_window_pattern before transformers wrote layer_types.
    interval = config.get("sliding_window_pattern", model.window_attn_skip_freq)
    if layer_types:
        _check_layer_types(layer_types, num_layers)
        has_window = [kind == "sliding_attention" for kind in layer_types]
        if not any(has_window):
            window = None
        else:
            interval = _window_interval(has_window, interval, num_layers)
    if window is None:
        return {"sliding_window": None, "window_attn_skip_freq": None, "rotary_base_local": None}
    if config.get("use_sliding_window") and not layer_types:
        raise ConfigError(
            "config.json: use_sliding_window=True: needs layer_types to tell which layers have a"
            " window"
        )
    return {"sliding_window": window, "window_attn_skip_freq": interval}


def _check_layer_types(layer_types: list[Any], num_layers: int) -> None:
    """Raises ConfigError unless each layer has full attention or a sliding window."""
    if len(layer_types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types: expected {num_layers} entries, one for each layer, got"
            f" {len(layer_types)}"
        )
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"config.json: layer_types: {kind} is not supported; use full_attention or"
                " sliding_attention"
            )


def _window_interval(has_window: list[bool], expected: int | None, num_layers: int) -> int | None:
    """Returns n if every n-th layer has no window, and None if all layers have one.

    Args:
        has_window: Whether each layer has a window.
        expected: The interval to try first. Several may fit a model with few layers.
        num_layers: Number of layers.

    Raises:
        ConfigError: No interval fits.
    """
    candidates: list[int] = [*range(2, num_layers + 1)]
    if expected:
        candidates.insert(0, expected)
    for interval in candidates:
        if [(index + 1) % interval != 0 for index in range(num_layers)] == has_window:
            return interval
    if all(has_window):
        return None
    raise ConfigError(
        "config.json: layer_types: layers without a sliding window must be evenly spaced"
    )


def _check_types(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for values of the wrong type that `read` computes with.

    The schema checks all values that become keys.
    """
    types: dict[str, tuple[Any, str]] = {
        "rope_parameters": (Mapping, "an object"),
        "rope_scaling": (Mapping, "an object"),
        "layer_types": (list, "a list"),
    }
    for key in _INTEGER_KEYS:
        types[key] = (int, "a whole number")
    problems = []
    for key, (expected, words) in types.items():
        value = config.get(key)
        if value is None:
            continue
        # True is an int in Python.
        if not isinstance(value, expected) or isinstance(value, bool):
            problems.append(f"config.json: {key}={shown_value(value)}: expected {words}")
    if problems:
        raise ConfigError(problems)


def read_config_json(folder: str, key: str) -> dict[str, Any]:
    """Reads the config.json of a checkpoint.

    Args:
        folder: Folder of the checkpoint, or its id on the hub.
        key: Key of the recipe with this value, for errors.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    path = local_folder(folder, key, CONFIG) / CONFIG_FILE
    try:
        with open_regular(path) as file:
            config = json.loads(file.read(MAX_BYTES))
    except FileNotFoundError:
        # OWNER/NAME without hf:// is a relative path here. transformers takes it for an id.
        looks_like_hub_id = folder.count("/") == 1 and folder[0] not in "/~."
        hint = f"; for a hub id write {key}={PREFIX}{folder}" if looks_like_hub_id else ""
        raise ConfigError(f"{key}={folder}: {path} not found{hint}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}={folder}: {path} cannot be read ({reason})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{key}={folder}: {path} is not a JSON object")
    return config


def read_pretrained_model(folder: str, key: str) -> tuple[Family, Model]:
    """Returns the family and the model node of a checkpoint.

    Args:
        folder: See `read_config_json`.
        key: See `read_config_json`.

    Raises:
        ConfigError: config.json is missing, damaged, or describes an unsupported model.
    """
    config = read_config_json(folder, key)
    try:
        family = family_of_config(config)
        return family, family.read(config)
    except ConfigError as error:
        raise ConfigError([f"{key}={folder}: {line}" for line in error.problems]) from None
    # A config.json may have any nonsense that `_check_types` does not cover.
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{key}={folder}: {CONFIG_FILE} is invalid ({error})") from None


def with_pretrained_shape(recipe: Recipe) -> Recipe:
    """Returns a copy of `recipe` with the shape and the weights of the checkpoint model.path.

    Pins a checkpoint on the hub to its commit, so that the recipe stays reproducible.
    """
    path = recipe.model.path
    assert path is not None
    _, model = read_pretrained_model(path, "model.path")
    weights = pinned(path, local_folder(path, "model.path", CONFIG))
    new = recipe.model_copy(deep=True)
    new.model = model.model_copy(update={"path": path, "weights": weights})
    return new


def family_of_weights(model: Model) -> Family:
    """Returns the family of the checkpoint model.weights.

    Warns if its config.json describes another computation than `model`, such as another rotary base.
    """
    assert model.weights is not None
    family, pretrained = read_pretrained_model(model.weights, "model.weights")
    theirs = computed_keys(pretrained)
    different = []
    for key, value in computed_keys(model).items():
        if value != theirs[key]:
            different.append(
                f"model.{key}={spelled(value)} ({CONFIG_FILE}: {spelled(theirs[key])})"
            )
    if different:
        warnings.warn(
            f"model.weights={model.weights}: trained with other settings: {', '.join(different)}",
            PlainWarning,
            stacklevel=2,
        )
    return family
