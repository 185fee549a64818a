#!/bin/sh
# Adds Transformer Engine to the fake GPU in FOLDER, which setup.sh has made: its library of kernels from PyPI, and its extension for
# torch, compiled from PyPI's source against torch's and NVIDIA's headers, without CUDA's compiler. What is there is kept.
#
#     sh tools/fake_gpu/setup_te.sh FOLDER              1.6 GB to download, of which 0.5 GB stay, and 15 minutes on two cores
#     sh tools/fake_gpu/setup_te.sh FOLDER VERSION      of that version; 2.20.2 unless said
#
# Then, in the root of a checkout:    . FOLDER/env.sh; . FOLDER/te.sh; $FAKE_GPU_PYTHON SCRIPT
set -eu

fail() {
    echo "error: setup_te.sh: $*" >&2
    exit 1
}

[ $# -ge 1 ] && [ -e "$1/env.sh" ] || fail "FOLDER of a fake GPU that tools/fake_gpu/setup.sh has made"
here=$(cd "$(dirname "$0")" && pwd)
folder=$(cd "$1" && pwd)
version=${2:-2.20.2}
te=$folder/te-$version
. "$folder/env.sh"
unset PYTHONPATH
pip="$FAKE_GPU_PYTHON -m pip --quiet --disable-pip-version-check --no-cache-dir"

if ! [ -e "$te/extension/.built" ]; then
    rm -rf "$te"
    mkdir -p "$te"
    # Of NVIDIA's libraries the headers alone: real ones may not be where the fake ones are.
    pins=$("$FAKE_GPU_PYTHON" -c 'import importlib.metadata as m
required = [r.split(";")[0].strip() for r in m.requires("torch")]
print(*(r for r in required if r.startswith(("nvidia-cudnn", "nvidia-nccl"))), next(r for r in required if r.startswith("cuda-toolkit")).split("==")[1])')
    # shellcheck disable=SC2086 # a word each
    $pip install --target "$te/headers" ${pins% *} "cuda-toolkit[cccl,crt,cublas,cudart,cusolver,cusparse,nvrtc,nvtx]==${pins##* }" 2>/dev/null ||
        fail "pip could not install CUDA's headers ($pins)"
    rm -rf "$te"/headers/nvidia/*/lib
    $pip install --target "$te/build" wheel 'setuptools<82'
    include=$te/headers/nvidia
    CPATH=$include/cu13/include:$include/cudnn/include:$include/nccl/include CUDA_HOME=$include/cu13 PYTHONPATH=$te/build \
        NVTE_WITH_NCCL_EP=0 NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-$(nproc)} \
        $pip wheel --wheel-dir "$te/extension" --no-deps --no-build-isolation "transformer-engine-torch==$version"
    rm -rf "$te/build" "$te/headers"
    touch "$te/extension/.built"
fi
if ! [ -e "$te/.installed" ]; then
    # At once, for pip does not add to a package that is in its target. What its Python imports; the rest of what it requires is for
    # export and debugging.
    rm -rf "$te/site"
    $pip install --target "$te/site" --no-deps "$te"/extension/*.whl "transformer-engine==$version" "transformer-engine-cu13==$version" \
        einops onnx onnx_ir onnxscript ml_dtypes protobuf
    touch "$te/.installed"
fi

FAKE_GPU_PYTHON=$FAKE_GPU_PYTHON sh "$here/setup.sh" "$folder" # whose libraries have what this one wants, too
cat >"$folder/te.sh" <<END
# Sourced after env.sh: Transformer Engine $version, and the version of cuDNN that torch was built for, whose attention both use.
export PYTHONPATH=\$PYTHONPATH:$te/site FAKE_CUDNN=91900
export CUDNN_HOME=$folder/lib NVRTC_HOME=$folder/lib CURAND_HOME=$folder/lib
END
PYTHONPATH='' && . "$folder/te.sh"
"$FAKE_GPU_PYTHON" -c 'import transformer_engine as te, transformer_engine.pytorch; print("transformer-engine", te.__version__)'
