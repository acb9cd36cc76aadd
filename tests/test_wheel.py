"""The wheel: one top-level package, complete, and a good neighbour of Hugging Face's `kernels`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "kvstore", "actors", "kernels")


def run(*command: str | Path, cwd: Path, env: dict[str, str]) -> str:
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by way of the sdist as a release is, from a copy: a build leaves files behind."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (repo_root / name).is_dir():
            shutil.copytree(repo_root / name, copy / name, symlinks=True)
        else:
            shutil.copy(repo_root / name, copy / name)
    # The environment's own setuptools, so that no network is needed.
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ".")
    run(*build, cwd=copy, env=dict(os.environ))
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", "--target", target, wheel, cwd=target, env=dict(os.environ))
    return target


def test_wheel_holds_one_package_and_all_of_it(wheel: Path, repo_root: Path):
    env = {**os.environ, "PYTHON": sys.executable}
    said = run("bash", repo_root / "scripts/check_wheel.sh", wheel, cwd=repo_root, env=env)
    assert "one package" in said


def test_wheel_holds_every_source_file(installed: Path, repo_root: Path):
    for folder, prefix in (("kvstore", ""), ("actors", "kvstore"), ("kernels", "kvstore")):
        for where, _, names in os.walk(repo_root / folder):  # does not enter the links
            for name in names:
                path = (Path(where) / name).relative_to(repo_root)
                if path.suffix in {".py", ".cu", ".cuh", ".ll"}:
                    assert (installed / prefix / path).is_file(), path


def test_wheel_imports_beside_hugging_face_kernels(installed: Path, tmp_path: Path):
    code = (
        "import kvstore, kvstore.actors, kvstore.kernels.reference, kernels\n"
        "kernels.get_kernel\n"
        "print(kvstore.__file__, kvstore.kernels.reference.__file__, kernels.__file__, sep='\\n')"
    )
    env = {**os.environ, "PYTHONPATH": str(installed)}
    ours, reference, theirs = run(sys.executable, "-c", code, cwd=tmp_path, env=env).split()
    assert Path(ours).is_relative_to(installed)
    assert Path(reference) == installed / "kvstore/kernels/reference.py"
    assert not Path(theirs).is_relative_to(installed)
