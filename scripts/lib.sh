# Shared by the scripts: find or make the Python environment, and install megafour into it.
# shellcheck shell=bash

say() { printf '\n\033[1m==> %s\033[0m\n' "$*"; }

# use_environment [EXTRAS] — the active environment if there is one, else .venv; sets PYTHON. A torch >= 2.11 that can
# be imported is never reinstalled: its own version then replaces the pin of constraints.txt.
use_environment() {
    if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        PYTHON=$(command -v python)
        say "Using the active environment: $PYTHON"
    else
        if [ ! -x .venv/bin/python ]; then
            local base
            base=$(find_python)
            say "Making .venv with $base"
            if [ -n "$(good_torch "$base")" ]; then
                "$base" -m venv --system-site-packages .venv    # a container's own torch build is the one to use
            else
                "$base" -m venv .venv
            fi
        fi
        PYTHON=$PWD/.venv/bin/python
    fi
    install_megafour "${1:-}"
    PATH="$(dirname "$PYTHON"):$PATH"
}

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: no Python 3.11 or newer on PATH" >&2
    return 1
}

# good_torch PYTHON — the version of its torch if that is 2.11 or newer, else nothing.
good_torch() {
    "$1" - <<'PY' 2>/dev/null || true
import torch
if tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 11):
    print(torch.__version__)
PY
}

# install_key — what an install into this environment depends on.
install_key() { echo "$(good_torch "$PYTHON") $(cat pyproject.toml constraints.txt | cksum)"; }

# is_installed STAMP — whether this very folder is what the environment imports, installed with today's dependencies.
is_installed() {
    [ "$(cat "$1" 2>/dev/null)" = "$(install_key)" ] &&
        [ "$(cd / && "$PYTHON" -c 'import megafour; print(megafour.__file__)' 2>/dev/null)" = "$PWD/megafour/__init__.py" ]
}

# install_megafour EXTRAS — done again only when pyproject.toml, constraints.txt or torch changed since the last time.
install_megafour() {
    local extras=$1 stamp torch constraints
    stamp=$("$PYTHON" -c 'import sys; print(sys.prefix)')/.megafour-installed-$extras
    if is_installed "$stamp"; then
        return
    fi
    torch=$(good_torch "$PYTHON")
    constraints=$(mktemp)
    if [ -n "$torch" ]; then
        say "Installing megafour (torch $torch is here already and stays)"
        { grep -v '^torch==' constraints.txt; echo "torch==$torch"; } >"$constraints"
    else
        say "Installing megafour and torch (a large download, once)"
        cp constraints.txt "$constraints"
    fi
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -c "$constraints" -e ".${extras:+[$extras]}"
    rm -f "$constraints"
    install_key >"$stamp" 2>/dev/null || true
}
