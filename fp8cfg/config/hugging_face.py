"""Hugging Face families: what their config.json says of a model, in the keys of the `model` node, and back.

A family is registered by its module of recipes/ with the names of its weights. Which one a model is written as follows from its
keys: the first family whose config.json says all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8cfg.config.errors import ConfigError, suggest
from fp8cfg.config.hugging_face_rope import read_rope, write_rope
from fp8cfg.config.model import Model
from fp8cfg.config.validation_errors import shown_value

Names = Mapping[str, tuple[str, ...]]
"""Our modules, `{}` standing for a layer's number, each with the modules of theirs that make it up."""
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
"""Keys of config.json that mean the same in most families, and ours."""
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
"""Values that most families must have: another changes what is computed."""
WEIGHTS: Names = {
    "embedding": ("model.embed_tokens",),
    "final_layernorm": ("model.norm",),
    "output_layer": ("lm_head",),
    "layers.{}.input_layernorm": ("model.layers.{}.input_layernorm",),
    "layers.{}.self_attention.linear_qkv": tuple(
        f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"
    ),
    "layers.{}.self_attention.q_layernorm": ("model.layers.{}.self_attn.q_norm",),
    "layers.{}.self_attention.k_layernorm": ("model.layers.{}.self_attn.k_norm",),
    "layers.{}.self_attention.linear_proj": ("model.layers.{}.self_attn.o_proj",),
    "layers.{}.pre_mlp_layernorm": ("model.layers.{}.post_attention_layernorm",),
    "layers.{}.mlp.linear_fc1": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    "layers.{}.mlp.linear_fc2": ("model.layers.{}.mlp.down_proj",),
}
"""Llama's, and most families'."""
SEQ_LENGTH = 4096
"""Tokens of a sample at most, of a model whose config.json allows more."""


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers. `model` has its keys where config.json says nothing and all that its sizes share; `keys`,
    `fixed` and `weights` differ from KEYS, FIXED and WEIGHTS (a key or name that maps to nothing is left out). `conv1d` weights are
    transposed (GPT-2's Conv1D)."""

    model_type: str
    architecture: str
    model: Model
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    weights: Names = field(default_factory=dict)
    conv1d: bool = False

    @property
    def names(self) -> Names:
        """Our modules with theirs."""
        return {**WEIGHTS, **self.weights}

    @property
    def spelled(self) -> dict[str, str]:
        """Keys of config.json with ours."""
        ours = set(self.keys.values())
        return {**{theirs: key for theirs, key in KEYS.items() if key not in ours}, **self.keys}

    def read(self, config: Mapping[str, Any]) -> Model:
        """The model of a config.json. Raises ConfigError for what a recipe cannot say."""
        _check_kinds(config)
        fixed = {**FIXED, **self.fixed}
        wrong = [
            f"config.json: {key}={config[key]}: not in this version, {self.model_type} is read with"
            f" {fixed[key]}"
            for key in fixed
            if config.get(key) not in (None, fixed[key])
        ]
        if wrong:
            raise ConfigError(wrong)
        said = {
            ours: config[theirs]
            for theirs, ours in self.spelled.items()
            if config.get(theirs) is not None
        }
        spelled = {ours: theirs for theirs, ours in self.spelled.items()}
        if missing := [
            spelled[key]
            for key in ("num_layers", "hidden_size", "num_attention_heads")
            if key not in said
        ]:
            raise ConfigError([f"config.json: has no {key}" for key in missing])
        if "ffn_hidden_size" not in said:  # GPT-2's n_inner
            said["ffn_hidden_size"] = 4 * said["hidden_size"]
        if "num_query_groups" not in said:
            said["num_query_groups"] = said["num_attention_heads"]
        if self.model.position_embedding_type == "rope":
            said |= read_rope(config, self.model)
        said |= _windows(config, self.model, said["num_layers"])
        said["seq_length"] = min(SEQ_LENGTH, said.get("max_position_embeddings", SEQ_LENGTH))
        return self.model.model_copy(update=said)

    def write(self, model: Model) -> dict[str, Any]:
        """The config.json of `model`."""
        said = {theirs: getattr(model, ours) for theirs, ours in self.spelled.items()}
        said["max_position_embeddings" if "n_positions" not in said else "n_positions"] = (
            model.max_position_embeddings or model.seq_length
        )
        if "head_dim" in said:
            said["head_dim"] = model.head_dim
        rope = write_rope(model) if model.position_embedding_type == "rope" else {}
        windows: dict[str, Any] = {}
        if self.model.sliding_window:
            windows["sliding_window"] = model.sliding_window
        if self.model.window_attn_skip_freq and model.window_attn_skip_freq:
            every, numbers = model.window_attn_skip_freq, range(1, model.num_layers + 1)
            windows["layer_types"] = [
                f"{'full' if number % every == 0 else 'sliding'}_attention" for number in numbers
            ]
        said = {
            key: (
                int(value)
                if isinstance(value, float) and value.is_integer() and key.endswith("scalar")
                else value
            )
            for key, value in said.items()
        }
        tokens = dict.fromkeys(
            ("pad_token_id", "bos_token_id", "eos_token_id")
        )  # a recipe has no names for these
        kind = {"architectures": [self.architecture], "model_type": self.model_type}
        return {**kind, **tokens, **said, **FIXED, **self.fixed, **rope, **windows}


FAMILIES: dict[str, Family] = {}
"""Families by model_type, in the order in which they are tried."""


def family(model_type: str, architecture: str, model: Model, **others: Any) -> Family:
    """Register a family; the arguments are Family's fields."""
    FAMILIES[model_type] = made = Family(model_type, architecture, model, **others)
    return made


def registered() -> dict[str, Family]:
    """Every family, those of the recipes among them."""
    from fp8cfg.config import recipe_registry

    recipe_registry.recipes()
    return {
        name: FAMILIES[name]
        for name in sorted(FAMILIES, key=lambda name: (name not in ("llama", "mistral"), name))
    }


def of_config(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ConfigError for one that is not known."""
    known, kind = registered(), str(config.get("model_type"))
    if kind not in known:
        raise ConfigError(
            f"config.json: model_type={kind}: no such family here{suggest(kind, known)}; they are"
            f" {', '.join(known)}"
        )
    return known[kind]


def of_model(model: Model) -> Family:
    """The family that `model` is written as. Raises ConfigError where none says all of its keys."""
    wanted = computed(model)
    nearest: list[str] = []
    for one in registered().values():
        try:
            found = computed(one.read(one.write(model)))
        except ConfigError:
            continue
        differs = [key for key in wanted if wanted[key] != found[key]]
        if not differs:
            return one
        if not nearest or len(differs) < len(nearest):
            nearest = [f"{one.model_type} has no model.{key}={wanted[key]}" for key in differs]
    raise ConfigError(f"no model of transformers computes this one: {'; '.join(nearest)}")


def computed(model: Model) -> dict[str, Any]:
    """The keys that say what is computed. Weights around 0 or 1 can be had of either; a head's width may be said or follow."""
    said = model.model_dump(
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
    scalar = model.query_pre_attn_scalar
    return {
        **said,
        "kv_channels": model.head_dim,
        "add_qkv_bias": model.add_qkv_bias or model.add_bias_linear,
        "query_pre_attn_scalar": model.head_dim if scalar is None else scalar,
    }


def _check_kinds(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value of another kind than it is calculated with; the schema checks those that a key takes over."""
    kinds: dict[str, tuple[Any, str]] = {
        **dict.fromkeys(
            (
                "num_hidden_layers",
                "n_layer",
                "hidden_size",
                "n_embd",
                "max_position_embeddings",
                "n_positions",
                "sliding_window",
                "sliding_window_pattern",
            ),
            (int, "a whole number"),
        ),
        **dict.fromkeys(("rope_parameters", "rope_scaling"), (Mapping, "an object")),
        "layer_types": (list, "a list"),
    }
    wrong = [
        f"config.json: {key}={shown_value(config[key])}: expected {words}"
        for key, (kind, words) in kinds.items()
        if config.get(key) is not None
        and (not isinstance(config[key], kind) or isinstance(config[key], bool))
    ]
    if wrong:
        raise ConfigError(wrong)


def _windows(config: Mapping[str, Any], model: Model, layers: int) -> dict[str, Any]:
    """sliding_window and window_attn_skip_freq of a config.json."""
    types = config.get("layer_types")
    window = config.get("sliding_window", model.sliding_window)
    if config.get("use_sliding_window") is False:
        window = None
    every = config.get("sliding_window_pattern", model.window_attn_skip_freq)
    if types:
        slides = [kind == "sliding_attention" for kind in types]
        tried = [n for n in (every, *range(2, layers + 1)) if n]
        fits = [n for n in tried if [(i + 1) % n != 0 for i in range(layers)] == slides]
        if not any(slides):
            window = None
        elif fits or all(slides):
            every = fits[0] if fits else None
        else:
            raise ConfigError(
                "config.json: layer_types: layers without a sliding window must stand at even"
                " distances here"
            )
    if window is None:
        return {"sliding_window": None, "window_attn_skip_freq": None, "rotary_base_local": None}
    if config.get("use_sliding_window") and not types:
        raise ConfigError(
            "config.json: use_sliding_window=True: needs layer_types, which say which layers"
            " have one"
        )
    return {"sliding_window": window, "window_attn_skip_freq": every}
