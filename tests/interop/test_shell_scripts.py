"""Shell scripts: variables are substituted; a precision flag that depends on control flow is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8cfg import interop
from fp8cfg.__main__ import main
from fp8cfg.interop import shell_flags
from fp8cfg.interop.megatron import MEGATRON, PRECISION_FLAGS
from fp8cfg.interop.shell_script import parse_commands
from fp8cfg.schema.errors import ConfigError

IN_PLACE = "; write its value instead"


def conditional(flag: str, condition: int) -> str:
    return (
        f"{flag}: depends on a condition (line {condition}); move it out of the condition, or pass the flags"
        f" directly: -- {flag} ..."
    )


INTEGRATION = """: ${TE_PATH:=/opt/transformerengine}
ARCH=$(nvidia-smi --query-gpu=compute_cap | sed 's/[^0-9]//g')
if [[ ${ARCH} -ge 89 ]]; then
    WITH_FP8=1
fi
seq 1 4095 | awk '{ printf(", \\"%d\\": %d", $1, $1) }' >> ${VOCAB_FILE}
COMMAND="
python
${MCORE_PATH}/pretrain_gpt.py
--num-layers 2
--vocab-file ${VOCAB_FILE}
--merge-file ${TE_PATH}/merges.txt
${WITH_FP8:+--fp8-format hybrid}
"
COMMAND=$(echo "${COMMAND}" | tr '\\n' ' ')
bash -c "${COMMAND}"
"""
KNOWN = """GPUS=8
LR=1e-4; LAYERS=4
DTYPE="fp8"
DIST=(--nproc_per_node $GPUS --node_rank $NODE_RANK)
ARGS=(--num-layers $LAYERS "--lr ${LR}" --adam-eps ${EPS:-1e-8})
EPS=1e-6
FP8=()
FP8+=("--fp8-format hybrid" "--fp8-margin ${MARGIN}")
"""
P = """P=$1
if [ $P = half ]; then
    prec="--fp16"
elif [ $P = eight ]; then
    prec="--bf16 --fp8-format hybrid"
fi
base="--num-layers 8 --lr 1e-4 --lr-decay-style cosine"
"""
UNKNOWN = {
    "EXTRA_ARGS=$1\npython pretrain.py --num-layers 4 --bf16 $EXTRA_ARGS\n": [
        "line 2: $EXTRA_ARGS: EXTRA_ARGS is $1 (line 1), an argument of the script" + IN_PLACE
    ],
    "python pretrain.py --num-layers 4 \\\n  --bf16 $EXTRA_ARGS\n": [
        "line 2: $EXTRA_ARGS: EXTRA_ARGS is not set in the script" + IN_PLACE
    ],
    "python pretrain.py --bf16 ${W:+--fp8-format hybrid}": [
        "${W:+--fp8-format hybrid}: only a shell can expand it" + IN_PLACE
    ],
    INTEGRATION: [
        "line 13: ${WITH_FP8:+--fp8-format hybrid}: only a shell can expand it" + IN_PLACE
    ],
    "N=${N:-32}\npython pretrain.py --bf16 --num-layers $N\n": [
        "line 2: --num-layers $N: N is ${N:-32} (line 1), N is not set in the script" + IN_PLACE
    ],
    'python pretrain.py --bf16 "$@"': ["$@: an argument of the script" + IN_PLACE],
    "python pretrain.py --bf16 --lr=$LR": ["--lr $LR: LR is not set in the script" + IN_PLACE],
    "python pretrain.py --bf16 --lr $(cat lr.txt)": [
        "--lr $(cat lr.txt): only a shell can expand it" + IN_PLACE
    ],
    'if [ "$1" ]; then\n  A="--fp8-format hybrid"\nfi\npython pretrain.py --bf16 $A\n': [
        "line 2: " + conditional("--fp8-format", 1)
    ],
    '[ -n "$1" ] && A+=(--fp8-format hybrid)\npython pretrain.py --bf16 ${A[@]}\n': [
        "line 1: " + conditional("--fp8-format", 1)
    ],
    "case $1 in\n  big) H=128;;\n  *) H=64;;\nesac\npython pretrain.py --bf16 --hidden-size $H\n": [
        "line 5: --hidden-size $H: H is set in a condition (line 1)" + IN_PLACE
    ],
    "for LR in 1e-4 1e-3; do\n  python pretrain.py --bf16 --lr $LR\ndone\n": [
        "line 2: " + conditional("--bf16", 1)
    ],
    'A="--fp8-format hybrid"\nif [ "$1" ]; then A=""; fi\npython pretrain.py --bf16 $A\n': [
        "line 1: " + conditional("--fp8-format", 2)
    ],
    'A=(--fp8-format hybrid)\nif [ "$1" ]; then A=(); fi\npython pretrain.py --bf16 ${A[@]}\n': [
        "line 1: " + conditional("--fp8-format", 2)
    ],
    'A="--fp8-format hybrid"\nif [ "$1" ]; then unset A; fi\npython pretrain.py --num-layers 2 $A --bf16\n': [
        "line 1: " + conditional("--fp8-format", 2)
    ],
    "H=128\nif [ $1 ]; then unset H; fi\npython pretrain.py --bf16 --hidden-size $H\n": [
        "line 3: --hidden-size $H: H is set in a condition (line 2)" + IN_PLACE
    ],
    "f() {\n  python pretrain.py --fp8-format hybrid\n}\nf\n": [
        "line 2: " + conditional("--fp8-format", 1)
    ],
    "(cd x; python pretrain.py --bf16)": [conditional("--bf16", 1)],
    "A=(--num-layers 2)\nB=(--bf16)\nif [ $1 ]; then\n  python pretrain.py ${A[@]} ${B[@]}\nelse\n  python pretrain.py ${A[@]}\nfi\n": [
        "line 2: " + conditional("--bf16", 3)
    ],
    "A=(--fp8-format hybrid)\nif [ $1 ]; then python pretrain.py ${A[@]}; fi\npython pretrain.py --bf16\n": [
        "line 1: " + conditional("--fp8-format", 2)
    ],
    "cat > job.sh <<'EOF'\nit's a job\npython pretrain.py --bf16\nEOF\nsbatch job.sh --num-layers 2\n": [
        "line 3: " + conditional("--bf16", 1)
    ],
    P + 'cmd="torchrun pretrain_gpt.py ${base} ${prec}"\neval ${cmd}\n': [
        "line 3: " + conditional("--fp16", 2),
        "line 5: " + conditional("--bf16", 2),
        "line 5: " + conditional("--fp8-format", 2),
    ],
    'A="$A --bf16"\npython pretrain.py $A\n': ["line 1: $A: A is not set in the script" + IN_PLACE],
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_a_script_does_not_say_is_an_error_that_names_it(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.sh"
    file.write_text(text)
    assert main(["import", "megatron", str(file)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {file}: {line}" for line in UNKNOWN[text]
    ]


def test_variables_that_the_script_sets_are_substituted(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    for end, eps in (("", 1e-8), ("EPS=1e-6\n", 1e-6)):
        text = (
            KNOWN.replace("LR=1e-4", "LR=1e-4; MARGIN=2")
            + 'torchrun ${DIST[@]} pretrain_gpt.py --bf16 ${ARGS[@]} "${FP8[@]}" > $LOG 2>&1 &\n'
        )
        file.write_text((end or "EPS=\n") + text)
        recipe = interop.from_file("megatron", file).recipe
        assert (recipe.model.num_layers, recipe.optim.lr, recipe.optim.eps) == (4, 1e-4, eps)
        assert (recipe.fp8.enabled, recipe.fp8.format, recipe.fp8.margin) == (True, "hybrid", 2)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            'A="--bf16 --fp8-format hybrid"\nif [ $1 ]; then A="$A --log-interval 10"; fi\npython pretrain.py $A\n',
            "hybrid",
        ),
        (
            "A=(--fp8-format hybrid)\nif [ $1 ]; then\n  A+=(--x 1)\nelse\n  A=(--y ${A[@]})\nfi\npython pretrain.py ${A[@]}\n",
            "hybrid",
        ),
        ('A="--fp8-format hybrid"\nunset A\npython pretrain.py --bf16 $A\n', None),
    ],
)
def test_a_flag_that_a_condition_keeps_is_read(text: str, wanted: str | None) -> None:
    assert shell_flags.read_flags(text, MEGATRON, PRECISION_FLAGS)[0].get("fp8_format") == wanted


def test_a_variable_that_no_precision_hangs_on_is_left_alone() -> None:
    found = interop.from_words(
        "megatron",
        [
            "mkdir -p $OUT\npython pretrain.py --bf16 --save $OUT --data-path $W1 $P1 --vocab-file ${D}/v.json\n"
        ],
    )
    assert found.recipe.precision.compute == "bf16"
    assert found.lost == ("--save, --data-path, --vocab-file: not read",)


def test_variables_that_double_with_each_line_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"not a valid shell script \(its variables expand to too much text\)"
    ):
        interop.from_words(
            "megatron", ["A=xx\n" + "A=$A$A\n" * 40 + "python pretrain.py --bf16 $A\n"]
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'b c' \"d $e\"", ["a", "b", "c", "d", "$e"]),
        ("a\\\nb # c\n", ["a", "b"]),
        ("-x='$y'z", ["-x=$yz"]),
        ("a <<< b", ["a"]),
        ("case a in b) c ;; esac", ["c"]),
        ('a "$(cd "$(dirname "$0")" && pwd)/b"', ["a", '$(cd "$(dirname "$0")" && pwd)/b']),
        ("${a:-b c}d", ["${a:-b c}d"]),
        ("$(f (g))h `i j`", ["$(f (g))h", "`i j`"]),
        ("a#b", ["a#b"]),
        (r"a\ b", ["a", "b"]),
        ("cost$ 5", ["cost$", "5"]),
    ],
)
def test_words_of_a_shell(text: str, words: list[str]) -> None:
    assert [word.text for command in parse_commands(text) for word in command.words] == words


@pytest.mark.parametrize("text", ["'", '"a', "$(a", "${a", "a=(b", "`a"])
def test_text_of_no_shell(text: str) -> None:
    with pytest.raises(ConfigError, match="not a valid shell script"):
        interop.from_words("megatron", [f"--bf16 {text}" if "=" not in text else text])


def test_other_flags_in_control_flow_are_listed() -> None:
    script = """ARGS=(--num-layers 2 --bf16)
if [ "$DEBUG" = 1 ]; then
    ARGS+=(--log-interval 1)
    H=(--hidden-size 64)
fi
[ $1 ] && ARGS="$ARGS --seed 1"
torchrun pretrain_gpt.py "${ARGS[@]}" ${H[@]}
"""
    imported = interop.from_words("megatron", [script])
    assert imported.recipe.model.num_layers == 2 and imported.recipe.precision.compute == "bf16"
    assert imported.lost == (
        "--seed, --hidden-size: in a condition of the script, not read",
        "--log-interval: not read",
    )


def test_flags_that_each_launch_in_control_flow_has_are_certain() -> None:
    script = """ARGS=(--num-layers 2 --bf16)
if [ "$DEBUG" = 1 ]; then
    python pretrain_gpt.py ${ARGS[@]} --log-interval 1
else
    [ $DRY_RUN ] && echo "dry run of --fp16 ${ARGS[@]}"
    for node in 0 1; do torchrun pretrain_gpt.py "${ARGS[@]}"; done
fi
"""
    imported = interop.from_words("megatron", [script])
    assert imported.recipe.model.num_layers == 2 and imported.recipe.precision.compute == "bf16"


def test_a_command_after_another_one_is_certain() -> None:
    launch, *_ = (
        c
        for c in parse_commands("cd here && source x && torchrun a.py --bf16\n")
        if c.words[0].text == "torchrun"
    )
    assert launch.condition == 0 and not any(word.condition for word in launch.words)
    (guarded,) = (
        c
        for c in parse_commands("[ $X ] && torchrun a.py --bf16\n")
        if c.words[0].text == "torchrun"
    )
    assert guarded.condition == 1
