#!/bin/sh
# Makes a fake GPU in FOLDER: torch's CUDA wheel over libraries that do nothing but log. What is there is kept.
#
#     sh tools/fake_gpu/setup.sh FOLDER                     makes an environment there, 2.1 GB (0.7 GB to download)
#     sh tools/fake_gpu/setup.sh FOLDER TORCH               of that version; 2.11.0 unless said, the oldest that is allowed
#     PYTHON=python3.12 sh tools/fake_gpu/setup.sh FOLDER   makes it of that Python; python3 unless said, 3.11 or newer
#     FAKE_GPU_PYTHON=PYTHON sh tools/fake_gpu/setup.sh FOLDER     uses the environment of that Python, and installs nothing into it
#
# Then, in the root of a checkout:    . FOLDER/env.sh; $FAKE_GPU_PYTHON SCRIPT
set -eu

fail() {
    echo "error: $*" >&2
    exit 1
}

[ $# -ge 1 ] || fail "setup.sh: FOLDER, or FOLDER TORCH"
here=$(cd "$(dirname "$0")" && pwd)
torch=${2:-2.11.0}
mkdir -p "$1"
folder=$(cd "$1" && pwd)
for tool in cc g++ nm readelf; do
    command -v $tool >/dev/null || fail "$tool: not found; install a C and a C++ compiler and binutils"
done

python=${FAKE_GPU_PYTHON:-$folder/venv/bin/python}
pip="$python -m pip install --quiet --disable-pip-version-check"
if [ -z "${FAKE_GPU_PYTHON:-}" ] && ! [ -e "$folder/.installed-$torch" ]; then
    if ! [ -x "$python" ]; then
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "${PYTHON:-python3}: needs Python 3.11; name one, as in PYTHON=python3.12"
        "${PYTHON:-python3}" -m venv "$folder/venv"
    fi
    "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null ||
        fail "Python.h: not found; install Python's headers (Debian and Ubuntu: apt install python3-dev), Triton's launchers need them"
    # What fp8cfg and torch require, then torch and Triton alone: of CUDA's libraries none may be there, torch would load them.
    $pip fiddle hydra-core numpy omegaconf pydantic pyyaml rich safetensors pytest hypothesis pytest-xdist -c "$here/../../constraints.txt"
    $pip filelock fsspec jinja2 networkx 'setuptools<82' sympy typing_extensions -c "$here/../../constraints.txt"
    $pip --no-cache-dir --no-deps "torch===$torch" # `===`: the wheel for CUDA, where another place has one that says +cpu
    $pip --no-cache-dir --no-deps "$("$python" -c 'import importlib.metadata as m
print(next(r.split(";")[0].strip() for r in m.requires("torch") if r.startswith("triton")))')"
    touch "$folder/.installed-$torch"
fi
# Headers, beside the environment: the runtime that comes with them is a real one.
[ -d "$folder/headers/nvidia" ] ||
    "$python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps --target "$folder/headers" nvidia-cuda-runtime==13.0.96

site=$("$python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0].rpartition("/")[0])')
"$python" -c 'import sys; from torch.version import cuda; sys.exit(not (cuda or "").startswith("13."))' 2>/dev/null ||
    grep -q "^cuda.*'13\." "$site/torch/version.py" || fail "$python: its torch is not built for CUDA 13"
# A backend of check_gpu.py and bench_gpu.py, whose rows are in Python and Triton alone.
[ -n "${FAKE_GPU_PYTHON:-}" ] || [ -d "$site/torchao" ] || $pip --no-cache-dir --no-deps torchao==0.18.0
nvidia=$site/triton/backends/nvidia
set -- "$site"/torch/lib/*.so*
for te in "$folder"/te-*/site/transformer_engine/wheel_lib/libtransformer_engine.so; do # of setup_te.sh
    [ ! -e "$te" ] || set -- "$@" "$te"
done
stamp=$( (cat "$here"/make_libraries.py "$here"/stubs/* "$site/torch/version.py" && echo "$@") | cksum)
if [ "$stamp" != "$(cat "$folder/.made" 2>/dev/null)" ]; then
    rm -rf "$folder/lib"
    "$python" "$here/make_libraries.py" "$folder/lib" "$nvidia/driver.c" "$folder/headers/nvidia/cu13/include:$nvidia/include" "$@"
    echo "$stamp" >"$folder/.made"
fi

triton=$(sed -n "s/^__version__ = '\(.*\)'/\1/p" "$site/triton/__init__.py")
cat >"$folder/env.sh" <<END
# Sourced in the root of a checkout: \$FAKE_GPU_PYTHON runs Python on the fake GPU.
export LD_LIBRARY_PATH=$folder/lib TRITON_LIBCUDA_PATH=$folder/lib PYTHONPATH=\$PWD
# Else Inductor names torch's own once it compiles, and Triton caches PTX under a version that its own ptxas does not take.
export TRITON_PTXAS_PATH=$nvidia/bin/ptxas
export TORCHINDUCTOR_CACHE_DIR=$folder/inductor TRITON_CACHE_DIR=$folder/triton-$triton TORCHINDUCTOR_COMPILE_THREADS=1
# What torch compiles by NVRTC as it runs, such as exp2, is nothing here, and a real GPU would take it from the cache.
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 USE_PYTORCH_KERNEL_CACHE=0
export FAKE_GPU_PYTHON=$python
END
. "$folder/env.sh"
"$python" -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name(), torch.cuda.get_device_capability())'
