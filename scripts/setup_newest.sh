#!/usr/bin/env bash
# Make .venv-newest: raykv (editable) with the newest releases that the ranges in pyproject.toml allow, looked up anew
# by every run. PYTHON and RAYKV_TORCH_INDEX are those of setup.sh. Without that index torch is the release that
# constraints.txt pins: newer ones come from the usual index as CUDA builds of several GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

venv=.venv-newest
begin_venv "$venv" pyproject.toml # without end_venv it is never up to date
use_uv "$venv"
if [ -n "${RAYKV_TORCH_INDEX:-}" ]; then
    step "newest torch from $RAYKV_TORCH_INDEX" "${uv[@]}" install "${into[@]}" --upgrade \
        --no-deps --default-index "$RAYKV_TORCH_INDEX" torch
else
    install_torch "$venv"
fi
torch=$venv/torch.txt
"$venv/bin/python" -W ignore -c 'import torch; print("torch==" + torch.__version__)' >"$torch"
step "raykv (editable), all else as new as it may be" "${uv[@]}" install "${into[@]}" --upgrade -c "$torch" \
    -e '.[events,transformers]' pytest pytest-timeout hypothesis
step "check: ray, torch and nixl import" "$venv/bin/python" -c 'import ray, torch, nixl_cu12'
say "done in ${SECONDS} s"
