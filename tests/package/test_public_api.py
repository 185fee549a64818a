"""The names that fp8cfg exports: these, the same to Python and to type checkers, and nothing that is imported later hides one."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.composition.recipe_yaml import owner
from fp8cfg.schema.presets import FUNCTIONS
from fp8cfg.schema.recipe import fields

NAMES = {
    # recipes
    "Recipe",
    "Model",
    "LoRA",
    "RopeScaling",
    "FP8",
    "OverrideLinearPrecision",
    "Precision",
    "Storage",
    "Data",
    "Optim",
    "Trainer",
    "Strategy",
    "Timeout",
    "Checkpoint",
    "Log",
    "ConfigError",
    "NotFP8Error",
    "recipe",
    "recipes",
    "compose",
    "from_yaml",
    "to_yaml",
    "structured_config",
    "interop",
    # what one does with them
    "plan",
    "Plan",
    "explain",
    "Explanation",
    "lower",
    "build",
    "Job",
    "fit",
    "resume",
    "RunFolder",
    "Callback",
    "coverage",
    "exit_codes",
    "run",
    "run_data",
    "collect_statistics",
    "parity",
    "write_report",
    "ParityReport",
    "advise",
    "advise_model",
    "Advice",
    "read_run",
    "RunData",
    "find_runs",
    "compare_runs",
    "Comparison",
    "Command",
    "graph_nodes",
    "graph_tags",
    "Execution",
    "Executor",
    "LocalExecutor",
    "TorchrunExecutor",
    "SlurmExecutor",
    # models of one's own
    "convert_model",
    "convert_back",
    "has_fp8_layers",
    "has_transformer_engine_layers",
    "contextual_fp8_autocast",
    "apply_fp8_autowrap",
    "averaged",
    "Average",
    # precision presets
    "bf16_mixed",
    "fp16_mixed",
    "fp32",
    "bf16_with_fp8_mixed",
    "fp16_with_fp8_mixed",
    "bf16_with_fp8_delayed_scaling_mixed",
    "fp16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_current_scaling_mixed",
    "fp16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "fp16_with_fp8_subchannel_scaling_mixed",
    "bf16_with_mxfp8_mixed",
    "fp16_with_mxfp8_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nanov2_bf16_with_fp8_current_scaling_mixed",
    "bf16_with_nvfp4_mixed",
    "nemotron_3_super_bf16_with_nvfp4_mixed",
    "bf16_precision_aware_mixed",
    "bf16_adamw_fp8_mixed",
    "bf16_with_fp8_te_fused_adam_mixed",
    "bf16_with_fp8_block_deepseek_v3_mixed",
    "bf16_with_fp8_current_coat_mixed",
    "fp16_amp",
    "bf16_with_fp8_amp",
}
ROOT = Path(fp8cfg.__file__).parent
TRITON = {f"fp8cfg.numerics.triton_{name}" for name in ("kernels", "block_kernel", "row_kernel")}
"""Modules whose code is Triton's, which torch's CUDA builds bring: imported by functions that run on a GPU."""
ALL_MODULES = f"""
import importlib, importlib.util, pkgutil, sys, warnings
import fp8cfg
left_out = set() if importlib.util.find_spec("triton") else {TRITON}
warnings.simplefilter("ignore")
before = {{name: getattr(fp8cfg, name) for name in fp8cfg.__all__}}
for info in pkgutil.walk_packages(fp8cfg.__path__, "fp8cfg."):
    if not info.name.endswith(".__main__") and info.name not in left_out:
        importlib.import_module(info.name)
print(*[name for name in fp8cfg.__all__ if getattr(fp8cfg, name) is not before[name]])
print(*[name for name in sys.modules if name.startswith("fp8cfg.")])
"""


def test_the_exported_names_are_these() -> None:
    assert set(fp8cfg.__all__) == NAMES and len(fp8cfg.__all__) == len(NAMES)
    assert (
        set(FUNCTIONS) | {owner(key)[0].__name__ for key in fields()} <= NAMES
    )  # presets, and the nodes that exports construct
    assert {name for name in dir(fp8cfg) if not name.startswith("__")} == NAMES
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fp8cfg.nothing  # type: ignore[attr-defined]  # noqa: B018
    for name in fp8cfg.__all__:
        assert getattr(fp8cfg, name) is not None, name


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("coverage", "a torch.nn.Module, such as job.model"),
        ("convert_back", "a torch.nn.Module, such as job.model"),
        ("has_fp8_layers", "a torch.nn.Module, such as job.model"),
        ("has_transformer_engine_layers", "a torch.nn.Module, such as job.model"),
        ("averaged", "a Job; fp8cfg.build(recipe) returns one"),
        ("to_yaml", "a Recipe, such as job.recipe"),
        ("recipe", "a function that returns a Recipe; call the functions of fp8cfg.recipes"),
    ],
)
def test_what_is_given_for_something_else_is_answered_in_a_line(name: str, what: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        getattr(fp8cfg, name)("llama_tiny")
    assert e.value.problems == [f"{name}: expected {what}, got str"]


def test_type_checkers_read_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    shown = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    homes = {
        alias.name: statement.module
        for statement in shown.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname == alias.name
    }
    annotated = {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assigned = {  # Plan = PlanReport
        ast.unparse(statement.targets[0]): ast.unparse(statement.value)
        for statement in shown.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name)
    }
    assert assigned.pop("graph_nodes") == "graph"
    assert assigned == fp8cfg._OWN_NAMES
    for name, own_name in assigned.items():
        homes[name] = next(
            statement.module
            for statement in shown.body
            if isinstance(statement, ast.ImportFrom)
            and own_name in [a.name for a in statement.names]
        )
    assert homes == {
        **fp8cfg._HOME,
        "interop": "fp8cfg",
        "recipes": "fp8cfg",
        "graph_tags": "fp8cfg.building",
    }
    assert annotated == set(FUNCTIONS) == NAMES - set(homes) - {"graph_nodes"}


def modules() -> set[str]:
    """Every module and package of fp8cfg, by its dotted name."""
    files = [
        file for folder in (ROOT, ROOT / "recipes") for file in folder.rglob("*.py")
    ]  # rglob does not enter links
    return {
        ".".join(["fp8cfg", *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(
            ".__init__"
        )
        for file in files
    }


def test_importing_every_module_hides_no_exported_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALL_MODULES], capture_output=True, text=True, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stderr
    hidden, loaded = done.stdout.split("\n")[:2]
    assert not hidden and set(loaded.split()) == modules() - {"fp8cfg", "fp8cfg.__main__"} - (
        set() if importlib.util.find_spec("triton") else TRITON
    )


def test_no_module_has_the_name_of_what_its_package_exports() -> None:
    every, packages = modules(), [*ROOT.rglob("__init__.py"), ROOT / "recipes/__init__.py"]
    for file in packages:
        package, names = ".".join(["fp8cfg", *file.parent.relative_to(ROOT).parts]), set[str]()
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                names |= {
                    alias.asname or alias.name
                    for alias in node.names
                    if f"{node.module}.{alias.name}" not in every
                }
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if file.parent == ROOT:
            names = NAMES - {"interop", "recipes"}  # which are modules
        assert not {name for name in names if f"{package}.{name}" in every}, package


def test_importing_it_loads_nothing_that_is_slow_to_load() -> None:
    code = "import sys, fp8cfg; print(*{m.partition('.')[0] for m in sys.modules} & {'torch', 'hydra', 'omegaconf', 'fiddle', 'pydantic', 'numpy', 'yaml'})"
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT.parent,
        ).stdout
        == "\n"
    )
