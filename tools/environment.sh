#!/bin/sh
# Environment of a checkout, for the Makefile; whatever is missing is one line that says what to install.
#
#     sh tools/environment.sh make PYTHON FOLDER        the virtual environment, made anew where it is half-made
#     sh tools/environment.sh install FOLDER ARGUMENT...    packages, as pip's arguments say
set -u

LEAST=3.11

fail() {
    echo "error: $*" >&2
    exit 1
}

# Whether $1 is a Python that is new enough. The test runs under every Python since 2.
new_enough() {
    "$1" -c "import sys; sys.exit(list(sys.version_info[:2]) < [int(part) for part in '$LEAST'.split('.')])" 2>/dev/null
}

version() {
    "$1" -c "import sys; print('%d.%d' % sys.version_info[:2])" 2>/dev/null || echo "no version"
}

# The newest Python on PATH that is new enough, as a word to add to make's.
other_python() {
    for minor in 14 13 12 11; do
        if command -v "python3.$minor" >/dev/null && new_enough "python3.$minor"; then
            echo "or run make with PYTHON=python3.$minor"
            return
        fi
    done
    echo "and run make again, with PYTHON=python$LEAST where that is its name"
}

make_environment() {
    python=$1 folder=$2
    if new_enough "$folder/bin/python" && "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    command -v "$python" >/dev/null || fail "$python: not found; install Python $LEAST or newer, $(other_python)"
    if ! new_enough "$python"; then
        fail "$python is Python $(version "$python"); install Python $LEAST or newer, $(other_python)"
    fi
    # venv --clear deletes all that is there.
    if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ] && ls -A "$folder" | grep -qvxE 'bin|include|lib|lib64|\.(installed|tested-with)'; then
        fail "$folder: holds other files, and is no virtual environment; remove it, or run make with VENV=FOLDER"
    fi
    if ! said=$("$python" -m venv --clear "$folder" 2>&1); then
        case $said in
        *ensurepip* | *"No module named"*)
            fail "$python has no module venv; install it (Debian and Ubuntu: apt install python$(version "$python")-venv), and run" \
                "make again" ;;
        *) fail "$python -m venv $folder: $(echo "$said" | tail -n 1)" ;;
        esac
    fi
}

install_packages() {
    folder=$1
    shift
    echo "pip install $*"
    if ! said=$("$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2>&1); then
        case $said in
        *"from versions: none"* | *"onnection"* | *"Temporary failure"* | *"timed out"* | *"No matching distributions available"* | *ProxyError* | *SSLError*)
            fail "pip reaches no package index; connect to a network, or set PIP_INDEX_URL or HTTPS_PROXY, and run make again" ;;
        *)
            why=$(echo "$said" | sed -n 's/^ *ERROR: //p' | head -n 1)
            fail "pip install $*: ${why:-$(echo "$said" | tail -n 1)}" ;;
        esac
    fi
}

case ${1-} in
make) make_environment "$2" "$3" ;;
install) shift; install_packages "$@" ;;
*) fail "environment.sh: make PYTHON FOLDER, or install FOLDER ARGUMENT..." ;;
esac
