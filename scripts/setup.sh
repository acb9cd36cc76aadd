#!/usr/bin/env bash
# Make .venv with raykv (editable) and everything that its tests, checks and examples need.
# Safe to run again at any time; when nothing changed it returns at once.
#
#   PYTHON              interpreter to use (default: the newest of python3.13, 3.12, 3.11, python3)
#   RAYKV_TORCH_INDEX   URL of a package index to take torch from, e.g. one with CPU builds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

venv=.venv
begin_venv "$venv" pyproject.toml constraints.txt constraints-cpu.txt scripts/setup.sh scripts/lib.sh scripts/uv_settings.py
use_uv "$venv"
install_torch "$venv"
pins=(-c constraints.txt)
# -W ignore: torch warns that NumPy is missing, which comes only in the next step.
if "$venv/bin/python" -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
    pins+=(-c constraints-cpu.txt)
fi
step "raykv (editable) and its dependencies" \
    "${uv[@]}" install "${into[@]}" --compile-bytecode "${pins[@]}" -e '.[dev]'
step "check: ray, torch and nixl import" "$venv/bin/python" -c 'import ray, torch, nixl_cu12'
end_venv "$venv"
