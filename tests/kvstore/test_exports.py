import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore


def type_checking_names() -> set[str]:
    tree = ast.parse(Path(kvstore.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    return {alias.asname or alias.name for node in block.body for alias in node.names}


def test_all_is_what_is_public():
    assert set(kvstore.__all__) == type_checking_names() | {"__version__"}
    assert kvstore.__all__ == sorted(set(kvstore.__all__))
    assert dir(kvstore) == sorted(kvstore.__all__)


@pytest.mark.parametrize("name", kvstore.__all__)
def test_every_name_is_there(name):
    value = getattr(kvstore, name)
    if isinstance(value, type):
        assert value.__name__ == name
    if name == "errors":
        assert value.KVStoreError is kvstore.KVStoreError
    elif name != "__version__":
        assert value.__module__.startswith("kvstore.")
        assert value.__doc__


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="nothing_like_this"):
        kvstore.nothing_like_this  # noqa: B018
    assert not hasattr(kvstore, "ray")


def test_star_import_gives_exactly_the_public_names():
    found: dict[str, object] = {}
    exec("from kvstore import *", found)
    assert set(found) - {"__builtins__"} == set(kvstore.__all__)


def test_importing_needs_neither_ray_nor_torch_nor_nixl():
    code = (
        "import sys, kvstore; dir(kvstore); kvstore.StoreConfig, kvstore.Namespace, kvstore.LoadResult;"
        "bad = {'ray', 'torch', 'cupy'} & set(sys.modules) | {m for m in sys.modules if m.startswith('nixl')};"
        "sys.exit(' '.join(sorted(bad)) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
