# Shared by the set-up scripts. Source it from the root of the checkout; it defines functions only.
# shellcheck shell=bash

say() { printf '%s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# step "what it does" command...: run quietly, one line with the seconds it took; all output on failure.
step() {
    local title=$1 log start status
    shift
    log=$(mktemp)
    start=$(date +%s%N)
    # A subshell, so that die() inside a step is shown like any failure; not `|| status=$?`, which would
    # switch set -e off inside.
    set +e
    (
        set -e
        "$@"
    ) >"$log" 2>&1
    status=$?
    set -e
    printf '  %-46s %6.1f s\n' "$title" "$((($(date +%s%N) - start) / 100000000))e-1"
    if [ "$status" -ne 0 ]; then
        cat "$log" >&2
        rm -f "$log"
        die "step failed (exit status $status): $title"
    fi
    rm -f "$log"
}

good_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Print the interpreter to build environments with. $PYTHON wins, and is never silently replaced.
pick_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        good_python "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.11 or newer"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3; do
        if good_python "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer found; install one (Debian, Ubuntu: apt-get install python3 python3-venv)" \
        "or name it: PYTHON=/path/to/python make setup"
}

python_version() {
    "$1" -c 'import platform; print(platform.python_version())'
}

# make_venv PYTHON FOLDER: a fresh virtual environment; on Debian the needed package is installed as root.
make_venv() {
    local python=$1 folder=$2 package
    rm -rf "$folder"
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
            apt-get update -qq || true # an old list may do; the installation says so if not
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"
        else
            die "$python cannot make virtual environments; as root: apt-get install $package"
        fi
    fi
    "$python" -m venv "$folder"
}

# stamp_of VERSION FILE...: one line that changes when an environment made from these would differ.
# The checkout's path is part of it because virtual environments cannot be moved.
stamp_of() {
    local version=$1
    shift
    printf '%s %s %s\n' "$version" "$(cat "$@" | sha256sum | cut -c1-16)" "$PWD"
}

# usable_venv FOLDER VERSION: does its interpreter run, with pip, at this path and version?
usable_venv() {
    local folder=$1 version=$2
    [ -x "$folder/bin/python" ] &&
        [ "$(python_version "$folder/bin/python" 2>/dev/null)" = "$version" ] &&
        "$folder/bin/python" -m pip --version >/dev/null 2>&1 &&
        grep -qsF "$PWD/$folder" "$folder/bin/activate"
}

# use_uv FOLDER: sets `uv`, the command, and `into`, the words that name the environment. It fetches and unpacks packages
# side by side, where pip takes one after the other and then compiles all of them in one process.
use_uv() {
    local python=$1/bin/python settings line
    step "uv" "$python" -m pip install -q --disable-pip-version-check -c constraints.txt uv
    settings=$("$python" scripts/uv_settings.py)
    while IFS= read -r line; do
        [ -z "$line" ] || export "$line"
    done <<<"$settings"
    [ -w "${HOME:-/}" ] || export UV_NO_CACHE=1
    uv=("$1/bin/uv" -q pip)
    into=(--python "$python")
}

# install_torch FOLDER: torch goes first, so that its (large) build is a choice and not an accident. Needs use_uv.
install_torch() {
    local python=$1/bin/python pinned
    pinned=$(sed -n 's/^torch==//p' constraints.txt)
    if "$python" -c 'import sys, torch; sys.exit(torch.__version__.split("+")[0] != sys.argv[1])' "$pinned" \
        >/dev/null 2>&1; then
        return # whatever its build: CPU or CUDA was decided when it came
    fi
    if [ -n "${RAYKV_TORCH_INDEX:-}" ]; then
        # --no-deps: only torch may come from that index; the rest follows with raykv itself.
        step "torch from $RAYKV_TORCH_INDEX" "${uv[@]}" install "${into[@]}" -c constraints.txt \
            --no-deps --default-index "$RAYKV_TORCH_INDEX" torch
        return
    fi
    if ! command -v nvidia-smi >/dev/null 2>&1; then
        say "  no NVIDIA driver seen: without more advice uv may fetch the CUDA build of torch, several GB;"
        say "  RAYKV_TORCH_INDEX=<index URL of CPU builds> make setup fetches a small one"
    fi
    step "torch" "${uv[@]}" install "${into[@]}" -c constraints.txt torch
}

# One set-up at a time per environment: make demo and make test may start together.
lock() {
    exec 9>"$1"
    if command -v flock >/dev/null 2>&1; then
        flock -w 1800 9 || die "another set-up has held $1 for 30 minutes; end it and try again"
    fi
}

# begin_venv FOLDER FILE...: make the environment if it is not usable; ends the script if it is up to date with these
# files. After all else the script calls end_venv FOLDER.
begin_venv() {
    local venv=$1 python version
    shift
    python=$(pick_python)
    version=$(python_version "$python")
    lock "$venv.lock"
    stamp=$(stamp_of "$version" "$@")
    if [ "$(cat "$venv/.raykv-stamp" 2>/dev/null)" = "$stamp" ] && "$venv/bin/python" -c '' 2>/dev/null; then
        say "environment $venv is up to date (Python $version)"
        exit 0
    fi
    say "setting up $venv with Python $version"
    # A link leads to the environment of another checkout, which stays as it is.
    [ ! -L "$venv" ] || rm -f "$venv"
    rm -f "$venv/.raykv-stamp"
    if ! usable_venv "$venv" "$version"; then
        step "virtual environment" make_venv "$python" "$venv"
    fi
}

# end_venv FOLDER: the environment is complete.
end_venv() {
    printf '%s\n' "$stamp" >"$1/.raykv-stamp"
    say "done in ${SECONDS} s"
}
