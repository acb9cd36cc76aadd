"""The rooms of the package: who may import whom, how many modules a room has, and that nothing goes in circles.

Imports inside functions count like those at the top. docs/adr/0024-rooms.md says why.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvstore"
#: Modules at the root of the package, and its rooms, from the lowest to the highest. Each imports only what is below.
FLOORS = (
    "errors", "bounds", "quotas", "config", "kernel_errors", "kernels", "runtime", "blocks", "rpc", "memory", "pool",
    "disk", "engine", "paged", "mover", "tools", "remote", "handoff", "node", "client", "actors", "api", "integrations",
    "bench", "replay", "actors.bench", "cli",
)  # fmt: skip
#: Two columns that never import each other: what runs in a worker's process, and what runs in the store's.
WORKER, STORE = {"engine", "paged", "client"}, {"pool", "disk", "mover", "remote", "handoff", "node"}
#: Folders that are rooms; actors and kernels are links (docs/adr/0001-packaging.md).
ROOMS = WORKER | STORE | {"runtime", "blocks", "rpc", "memory", "tools", "bench", "replay"}
MOST_MODULES = 14
#: Of kernels: nearly each is one .cu file's launcher or reference, and dividing them would part what is read together.
MOST_KERNELS = 22


def find_modules() -> dict[str, Path]:
    """Every module by its name below kvstore, without packages."""
    # Links are entered by name: what rglob makes of them depends on the version of Python.
    folders = [path for path in PACKAGE.iterdir() if path.is_dir()]
    paths = {*PACKAGE.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))}
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in sorted(paths)
        if path.name != "__init__.py"
    }


MODULES = find_modules()


def room_of(module: str) -> str:
    """The floor that a module stands on: its name at the root, and its room elsewhere."""
    parts = module.split(".")
    return "actors.bench" if parts[:2] == ["actors", "bench"] else parts[0]


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def named(node: ast.AST) -> Iterator[str]:
    """What an import names below kvstore: modules, and "" for the package itself."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] == "kvstore":
                yield alias.name[len("kvstore.") :]
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kvstore":
        base = (node.module or "")[len("kvstore.") :]
        for alias in node.names:
            inner = f"{base}.{alias.name}".removeprefix(".")
            yield inner if inner in MODULES else base


def imports_of(tree: ast.AST, for_types: bool = False) -> Iterator[tuple[str, bool]]:
    """Every (module, whether only type checkers see it); both count."""
    for node in ast.iter_child_nodes(tree):
        yield from ((name, for_types) for name in named(node))
        yield from imports_of(node, for_types or is_for_types(node))


@functools.cache
def edges(module: str) -> frozenset[tuple[str, bool]]:
    return frozenset(imports_of(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


def imports_between_rooms() -> Iterator[tuple[str, str, str, str]]:
    for module in MODULES:
        for target, _ in sorted(edges(module)):
            if target and room_of(target) != room_of(module):  # The package itself imports nothing.
                yield module, target, room_of(module), room_of(target)


def circles() -> list[set[str]]:
    """Groups of modules each of which reaches all others of its group."""
    graph = {module: {target for target, _ in edges(module) if target in MODULES} for module in MODULES}

    def reached_from(module: str) -> set[str]:
        found: set[str] = set()
        todo = list(graph[module])
        while todo:
            target = todo.pop()
            if target not in found:
                found.add(target)
                todo.extend(graph[target])
        return found

    reached = {module: reached_from(module) for module in MODULES}
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in MODULES
        if module in reached[module]
    }
    return sorted((set(group) for group in groups), key=min)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from kvstore.pool.pool import Pool", {("pool.pool", False)}),
        ("from kvstore.pool import pool, slots", {("pool.pool", False), ("pool.slots", False)}),
        ("from kvstore import errors, __version__", {("errors", False), ("", False)}),
        ("def f():\n    import kvstore.node.core", {("node.core", False)}),
        ("if TYPE_CHECKING:\n    from kvstore.node.core import NodeCore", {("node.core", True)}),
        ("import kvstore", {("", False)}),
        ("import os", set()),
    ],
)
def test_the_walker_sees_every_kind_of_import(source, found):
    assert set(imports_of(ast.parse(source))) == found


def test_every_module_stands_on_a_floor():
    assert {room_of(module) for module in MODULES} == set(FLOORS)


def test_no_room_imports_what_is_above_it():
    wrong = [
        f"{module} -> {target}"
        for module, target, room, other in imports_between_rooms()
        if FLOORS.index(room) < FLOORS.index(other)
    ]
    assert wrong == []


def test_worker_and_store_do_not_import_each_other():
    wrong = [
        f"{module} -> {target}"
        for module, target, room, other in imports_between_rooms()
        if (room in WORKER and other in STORE) or (room in STORE and other in WORKER)
    ]
    assert wrong == []


def test_nothing_goes_in_circles_when_it_runs():
    assert circles() == []


def test_no_room_has_too_many_modules():
    sizes: dict[str, int] = {}
    for module in MODULES:
        room = module.rpartition(".")[0]
        sizes[room] = sizes.get(room, 0) + 1
    most = dict.fromkeys(sizes, MOST_MODULES) | {"kernels": MOST_KERNELS}
    assert {room: size for room, size in sizes.items() if size > most[room]} == {}


def test_the_sides_of_a_connector_do_not_import_each_other():
    sides = {f"integrations.vllm.{side}." for side in ("scheduler_side", "worker_side")}
    for module in MODULES:
        for side in sides:
            if module.startswith(side):
                assert not [target for target, _ in edges(module) if target.startswith(tuple(sides - {side}))]


@pytest.mark.parametrize("room", sorted(path.name for path in PACKAGE.iterdir() if path.name in ROOMS))
def test_a_room_opens_with_words_alone(room):
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
    words = ast.get_docstring(tree) or ""
    assert len(tree.body) == 1
    assert [line.partition(": ")[0] for line in words.splitlines()[2:] if not line.startswith(" ")] == [
        "In",
        "Out",
        "Floor",
    ]


def test_the_package_imports_nothing_of_its_own_when_it_is_imported():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assert {name for name, for_types in imports_of(tree) if not for_types} == set()
