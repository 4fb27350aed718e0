# Usage: sh scripts/setup.sh VENV MARK [PYTHON]
# Installs the package with its tests into the folder VENV, which is made if it is missing, and then creates MARK.
set -eu
venv=$1 mark=$2 python=${3:-}
wanted=$(cut -d. -f1,2 .python-version)
fits='import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))'

fail() {
    echo "error: $1" >&2
    exit 1
}

find_python() {
    pyenv=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$wanted"*/bin/python 2>/dev/null | tail -n 1)
    for python in "python$wanted" python3 python "${pyenv:-python3}" python3.13 python3.14; do
        # Being found is not enough: pyenv's commands exist for versions that are not active.
        "$python" -c "$fits" >/dev/null 2>&1 && return
    done
    version=$(python3 --version 2>/dev/null) || version='not installed'
    fail "Python 3.12 or newer with its venv module is needed, and python3 is $version: \
install Python $wanted, or name it with PYTHON=/path/to/python$wanted"
}

# What pip was copying when it was killed may look complete to it afterwards.
test ! -e "$venv/unfinished" || rm -rf "$venv"

if test ! -e "$venv/bin/python"; then
    if test -z "$python"; then
        find_python
    elif ! "$python" -c "$fits" >/dev/null 2>&1; then
        version=$("$python" --version 2>/dev/null) || version='not a Python that runs'
        fail "Python 3.12 or newer with its venv module is needed, and PYTHON=$python is $version"
    fi
    mkdir -p "$venv"
    : >"$venv/unfinished"
    "$python" -m venv "$venv"
elif ! "$venv/bin/python" -c "$fits" >/dev/null 2>&1; then
    fail "$venv does not hold a Python 3.12 or newer that runs: remove it with 'make clean' and try again"
fi

echo "installing into $venv; the first time takes minutes, PyTorch alone is several GB"
: >"$venv/unfinished"
rm -f "$venv"/installed-*
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --editable '.[test]' --constraint constraints.txt || fail "the installation did not finish; see pip's message above"
rm "$venv/unfinished"
: >"$mark"
