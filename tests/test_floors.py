"""The floors of the code: examples -> actors -> kvstore -> kernels, and who may import what.

Imports inside functions count like those at the top.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FACE = {"kvstore/api.py", "kvstore/cli.py"}  # the only ones that look up, to kvstore.actors
NIXL_FILE = "kvstore/mover/nixl.py"
NIXL_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
SERVE = "kvstore/integrations/serve"
STOP = " ".join(("ray", "stop"))  # in two words here, so that this file passes its own test


def python_files(*folders: str) -> list[str]:
    """Paths below the root; symlinked folders are not entered, so every file comes once."""
    return sorted(
        os.path.relpath(os.path.join(where, name), ROOT)
        for folder in folders
        for where, _, names in os.walk(ROOT / folder)
        for name in names
        if name.endswith(".py")
    )


def module_of(path: str) -> list[str]:
    """The import name that a file has inside the package, as parts."""
    parts = list(Path(path).with_suffix("").parts)
    return parts if parts[0] == "kvstore" else ["kvstore", *parts]


def imports_in(nodes: Iterable[ast.AST], path: str) -> Iterator[str]:
    """Every module that a file imports, absolute; `from a import b` gives both a and a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module_of(path)[: -node.level]
                base = ".".join([*above, base] if base else above)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def nodes_of(source: str, path: str = "<test>") -> list[ast.AST]:
    return list(ast.walk(ast.parse(source, filename=path)))


@functools.cache  # one walk through a file serves all rules
def facts_of(path: str) -> tuple[frozenset[str], list[int]]:
    nodes = nodes_of((ROOT / path).read_text(encoding="utf-8"), path)
    return frozenset(imports_in(nodes, path)), stop_calls(nodes)


def imports_of(path: str) -> frozenset[str]:
    return facts_of(path)[0]


def below(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def offences(paths: list[str], *banned: str) -> list[str]:
    return [f"{path}: {name}" for path in paths for name in sorted(imports_of(path)) if below(name, *banned)]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import ray.util", "ray.util"),
        ("from kvstore import actors", "kvstore.actors"),
        ("from . import actors", "kvstore.actors"),
        ("from .actors.node import X", "kvstore.actors.node"),
        ("def f():\n    if x:\n        import cupy as cp", "cupy"),
        ("import importlib\nimportlib.import_module('nixl_cu12._api')", "nixl_cu12._api"),
        ("m = __import__('ray')", "ray"),
    ],
)
def test_the_walker_sees_every_kind_of_import(source, found):
    assert found in set(imports_in(nodes_of(source), "kvstore/api.py"))


def test_the_walker_resolves_relative_imports_of_the_linked_folders():
    assert "kvstore.kernels.module" in set(imports_in(nodes_of("from .module import load"), "kernels/pack.py"))


def test_kernels_import_only_arrays_compilers_and_the_standard_library():
    allowed = {"cupy", "cupyx", "llvmlite", "numpy", "torch", *sys.stdlib_module_names}
    wrong = [
        f"{path}: {name}"
        for path in python_files("kernels")
        for name in sorted(imports_of(path))
        if name.split(".")[0] not in allowed and not below(name, "kvstore.kernels") and name != "kvstore"
    ]
    assert wrong == []


def test_kvstore_imports_neither_ray_nor_cupy():
    paths = python_files("kvstore")
    assert offences(paths, "cupy", "cupyx") == []
    assert offences([path for path in paths if not path.startswith(SERVE)], "ray") == []


def test_of_ray_an_integration_imports_serve_alone():
    names = {name for path in python_files(SERVE) for name in imports_of(path) if below(name, "ray")}
    assert {name for name in names if not below(name, "ray.serve", "ray.llm")} <= {"ray"}  # from ray import serve


def test_only_the_public_face_looks_up_to_the_actors():
    inside = [path for path in python_files("kvstore") if path not in FACE]
    assert offences(inside, "kvstore.actors") == []


@pytest.mark.parametrize(
    ("name", "also"),
    [
        # Tokenizers are transformers', and so are the configs of vLLM's models.
        ("transformers", {f"{SERVE}/prompts.py", "kvstore/integrations/vllm/identity.py"}),
        ("vllm", {f"{SERVE}/prompts.py"}),  # Prompts are read as engines do.
        ("ray.serve", set()),
    ],
)
def test_a_framework_is_imported_by_its_integration_only(name, also):
    inside = {*python_files(f"kvstore/integrations/{name.rpartition('.')[2]}"), *also}
    assert offences(sorted(inside), name) != []
    assert all(offences([path], name) for path in also)
    assert offences([path for path in python_files("kvstore", "actors", "kernels") if path not in inside], name) == []


def test_the_parts_of_the_router_need_neither_ray_serve_nor_vllm_nor_torch():
    parts = [path for path in python_files(SERVE) if not offences([path], "ray")]
    names = [".".join(Path(path).with_suffix("").parts) for path in parts if not path.endswith("__init__.py")]
    assert len(names) > 5
    loaded = modules_after(f"import {', '.join(names)}")
    assert {name for name in loaded if below(name, "ray.serve", "ray.llm", "vllm", "torch", "transformers")} == set()


def test_nothing_but_integrations_imports_integrations():
    product = python_files("kvstore", "actors", "kernels")
    outside = [path for path in product if not path.startswith("kvstore/integrations/")]
    assert offences(outside, "kvstore.integrations") == []


def test_integrations_use_the_public_side_of_the_store():
    paths = python_files("kvstore/integrations")
    inside = ("bench", "handoff", "memory", "mover", "node", "pool", "remote", "replay", "rpc", "tools")
    assert offences(paths, *(f"kvstore.{room}" for room in inside)) == []


def test_nothing_imports_examples_tests_or_benchmarks():
    product = python_files("kvstore", "actors", "kernels")
    assert offences(product, "examples", "tests", "benchmarks") == []


def test_one_file_imports_nixl():
    paths = python_files("kvstore", "actors", "kernels", "examples", "benchmarks", "scripts")
    users = {path for path in paths if any(below(name, *NIXL_PACKAGES) for name in imports_of(path))}
    assert users == {NIXL_FILE}


def test_nobody_uses_the_bare_names_of_the_top_folders():
    paths = python_files("kvstore", "actors", "kernels", "examples", "benchmarks", "tests")
    assert offences(paths, "actors", "kernels") == []


def test_the_links_are_links_and_kernels_is_no_regular_package():
    for name in ("actors", "kernels"):
        assert os.readlink(ROOT / "kvstore" / name) == f"../{name}"
        assert not (ROOT / name).is_symlink()
    assert (ROOT / "actors" / "__init__.py").is_file()
    # A kernels/__init__.py at the root of a checkout would hide Hugging Face's package of that name.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_import_kvstore_is_light():
    loaded = {name.split(".")[0] for name in modules_after("import kvstore")}
    assert loaded.isdisjoint({"torch", "ray", "cupy", "transformers", "vllm", *NIXL_PACKAGES})


@pytest.mark.parametrize("name", ["actors.cluster", "actors.node_store", "actors.plain_nodes", "cli"])
def test_only_processes_with_an_engine_wait_for_torch(name):
    loaded = {name.split(".")[0] for name in modules_after(f"import kvstore.{name}")}
    assert loaded.isdisjoint({"torch", "transformers", "vllm"})


def test_no_module_is_loaded_twice_under_a_bare_name():
    loaded = modules_after("import kvstore, kvstore.actors, kvstore.errors")
    assert loaded.isdisjoint({"actors", "kernels"})


def docstrings_of(nodes: Iterable[ast.AST]) -> set[int]:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, holders) and node.body and isinstance(node.body[0], ast.Expr)
    }


def stop_calls(nodes: list[ast.AST]) -> list[int]:
    """Lines with a string, or neighbouring strings of a list or call, that spell the forbidden command."""
    docstrings = docstrings_of(nodes)
    lines = []
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words = node.value
        elif isinstance(node, ast.List | ast.Tuple | ast.Call):
            items = node.args if isinstance(node, ast.Call) else node.elts
            words = " ".join(item.value for item in items if is_text(item))
        else:
            continue
        if STOP in " ".join(words.split()):
            lines.append(node.lineno)
    return lines


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_the_stop_finder_finds():
    assert stop_calls(nodes_of(f"run('{STOP} --force')")) == [1, 1]
    assert stop_calls(nodes_of(f"run({STOP.split()!r})")) == [1]
    assert stop_calls(nodes_of(f"def f():\n    '''Never {STOP}.'''")) == []


def test_nothing_runs_the_command_that_ends_every_ray_on_the_machine():
    python = python_files("kvstore", "actors", "kernels", "examples", "benchmarks", "scripts")
    python += [path for path in python_files("tests") if path != "tests/test_floors.py"]
    found = [path for path in python if facts_of(path)[1]]
    others = [ROOT / "Makefile", ROOT / "cluster.yaml", ROOT / ".ci/run", *ROOT.glob("*/*.sh")]
    for path in others:
        lines = path.read_text(encoding="utf-8").splitlines()
        if any(STOP in line and not line.lstrip().startswith("#") for line in lines):
            found.append(str(path.relative_to(ROOT)))
    assert found == []
