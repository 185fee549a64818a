"""Hugging Face families: what their config.json says of a model, in the keys of the `model` node, and back.

A family is registered by its module of recipes/ with the names of its weights. Which one a model is written as follows from its
keys: the first family whose config.json says all of them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fp8cfg.schema.data import SHIPPED
from fp8cfg.schema.errors import ConfigError, PlainWarning, suggest
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.model import Model, RopeScaling
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.regular_file import open_regular
from fp8cfg.schema.value_errors import shown_value

PREFIX = "hf://"
CONFIG = ("config.json",)
BYTES = "bytes"
"""The value of data.tokenizer that asks for the tokenizer of bytes."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HUB_WEIGHTS = ("*.safetensors", "*.json", *TOKENIZER)
_LEFT = ("*/*", "consolidated*")
"""Not downloaded: other forms of the same weights, which have folders or names of their own."""


def split(name: str) -> tuple[str, str | None]:
    """The repository and the revision of an id, None where it names none."""
    repository, _, revision = name.removeprefix(PREFIX).partition("@")
    return repository, revision or None


def local_folder(name: str, key: str, files: tuple[str, ...]) -> Path:
    """The folder of `name`: a path as it is, or where the `files` of an id of the hub are now. Raises ConfigError, which names
    `key`, for an id that cannot be had."""
    if not name.startswith(PREFIX):
        return Path(name).expanduser()
    try:
        return _downloaded(*split(name), files)
    except ImportError:
        raise ConfigError(
            f"{key}={name}: needs the package huggingface_hub; pip install 'fp8cfg[hf]'"
        ) from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{key}={name}: {_reason(e, name)}") from None


def chosen_tokenizer(recipe: Recipe) -> str | None:
    """Returns the tokenizer that `recipe` trains with, a path or hf://OWNER/NAME; None for bytes.

    A pretrained model brings its own: without data.tokenizer it is the one next to model.path or model.weights. Shipped corpora are
    bytes, and token files have their tokens already.
    """
    data, model = recipe.data, recipe.model
    if data.tokenizer:
        return None if data.tokenizer == BYTES else data.tokenizer
    if data.name in (*SHIPPED, "tokens"):
        return None
    return model.path or model.weights


def tokenizer_path(name: str | None) -> str | None:
    """data.tokenizer as a path of this machine, None for bytes. Raises ConfigError as `local_folder`."""
    if name == BYTES:
        return None
    if name and name.startswith(PREFIX):
        return str(local_folder(name, "data.tokenizer", TOKENIZER))
    return name


def pinned(name: str, folder: Path) -> str:
    """An id of the hub with the commit that `folder` holds; a path as it is."""
    return f"{PREFIX}{split(name)[0]}@{folder.name}" if name.startswith(PREFIX) else name


@cache
def _downloaded(repository: str, revision: str | None, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository, revision=revision, allow_patterns=list(files), ignore_patterns=list(_LEFT)
        )
    )


def _reason(error: Exception, name: str) -> str:
    """Why huggingface_hub did not give `name`, in one line."""
    from huggingface_hub import errors

    repository, revision = split(name)
    if isinstance(error, errors.HFValidationError) or "/" not in repository:
        return "is no id of the hub; write hf://OWNER/NAME"
    if isinstance(error, errors.GatedRepoError):
        return "is gated; ask for access on its page, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such repository, or none for this token (HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision}"
    why = str(error.__cause__ or error).partition("\n")[0]
    return f"could not be downloaded, and is not in the cache ({why})"


LLAMA3 = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}


def read_rope(config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """The rotary keys of the `model` node; those that config.json leaves out are `model`'s. Raises ConfigError for a scaling that
    is not known."""
    given = config.get("rope_parameters") or {}
    full, local = given.get("full_attention", given), given.get("sliding_attention", {})
    if not isinstance(full, Mapping) or not isinstance(local, Mapping):
        raise ConfigError(
            "config.json: rope_parameters: expected an object for each kind of layers"
        )
    scaling = full if given else config.get("rope_scaling") or {}
    said = {
        "rotary_base": full.get("rope_theta", config.get("rope_theta", model.rotary_base)),
        "rotary_percent": full.get(
            "partial_rotary_factor", config.get("partial_rotary_factor", model.rotary_percent)
        ),
        "rope_scaling": _scaling(scaling),
    }
    if model.rotary_base_local is not None:
        said["rotary_base_local"] = local.get(
            "rope_theta", config.get("rope_local_base_freq", model.rotary_base_local)
        )
    return {key: float(value) if isinstance(value, int) else value for key, value in said.items()}


def _scaling(said: Mapping[str, Any]) -> RopeScaling:
    kind = said.get("rope_type", said.get("type", "default"))
    if kind in ("linear", "llama3") and "factor" not in said:
        raise ConfigError(f"config.json: rope_type={kind}: has no factor")
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(factor=said["factor"], rope_type="linear")
    if kind == "llama3":
        return RopeScaling(
            factor=said["factor"],
            **{ours: said[theirs] for theirs, ours in LLAMA3.items() if theirs in said},
        )
    raise ConfigError(
        f"config.json: rope_type={kind}: not in this version; default, linear and llama3 are"
    )


def write_rope(model: Model) -> dict[str, Any]:
    """What config.json says of the rotary keys of `model`, for readers of either spelling."""
    scaling = model.rope_scaling
    stretched: dict[str, Any] = {"rope_type": "default"}
    if scaling.factor != 1.0:
        stretched = {"rope_type": scaling.rope_type, "factor": scaling.factor}
        if scaling.rope_type == "llama3":
            stretched |= {theirs: getattr(scaling, ours) for theirs, ours in LLAMA3.items()}
    full = {"rope_theta": model.rotary_base, **stretched}
    if model.rotary_percent != 1.0:
        full["partial_rotary_factor"] = model.rotary_percent
    before = {
        "rope_theta": model.rotary_base,
        "rope_scaling": stretched if scaling.factor != 1.0 else None,
    }
    if model.rotary_percent != 1.0:
        before["partial_rotary_factor"] = model.rotary_percent
    if model.rotary_base_local is None:
        return {**before, "rope_parameters": full}
    local = {"rope_theta": model.rotary_base_local, "rope_type": "default"}
    return {
        **before,
        "rope_local_base_freq": model.rotary_base_local,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


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
    from fp8cfg.schema import recipe_registry

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


CONFIG_FILE, FROM_HF = "config.json", "from_hf"
MAX_BYTES = 1 << 20


def config_of(folder: str, key: str) -> dict[str, Any]:
    """The config.json of a folder, here or on the hub, which `key` names. Raises ConfigError for one that is not there or cannot be
    read."""
    path = local_folder(folder, key, CONFIG) / CONFIG_FILE
    try:
        with open_regular(path) as file:
            said = json.loads(file.read(MAX_BYTES))
    except FileNotFoundError:
        near = (
            f"; of the hub write {key}={PREFIX}{folder}"
            if folder.count("/") == 1 and folder[0] not in "/~."
            else ""
        )
        raise ConfigError(f"{key}={folder}: there is no {path}{near}") from None
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(
            f"{key}={folder}: {path} cannot be read ({getattr(e, 'strerror', None) or e})"
        ) from None
    if not isinstance(said, dict):
        raise ConfigError(f"{key}={folder}: {path} is no JSON object")
    return said


def model_in(folder: str, key: str) -> tuple[Family, Model]:
    """The family and the model of a folder. Raises ConfigError, naming `key`."""
    config = config_of(folder, key)
    try:
        family = of_config(config)
        return family, family.read(config)
    except ConfigError as e:
        raise ConfigError([f"{key}={folder}: {line}" for line in e.problems]) from None
    except (LookupError, TypeError, AttributeError, ArithmeticError) as e:
        raise ConfigError(
            f"{key}={folder}: {CONFIG_FILE} says what no such model has ({e})"
        ) from None


def shaped(recipe: Recipe) -> Recipe:
    """A copy of `recipe` with the shape and the weights of model.path, of the hub with the commit that these are of."""
    assert recipe.model.path is not None
    _, model = model_in(recipe.model.path, "model.path")
    made = recipe.model_copy(deep=True)
    held = local_folder(recipe.model.path, "model.path", CONFIG)
    made.model = model.model_copy(
        update={"path": recipe.model.path, "weights": pinned(recipe.model.path, held)}
    )
    return made


def family_of_weights(model: Model) -> Family:
    """The family of the checkpoint model.weights, with a warning where its config.json says another computation than `model`."""
    assert model.weights is not None
    family, found = model_in(model.weights, "model.weights")
    theirs, ours = computed(found), computed(model)
    if differs := [
        f"model.{key}={spelled(mine)} ({CONFIG_FILE}: {spelled(theirs[key])})"
        for key, mine in ours.items()
        if mine != theirs[key]
    ]:
        warnings.warn(
            f"model.weights={model.weights}: were trained otherwise: {', '.join(differs)}",
            PlainWarning,
            stacklevel=2,
        )
    return family
