"""`export`: a recipe written out in any form reads back equal."""

from __future__ import annotations

import json
import runpy
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8cfg
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.hydra_application import node, recipe_from
from fp8cfg.composition.recipe_yaml import assigned, flat
from fp8cfg.report.recipe_export import deltas, json_text, python_text, recipe_schema, yaml_text
from fp8cfg.schema import presets, recipe_registry
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import parse_yaml
from tests.support.overrides import KEYS, value
from tests.support.verbs import loads, refused, said

Out = pytest.CaptureFixture[str]
SCHEMA = jsonschema.Draft202012Validator(recipe_schema(Library()))
FP8 = ["recipe=llama_8b", "precision=bf16_fp8", "fp8.margin=1"]


def test_yaml_is_names_and_what_differs(capsys: Out) -> None:
    head = f"# Exported by fp8cfg {fp8cfg.__version__}.\n"
    assert (
        said(capsys, "export", *FP8)
        == head + "recipe: llama_8b\nprecision: bf16_fp8\nfp8:\n  margin: 1\n"
        == said(capsys, "export", "--yaml", *FP8)
    )
    assert said(capsys, "export") == head + "recipe: llama_tiny\n"
    assert said(
        capsys,
        "export",
        "precision=fp16",
        "precision.hysteresis=3",
        "data=text",
        "data.path=x",
        "optim.betas=[0.9,0.99]",
    ).splitlines()[1:] == [
        "recipe: llama_tiny",
        "precision: fp16",
        "data:",
        "  name: text",
        "  path: x",
        "optim:",
        "  betas:",
        "  - 0.9",
        "  - 0.99",
        "trainer:",
        "  plugins:",
        "    hysteresis: 3",
    ]


def test_json(capsys: Out) -> None:
    assert json.loads(said(capsys, "export", "--json", *FP8, "data=tiny")) == {
        "recipe": "llama_8b",
        "precision": "bf16_fp8",
        "data": "tiny",
        "fp8": {"margin": 1},
    }
    assert Recipe(**json.loads(said(capsys, "export", "--json", "--full", *FP8))) == fp8cfg.compose(
        FP8
    )


def test_python_is_a_script_to_edit(capsys: Out) -> None:
    assert (
        said(capsys, "export", "--python", *FP8)
        == f'''\
"""Exported by fp8cfg {fp8cfg.__version__}. Edit the recipe; run this file to train it."""

import fp8cfg
from fp8cfg.recipes import llama_8b

recipe = llama_8b()
recipe.precision = fp8cfg.bf16_with_fp8_mixed()
recipe.fp8.margin = 1

if __name__ == "__main__":
    with fp8cfg.exit_codes():
        fp8cfg.fit(fp8cfg.build(recipe))
'''
    )
    full = said(capsys, "export", "--python", "--full", *FP8)
    assert (
        "        plugins=fp8cfg.Precision(\n            compute='bf16',\n            fp8=fp8cfg.FP8(\n                enabled=True,\n"
        in full
    )


@pytest.mark.parametrize(
    "words",
    [
        [
            "precision=bf16_fp8_current",
            "fp8.params=false",
            "fp8.high_precision_at_start=0",
            "fp8.high_precision_at_end=0",
        ],
        ["precision=bf16_mxfp8", "fp8.params=false"],
        [
            "precision=bf16_fp8_current",
            "fp8={params: false, format: e4m3, granularity: row, use_power_2_scales: true}",
            "backend=torchao",
        ],
        ["precision=fp16_fp8_block", "fp8.params=true"],
        ["precision=bf16_fp8", "storage={exp_avg: bf16, exp_avg_sq: bf16}"],
    ],
    ids=" ".join,
)
def test_the_preset_that_is_named_scales_and_stores_alike(words: list[str]) -> None:
    """Also where another leaves fewer values over, and nobody said which."""
    found = deltas(fp8cfg.compose(words), {})
    assert words[0] == f"precision={found.presets['precision']}"
    assert not [k for k in found.values if k.endswith((".scaling", ".compute"))]


@pytest.mark.parametrize(
    "words",
    [
        [
            "precision=bf16_fp8",
            "fp8={params: false, first_step: te, output_layer: true, amax_history_len: 16}",
            "backend=te",
        ],
        ["precision=fp16_fp8", "fp8.params=false"],
        [
            "precision=bf16_fp8_current",
            "precision.compute=fp32",
            "fp8={params: false, granularity: row, emulate: true, high_precision_at_end: 0}",
            "backend=torchao",
        ],
    ],
    ids=" ".join,
)
def test_the_preset_that_is_named_runs_fp8_where_the_recipe_does(words: list[str]) -> None:
    """A preset without FP8, or of another scaling, leaves fewer values over."""
    recipe = fp8cfg.compose(words)
    found = deltas(recipe, {})
    assert words[0] == f"precision={found.presets['precision']}" and not [
        k for k in found.values if k.endswith((".scaling", ".enabled"))
    ]
    assert _read(yaml_text(recipe, {}, full=False)) == recipe


@pytest.mark.slow
def test_the_script_trains(tmp_path: Path) -> None:
    import subprocess
    import sys

    from tests.support.small import small

    script = tmp_path / "mine.py"
    script.write_text(
        python_text(
            small("precision=bf16_fp8", "trainer.max_steps=2", f"log.dir={tmp_path / 'runs'}"),
            {},
            full=False,
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "recipe": st.sampled_from(sorted(recipe_registry.recipes())),
        "precision": st.sampled_from(presets.choices()),
        "data": st.sampled_from(["tiny", "text"]),
    },
)


UNREAD = [key for key in KEYS if key != "model.path"]
"""Keys that name no file which composing reads."""


@settings(max_examples=25, deadline=None)
@given(CHOICES, st.dictionaries(st.sampled_from(UNREAD), st.none(), max_size=6), st.data())
def test_every_form_reads_back_equal(
    named: dict[str, str], keys: dict[str, None], data: st.DataObject
) -> None:
    library = Library()
    recipe = recipe_registry.named(named.get("recipe", "llama_tiny"))
    if "precision" in named:
        recipe.precision = named["precision"]
    if "data" in named:
        recipe.data = fp8cfg.Data(**node("data", named["data"], library))
    recipe = assigned(recipe, {key: data.draw(value(key), label=key) for key in keys})
    said_names = data.draw(st.sampled_from([named, {}]))
    for full in (False, True):
        for text in (yaml_text(recipe, said_names, full), json_text(recipe, said_names, full)):
            assert _read(text) == recipe, text
            SCHEMA.validate(parse_yaml(text, "YAML"))
        assert _run(python_text(recipe, said_names, full)) == recipe
    found = deltas(recipe, said_names)
    assert found.recipe == said_names.get("recipe", found.recipe) and len(found.values) <= len(
        flat(recipe)
    )


def _read(text: str) -> Recipe:
    """As `fp8cfg FILE.yaml`, without the rules between keys."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.yaml"
        file.write_text(text, encoding="utf-8")
        return recipe_from(file, Library())


def _run(text: str) -> Recipe:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.py"
        file.write_text(text, encoding="utf-8")
        recipe = runpy.run_path(str(file))["recipe"]
        assert isinstance(recipe, Recipe)
        return recipe


def test_a_whole_recipe_finds_its_nearest_shipped_base() -> None:
    every = list(recipe_registry.recipes().items())
    for number, preset in enumerate(presets.choices()):
        name, make = every[number % len(every)]
        recipe = make()
        recipe.precision = preset
        found = deltas(recipe, {})
        assert (found.recipe, found.values) == (name, {}) and found.presets.get(
            "precision", "bf16"
        ) == preset


def test_what_is_named_is_kept_where_another_base_is_as_near(capsys: Out) -> None:
    assert said(capsys, "export", "recipe=llama_8b", "name=mine").splitlines()[1:] == [
        "recipe: llama_8b",
        "name: mine",
    ]
    assert said(capsys, "export", "precision=bf16_fp8", "fp8.params=false").splitlines()[1:] == [
        "recipe: llama_tiny",
        "precision: bf16_fp8",
        "fp8:",
        "  params: false",
    ]
    assert said(capsys, "export", "data=stdlib").splitlines()[1:] == [
        "recipe: llama_tiny",
        "data: stdlib",
    ]


def test_an_export_needs_no_folder_of_ones_own(capsys: Out, tmp_path: Path) -> None:
    for name, text in {
        "recipe/mine.yaml": "recipe: llama_1b\nprecision: own\nname: mine\n",
        "precision/own.yaml": "compute: fp16\nfp8: {enabled: true}\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    want = fp8cfg.compose(["recipe=mine", "optim.lr=1e-3"], config_dir=tmp_path)
    out = tmp_path / "out.yaml"
    assert (
        said(
            capsys,
            "export",
            "recipe=mine",
            "optim.lr=1e-3",
            "--config-dir",
            str(tmp_path),
            "--output",
            str(out),
        )
        == f"wrote {out}\n"
    )
    assert fp8cfg.from_yaml(out) == want and out.read_text().splitlines()[1:4] == [
        "recipe: llama_1b",
        "precision: fp16_fp8",
        "name: mine",
    ]
    whole = tmp_path / "whole.yaml"
    said(capsys, "export", str(out), "--full", "--output", str(whole))
    assert fp8cfg.from_yaml(whole) == want == fp8cfg.from_yaml(said(capsys, "export", str(whole)))


def test_a_recipe_of_an_installed_package_is_imported_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        recipe_registry, "_RECIPES", {**recipe_registry.recipes(), "theirs": theirs}
    )
    assert "from test_export import theirs\n\nrecipe = theirs()\n" in python_text(
        theirs(), {}, full=False
    )


def theirs() -> Recipe:
    """A recipe of a package."""
    return Recipe(name="theirs", optim=fp8cfg.Optim(lr=0.5))


def test_a_file_is_written_once_and_names_the_schema_where_there_is_one(
    capsys: Out, tmp_path: Path
) -> None:
    out, later = tmp_path / "a.yaml", tmp_path / "b.yaml"
    said(capsys, "export", "--output", str(out))
    before = out.read_text()
    assert refused(capsys, "export", "--full", "--output", str(out)) == [
        f"--output {out}: exists already; remove it or write to another"
    ]
    assert out.read_text() == before and "yaml-language-server" not in before
    (tmp_path / "fp8cfg.schema.json").write_text(said(capsys, "schema"))
    said(capsys, "export", "--output", str(later))
    assert later.read_text() == f"# yaml-language-server: $schema=fp8cfg.schema.json\n{before}"
    said(capsys, "export", "--python", "--output", str(tmp_path / "a.py"))
    assert (tmp_path / "a.py").read_text().startswith('"""')


def test_a_file_that_cannot_be_written_is_exit_code_5(capsys: Out, tmp_path: Path) -> None:
    from fp8cfg.__main__ import main

    (tmp_path / "file").touch()
    assert main(["export", "--output", str(tmp_path / "file" / "a.yaml")]) == 5
    assert (
        capsys.readouterr().err
        == f"error: --output {tmp_path / 'file' / 'a.yaml'}: cannot be written (Not a directory)\n"
    )
    assert (
        main(["export", "--output", str(tmp_path / "new" / "folder" / "a.yaml")]) == 0
        and (tmp_path / "new/folder/a.yaml").is_file()
    )


def test_a_path_that_is_no_text_is_escaped(capsys: Out) -> None:
    recipe = fp8cfg.compose(["data=text", "data.path='\udcff'"])
    assert json.loads(json_text(recipe, {}, full=False))["data"]["path"] == "\udcff"
    for text in (
        json_text(recipe, {}, True),
        yaml_text(recipe, {}, False),
        yaml_text(recipe, {}, True),
        python_text(recipe, {}, False),
    ):
        text.encode("utf-8")


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (
            ["--yaml", "--json", "fp8.margn=1"],
            [
                "export: --yaml and --json; choose one",
                "fp8.margn: no such key; did you mean 'fp8.margin'?",
            ],
        ),
        (
            ["slurm", "--slurm", "cpus-per-tsk=4,teardown=x"],
            [
                "--slurm cpus-per-tsk=4: no option of sbatch; did you mean 'cpus-per-task'?",
                "--slurm teardown=x: a parameter of submitit, which a script does not have; remove it",
            ],
        ),
        (
            ["slurm", "--slurm", "partition=gpu foo=1"],
            ["--slurm partition=gpu foo=1: has a space; put a comma between settings"],
        ),
        (
            ["slurm", "--slurm", "partition=gpu\nrm=x"],
            ["--slurm 'partition=gpu\\nrm=x': has a line break; write one line"],
        ),
        (
            ["hf", "RUN", "OUT", "--output", "x", "--full"],
            [
                "--full: has no effect on export hf, it is for export of a recipe",
                "--output: has no effect on export hf, it is for export slurm and export of a recipe",
            ],
        ),
        (
            ["peft", "RUN", "OUT", "--merge"],
            ["--merge: has no effect on export peft, it is for export hf"],
        ),
        (
            ["slurm", "--fp8", "block"],
            ["--fp8: has no effect on export slurm, it is for export hf"],
        ),
        (
            ["te", "--slurm", "partition=gpu"],
            ["--slurm: has no effect on export of a recipe, it is for export slurm"],
        ),
        (["slrum"], ["slrum: no such project; did you mean 'slurm'?"]),
        (
            ["fp8.margin=1"],
            [
                "fp8.margin=1: has no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true"
            ],
        ),
        (["--output", "a", "--output", "b"], ["--output: given 2 times"]),
        (["--output"], ["--output: needs a value"]),
        (["nowhere.yaml"], ["nowhere.yaml: cannot be read (No such file or directory)"]),
        (["--pyton"], ["--pyton: no such option; did you mean '--python'?"]),
    ],
)
def test_mistakes(capsys: Out, argv: list[str], lines: list[str]) -> None:
    assert refused(capsys, "export", *argv) == lines


def test_neither_torch_nor_fiddle_is_loaded() -> None:
    assert not loads("export", "--python", *FP8) & {"torch", "fiddle", "numpy"}


def test_a_batch_script_has_a_line_for_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """A space between settings is a comma: sbatch would take the second for a part of the first."""
    script = said(capsys, "export", "slurm", "--slurm", "partition=gpu time=04:00:00 nodelist=a,b")
    settings = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert settings[-3:] == [
        "#SBATCH --partition=gpu",
        "#SBATCH --time=04:00:00",
        "#SBATCH --nodelist=a,b",
    ]
    assert "#SBATCH --output=llama_tiny-%j.out" in settings
    named = said(capsys, "export", "slurm", "--slurm", "output=logs/%x.txt")
    assert [line for line in named.splitlines() if "output" in line] == [
        "#SBATCH --output=logs/%x.txt"
    ]


def test_a_batch_script_quotes_its_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    script = said(capsys, "export", "slurm", 'log.dir="a,b"')
    command = script.partition("' fp8cfg \\\n")[2].partition("code=$?")[0]
    assert fp8cfg.compose(shlex.split(command)).log.folder == "a,b/llama_tiny"


def test_a_batch_script_sets_up_an_environment_or_a_container(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = "time=10,setup=source venv/bin/activate && module load cuda,container-image=a#b:1,container_mounts=/data"
    script = said(capsys, "export", "slurm", "--slurm", settings)
    lines = script.splitlines()
    assert lines.index("source venv/bin/activate && module load cuda") < lines.index(
        "export WORLD_SIZE=$SLURM_NTASKS"
    )
    assert "srun --container-image='a#b:1' --container-mounts=/data bash -c \\" in lines
    assert not [line for line in lines if line.startswith("#SBATCH --container")]
    plain = said(capsys, "export", "slurm")
    assert "container-image=IMAGE" in plain
    for text in (script, plain):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
