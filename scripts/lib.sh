# Shared by the scripts beside it; sourced, not run.
# Sets ROOT (the clone), CACHE (what is kept outside it) and the pinned version of uv.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
CACHE=${SGLANG_EPD_CACHE:-${HOME:?}/.cache/sglang-epd}
UV_VERSION=0.13.8

# Everything that is said while working goes to stderr; stdout is for results.
say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
die() { say "$@"; exit 1; }

# The Python that environments are made from: 3.11, which requirements.lock is for.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        if [[ -n $candidate ]] && "$candidate" -c \
            'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            # The base interpreter, should this one belong to an activated .venv.
            "$candidate" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
    die "needs Python 3.11 with venv and pip (set PYTHON to it if it is not in PATH)"
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
