#!/usr/bin/env bash
# check_wheel.sh [WHEEL]: refuse a wheel that ships anything but one top-level package, or misses a part.
# A top-level `kernels` in the wheel would overwrite Hugging Face's package of that name on install.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

python=${PYTHON:-.venv/bin/python}
wheel=${1:-$(ls -t dist/raykv-*.whl 2>/dev/null | head -n 1)}
[ -f "$wheel" ] || die "no wheel found at '${wheel:-dist/}'; build one with: make wheel"

names=$("$python" -c 'import sys, zipfile; print("\n".join(zipfile.ZipFile(sys.argv[1]).namelist()))' "$wheel")
top=$(cut -d/ -f1 <<<"$names" | grep -v '\.dist-info$' | sort -u | tr '\n' ' ')
[ "$top" = "kvstore " ] || die "the wheel must hold the one top-level package kvstore, it holds: $top"

need() { grep -qE "$1" <<<"$names" || die "the wheel holds no file like $1"; }
refuse() { ! grep -E "$1" <<<"$names" || die "the wheel holds files it should not (see above)"; }
need '^kvstore/__init__\.py$'
need '^kvstore/py\.typed$'
need '^kvstore/integrations/vllm/connector\.py$'
need '^kvstore/actors/__init__\.py$'
need '^kvstore/kernels/[a-z_]+\.py$'
need '\.dist-info/licenses/LICENSE$'
refuse '__pycache__|\.pyc$'
refuse '^kvstore/kernels/__init__\.py$'
for source in kernels/*.cu kernels/*.cuh kernels/*.ll; do
    [ ! -f "$source" ] || need "^kvstore/$source\$"
done

printf '%s: one package, %s files\n' "$(basename "$wheel")" "$(wc -l <<<"$names")"
