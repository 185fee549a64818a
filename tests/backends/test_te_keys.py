"""Every key of `fp8` under backend=te: read back from a genuine Transformer Engine object, or refused by name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8cfg.backends.protocol import Hardware
from fp8cfg.backends.te import rules
from fp8cfg.numerics import Region
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.node import Node
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.scalings import SCALINGS
from tests.support import te_standin
from tests.support.te_small import converted, planned, transformer
from tests.support.te_table import APPLIED, ELSEWHERE, REFUSED, Applied, Refused, node

H200, B200 = Hardware("cuda", (9, 0), (12, 9), (12, 9, 1)), Hardware("cuda", (10, 0), (13, 0))


class Converted:
    """A converted model and what a row reads: the recipe, and of the first converted layer its module's state."""

    def __init__(self, fp8: FP8) -> None:
        self.model = converted(fp8)
        self.converted = [
            n for n, m in self.model.named_modules() if type(m).__name__ == "TELinear"
        ]
        self.layer: Any = self.model.get_submodule(self.converted[0])
        engine = self.layer.engine
        self.recipe, module = engine.recipe, engine.module
        if self.recipe.delayed():
            state = module.fp8_meta["scaling_fwd"]
            self.history, self.scales = state.amax_history, state.scale.tolist()
        quantization = sys.modules["transformer_engine.pytorch.quantization"]
        with quantization.quantized_model_init(enabled=False, recipe=self.recipe):
            module.fp8_meta["num_gemms"] = len(engine.linears)
            module.init_fp8_meta_tensors(self.recipe)
        self.quantizers = [*module.quantizers["scaling_fwd"], *module.quantizers["scaling_bwd"]]


@pytest.mark.parametrize("row", APPLIED, ids=lambda r: f"{r.key} {r.given}")
def test_a_key_is_read_back(row: Applied) -> None:
    with te_standin.transformer_engine():
        fp8 = node(row.given)
        hopper = fp8.scaling not in ("mxfp8", "nvfp4") and not (
            fp8.scaling == "current" and fp8.dot_product_attention
        )
        assert rules.refusals(Precision(fp8=fp8), H200 if hopper else B200) == []
        assert row.read(Converted(fp8)) == row.want


@pytest.mark.parametrize("row", REFUSED, ids=lambda r: f"{r.key} {r.given}")
def test_a_key_is_refused(row: Refused) -> None:
    fp8 = node(row.given)
    hardware = H200 if fp8.scaling != "nvfp4" else B200
    found = rules.refusals(Precision(fp8=fp8, compute=row.compute), hardware)
    lines = [str(violation) for violation in found]
    assert any(
        line.startswith(f"{row.key}=") and row.line in line and "; " in line for line in lines
    ), lines


def test_every_key_has_a_row() -> None:
    def leaves(cls: type[Node], at: str) -> set[str]:
        found = set()
        for name, f in cls.model_fields.items():
            nested = isinstance(f.annotation, type) and issubclass(f.annotation, Node)
            found |= leaves(f.annotation, f"{at}{name}.") if nested else {at + name}
        return found

    assert (
        leaves(FP8, "fp8.")
        == {r.key for r in [*APPLIED, *REFUSED]} - {"precision.compute"} | ELSEWHERE.keys()
    )


@pytest.mark.parametrize("scaling", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_every_field_of_the_recipe_is_said_and_read_back(scaling: str) -> None:
    from fp8cfg.backends.te.recipe import TENSORS, fields, recipe_of

    fp8 = node({"scaling": scaling, "format": "e4m3"})
    with te_standin.transformer_engine():
        built = recipe_of(fp8)
        theirs = {f.name for f in dataclasses.fields(built)} | {
            n for n in dir(built) if n.startswith(("fp8_quant", "fp4_quant"))
        }
    assert fields(fp8).keys() == theirs, "a field that only one side has"
    assert (
        scaling in ("delayed", "mxfp8")
        or {f"{'fp4' if scaling == 'nvfp4' else 'fp8'}_quant_{t}" for t in TENSORS} <= theirs
    )


@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({"scaling": "current"}, {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"}),
        ({"scaling": "block"}, {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}),
        (
            {"scaling": "nvfp4", "format": "e4m3"},
            {
                "NVTE_NVFP4_DISABLE_RHT": "1",
                "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
                "NVTE_NVFP4_4OVER6": "all",
            },
        ),
        ({}, {"NVTE_BACKWARD_OVERRIDE": "high_precision"}),
    ],
)
def test_defaults_that_variables_moved_before_the_import_do_not_reach_the_recipe(
    given: dict[str, Any], environ: dict[str, str]
) -> None:
    from fp8cfg.backends.te.recipe import recipe_of

    with te_standin.transformer_engine():
        want = repr(recipe_of(node(given)))
    with te_standin.transformer_engine(environ):
        assert repr(recipe_of(node(given))) == want


@pytest.mark.parametrize(
    ("given", "field", "line"),
    [
        ({"margin": 2}, "margin", "DelayedScaling.margin: the recipe says 2, the library has 7"),
        (
            {"scaling": "current"},
            "fp8_gemm_fprop",
            "Float8CurrentScaling.fp8_gemm_fprop: the recipe says {'use_split_accumulator': False}, the library has 7",
        ),
    ],
)
def test_a_library_that_drops_a_field_is_found(
    given: dict[str, Any], field: str, line: str
) -> None:
    from fp8cfg.backends.protocol import BackendError
    from fp8cfg.backends.te.recipe import recipe_of

    fp8 = node(given)
    with te_standin.transformer_engine(), pytest.MonkeyPatch.context() as patch:
        cls = getattr(sys.modules["transformer_engine.common.recipe"], SCALINGS[fp8.scaling].te)
        plain = cls.__init__
        patch.setattr(
            cls,
            "__init__",
            lambda self, **given: (plain(self, **given), setattr(self, field, 7))[0],
        )
        with pytest.raises(BackendError, match="the library has 7") as e:
            recipe_of(fp8)
    assert str(e.value) == line


@pytest.mark.parametrize(
    ("fp8", "hardware", "line"),
    [
        ({}, Hardware("cpu"), "runs only on CUDA"),
        (
            {},
            Hardware("cuda", (8, 6), (12, 9)),
            "fp8.enabled=true: this GPU has compute capability 8.6",
        ),
        (
            {},
            Hardware("cuda", (8, 9), (12, 0)),
            "fp8.enabled=true: torch has CUDA 12.0, Transformer Engine needs 12.1 on Ada",
        ),
        (
            {},
            Hardware("cuda", (8, 9), (12, 1), (12, 1, 2)),
            "cuBLASLt is 12.1.2, Transformer Engine needs 12.1.3",
        ),
        (
            {"scaling": "block"},
            Hardware("cuda", (8, 9), (12, 9)),
            "fp8.scaling=block: this GPU has compute capability 8.9",
        ),
        (
            {"scaling": "block"},
            Hardware("cuda", (9, 0), (12, 8)),
            "fp8.scaling=block: torch has CUDA 12.8",
        ),
        (
            {"scaling": "block", "use_power_2_scales": False},
            Hardware("cuda", (10, 0), (13, 0)),
            "fp8.use_power_2_scales=false",
        ),
        ({"scaling": "mxfp8"}, H200, "fp8.scaling=mxfp8: this GPU has compute capability 9.0"),
        ({"scaling": "mxfp8"}, Hardware("cuda", (12, 0), (13, 0)), "needs 10.0 to below 12.0"),
        ({"scaling": "nvfp4"}, H200, "fp8.scaling=nvfp4: this GPU has compute capability 9.0"),
        (
            {"dot_product_attention": True},
            Hardware("cuda", (8, 9), (12, 9)),
            "FP8 attention needs 9.0 (Hopper)",
        ),
        (
            {"dot_product_attention": True},
            Hardware("cuda", (12, 0), (13, 0)),
            "FP8 attention needs one below 12.0",
        ),
        (
            {"scaling": "mxfp8", "format": "e4m3", "dot_product_attention": True},
            Hardware("cuda", (10, 0), (13, 0), cudnn=(9, 19, 0)),
            "cuDNN is 9.19.0, Transformer Engine needs 9.21.0 or later for FP8 attention under fp8.scaling=mxfp8; install it, or remove fp8",
        ),
        (
            {"scaling": "mxfp8", "format": "e4m3", "dot_product_attention": True},
            Hardware("cuda", (10, 0), (13, 0), cudnn=(9, 23, 1)),
            "needs another than 9.23.1",
        ),
        (
            {"scaling": "current", "dot_product_attention": True},
            Hardware("cuda", (10, 0), (13, 0), cudnn=(9, 13, 0)),
            "needs 9.14.0 or later",
        ),
        (
            {"scaling": "current", "dot_product_attention": True},
            H200,
            "needs 10.0 (Blackwell) under fp8.scaling=current; set fp8.scaling=delayed",
        ),
    ],
)
def test_hardware_that_cannot_is_refused_before_anything_is_built(
    fp8: dict[str, Any], hardware: Hardware, line: str
) -> None:
    lines = [str(found) for found in rules.refusals(Precision(fp8=node(fp8)), hardware)]
    assert len(lines) == 1 and line in lines[0], lines


@pytest.mark.parametrize(
    ("capability", "scalings"),
    [
        ((8, 9), ["delayed", "current"]),
        ((9, 0), ["delayed", "current", "block"]),
        ((10, 0), ["delayed", "current", "block", "mxfp8", "nvfp4"]),
        ((12, 0), ["delayed", "current", "block", "nvfp4"]),
    ],
)
def test_the_gates_are_those_of_transformer_engine(
    capability: tuple[int, int], scalings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = Hardware("cuda", capability, (12, 9), (12, 9, 0))
    able = [
        s
        for s in ("delayed", "current", "block", "mxfp8", "nvfp4")
        if not rules.refusals(Precision(fp8=node({"scaling": s, "format": "e4m3"})), hardware)
    ]
    assert able == scalings
    with te_standin.transformer_engine():
        theirs = sys.modules["transformer_engine.pytorch.quantization"]
        monkeypatch.setattr(theirs, "get_device_compute_capability", lambda: capability)
        monkeypatch.setattr(theirs.torch.version, "cuda", "12.9")
        checks = {
            "delayed": theirs._compute_fp8_support,
            "current": theirs._compute_fp8_support,
            "block": theirs._compute_fp8_block_scaling_support,
            "mxfp8": theirs._compute_mxfp8_support,
            "nvfp4": theirs._compute_nvfp4_support,
        }
        assert [s for s, check in checks.items() if check()[0]] == scalings


@pytest.mark.parametrize(
    ("capability", "head_dim", "wants"),
    [
        ((9, 0), 128, ""),
        ((9, 0), 64, "128 below 10.0 (Blackwell);"),
        ((9, 0), 256, "128 below"),
        ((10, 0), 128, ""),
        ((10, 0), 64, ""),
        ((10, 0), 72, "multiples of 16 up to 128;"),
        ((10, 0), 192, "multiples of 16 up to 128"),
    ],
)
def test_heads_that_fp8_attention_has_no_kernel_for_are_refused_before_anything_is_built(
    capability: tuple[int, int], head_dim: int, wants: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8cfg.backends.te import attention
    from fp8cfg.schema.errors import ConfigError

    model, fp8 = transformer(head_dim=head_dim), node({"dot_product_attention": True})
    assert attention.misfits(model, fp8) == [], "no GPU to ask"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    assert attention.misfits(model, node({})) == []
    lines = attention.misfits(model, fp8)
    assert [
        f"heads have {head_dim} channels, cuDNN's FP8 attention trains only {wants}" in line
        for line in lines
    ] == ([True] if wants else [])
    if wants:
        from fp8cfg.backends.te import backend

        with pytest.raises(ConfigError, match=f"heads have {head_dim} channels"):
            backend.convert(model, fp8, planned(fp8, model), Region(), "scaled_mm")
        assert type(model.layers[0].mlp.linear_fc1).__name__ == "Linear"


def test_a_layer_whose_shape_does_not_fit_stays_in_high_precision() -> None:
    assert rules.misfit(node({}), 48, 24) == "out_features=24 is not a multiple of 16"
    assert (
        rules.misfit(node({"scaling": "mxfp8"}), 48, 64) == "in_features=48 is not a multiple of 32"
    )
    assert (
        rules.misfit(node({}), 48, 64) == ""
        and rules.tokens_multiple(node({"scaling": "mxfp8"}), "scaled_mm") == 32
    )


def test_without_its_compiled_part_it_is_not_available(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rules, "_extension", lambda package: False)
    assert "no compiled part" in rules.unavailable()
    monkeypatch.setattr(rules, "installed_version", lambda _: "2.2.0")
    assert rules.unavailable() == "transformer-engine 2.2.0 is installed, at least 2.8 is needed"
    monkeypatch.setattr(rules, "installed_version", lambda _: "2.8rc1")
    assert "no compiled part" in rules.unavailable()
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda _: None)
    assert (
        rules.unavailable()
        == "transformer-engine is not installed; pip install 'fp8cfg[te]' (needs an NVIDIA GPU)"
    )
    monkeypatch.undo()
    assert not rules._extension(tmp_path / "te")
    (tmp_path / "te" / "wheel_lib").mkdir(parents=True)
    (tmp_path / "te" / "wheel_lib" / "transformer_engine_torch.cpython-311.so").touch()
    assert rules._extension(tmp_path / "te")


def test_the_rules_load_neither_torch_nor_transformer_engine() -> None:
    code = (
        "import sys; from fp8cfg.backends.te import rules; rules.unavailable(); "
        "assert not {'torch', 'transformer_engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
