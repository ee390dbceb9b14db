# Shared by the scripts beside it; sourced, not run.
# Sets ROOT (the clone), CACHE (what is kept outside it) and the pinned version of uv.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
CACHE=${SGLANG_EPD_CACHE:-${HOME:?}/.cache/sglang-epd}
UV_VERSION=0.13.8

# Everything that is said while working goes to stderr; stdout is for results.
say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
die() { say "$@"; exit 1; }

# The versions of Python that requirements.lock is for; the first that is found is taken.
PYTHONS=(3.11 3.12)
VENV=$ROOT/.venv
LAYER=()
# `--python 3.12` in front of a script's other arguments takes that one, in .venv-3.12.
if [[ ${1:-} == --python ]]; then
    [[ " ${PYTHONS[*]} " == *" ${2:-} "* ]] || die "--python takes one of ${PYTHONS[*]}"
    LAYER=(--python "$2")
    PYTHONS=("$2")
    VENV=$ROOT/.venv-$2
    unset PYTHON
    shift 2
fi

# The Python that environments are made from: PYTHON, the one that VENV was made from, or
# one from PATH or pyenv.
find_python() {
    local version candidate candidates=("$VENV/bin/python")
    for version in "${PYTHONS[@]}"; do
        candidates+=("python$version" "${PYENV_ROOT:-${HOME:?}/.pyenv}/versions/$version".*/bin/python)
    done
    candidates+=(python3 python)
    if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        # The base interpreter, should this one belong to an activated .venv.
        "$candidate" - "${PYTHONS[@]}" 2>/dev/null <<'END' && return
import sys
if "%d.%d" % sys.version_info[:2] not in sys.argv[1:]:
    sys.exit(1)
print(sys._base_executable)
END
    done
    die "${PYTHON:+PYTHON=$PYTHON will not do: }needs Python (one of ${PYTHONS[*]}) with venv" \
        "and pip; set PYTHON to it if it is not in PATH"
}

# Prints the path of uv: the one in PATH if it has the pinned version, else one that is
# installed for these scripts. Prints nothing and fails where it cannot be had.
find_uv() {
    local home=$CACHE/bootstrap/uv-$UV_VERSION
    if [[ $(uv --version 2>/dev/null) == "uv $UV_VERSION"* ]]; then
        command -v uv
        return
    fi
    if [[ ! -e $home/.complete ]]; then
        say "fetching uv $UV_VERSION"
        rm -rf "$home"
        "$(find_python)" -m venv "$home" >&2 || return 1
        "$home/bin/python" -m pip install --quiet --disable-pip-version-check \
            "uv==$UV_VERSION" >&2 || return 1
        touch "$home/.complete"
    fi
    printf '%s\n' "$home/bin/uv"
}
