"""Small changes to the source of a module, made while it is imported; the files stay as they are."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path


class DoesNotApply(Exception):
    """The text to change is not there, or not as often as it should be: the code has moved on."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Text of a module and what takes its place.

    Args:
        module: such as `kvstore.pool.pool`.
        old: the text; indentation counts.
        new: what takes its place.
        everywhere: change each of many; otherwise the text has to be there exactly once.
    """

    module: str
    old: str
    new: str
    everywhere: bool = False

    def apply(self, source: str) -> str:
        """Return the changed source.

        Raises:
            DoesNotApply: the text is not there once (or at all, where `everywhere`).
        """
        count = source.count(self.old)
        if count == 0 or (count > 1 and not self.everywhere):
            raise DoesNotApply(f"{self.module}: found {count} times: {self.old.strip().splitlines()[0]!r}")
        return source.replace(self.old, self.new)


def check(patches: Sequence[Patch], root: Path) -> None:
    """Try patches on the files below `root` without importing them.

    Raises:
        DoesNotApply: one of them does not fit.
    """
    sources: dict[str, str] = {}
    for patch in patches:
        if patch.module not in sources:
            sources[patch.module] = (root / (patch.module.replace(".", "/") + ".py")).read_text()
        sources[patch.module] = patch.apply(sources[patch.module])
    for module, source in sources.items():
        compile(source, module, "exec")


class _Loader(SourceFileLoader):
    patches: Sequence[Patch] = ()

    def get_code(self, fullname: str) -> types.CodeType:
        # Never from a .pyc file, and none is written.
        source = Path(self.path).read_text()
        for patch in self.patches:
            source = patch.apply(source)
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        mine = [patch for patch in self._patches if patch.module == fullname]
        if not mine:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        loader = _Loader(fullname, spec.origin)
        loader.patches = mine
        spec.loader = loader
        return spec


def install(patches: Sequence[Patch]) -> None:
    """Have this process import the changed modules, which must not have been imported yet."""
    imported = {patch.module for patch in patches} & set(sys.modules)
    assert not imported, f"already imported: {sorted(imported)}"
    sys.meta_path.insert(0, _Finder(patches))
