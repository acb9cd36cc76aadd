"""What the modules of a model are: their classes, their plain settings, and the source of classes of a user's own.

A config says how a model was to be built. It may be edited afterwards, and modules may be replaced; what runs is them.
"""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from types import FunctionType
from typing import Any

import torch

from kvstore.errors import UnsupportedModel

_NOT_OF_KV = {"training", "gradient_checkpointing", "name_or_path", "loss_type", "max_seq_len_cached"}
"""Settings of modules that say where a model came from or how it is trained, or that change while it runs."""

_KNOWN = ("torch", "transformers", "builtins", "typing", "abc")
"""Packages whose classes are told by their names: they come with a version, and users do not write them."""

_PLAIN = (int, float, str, bool, type(None))


def modules_digest(model: Any) -> str:
    """Return SHA-256, in hex, over the name, class and plain settings of each module, by each of its names."""
    tree = [
        (name, name_of(type(module)), sorted(_settings_of(module).items()))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    return sha256(json.dumps(tree).encode()).hexdigest()


def sources_of(model: Any) -> dict[str, str]:
    """Return digests of the source of all classes of modules that are neither of torch nor of transformers.

    Two programs may each have a class of one name, with another `forward`.

    Args:
        model: whose modules they are.

    Raises:
        UnsupportedModel: there is no source that tells a class from others of its name; pass model_id.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    found = {}
    for kind in kinds:
        if kind.__module__.split(".")[0] in _KNOWN:
            continue
        digest = _source_digest(kind)
        if digest is None:
            raise UnsupportedModel(
                f"wanted classes whose source can be read, got {name_of(kind)} without one that says all (it has no "
                "file, another class of its name is in it, or it uses objects of the function in which it is defined), "
                "so that another class of that name could not be told from it; pass model_id= with a name that only "
                "this model has, code and weights"
            )
        found[name_of(kind)] = digest
    return found


@dataclass(frozen=True, slots=True)
class _Mark:
    """A module as it was.

    Args:
        module: weak, so that it can be freed; no other is taken for it while this is held.
        kind: its class.
        children: names of the modules in it.
        num_attributes: of all kinds.
        names: of its plain settings.
        values: of these.
    """

    module: weakref.ref[torch.nn.Module]
    kind: type
    children: tuple[str, ...]
    num_attributes: int
    names: tuple[str, ...]
    values: tuple[object, ...]

    def is_of(self, module: torch.nn.Module) -> bool:
        held = vars(module)
        return (
            self.module() is module
            and type(module) is self.kind
            and len(held) == self.num_attributes
            and tuple(module._modules) == self.children
            and tuple(map(held.get, self.names)) == self.values
        )


class ModuleMarks:
    """What the modules of a model were like when it was wrapped.

    Args:
        model: which is not kept alive.
    """

    def __init__(self, model: Any) -> None:
        self._digest, self._marks = modules_digest(model), _marks_of(model)

    def are_of(self, model: Any) -> bool:
        """Whether all modules are the same ones, or others that are like them."""
        modules = list(each_module(model))
        if len(modules) == len(self._marks) and all(
            mark.is_of(module) for mark, module in zip(self._marks, modules, strict=True)
        ):
            return True
        # It takes longer, and is seldom: a module has one more attribute, or was replaced by an equal one.
        if modules_digest(model) != self._digest:
            return False
        self._marks = _marks_of(model)
        return True


def _marks_of(model: Any) -> list[_Mark]:
    found = []
    for module in each_module(model):
        settings = _settings_of(module)
        children, num_attributes = tuple(module._modules), len(vars(module))
        found.append(
            _Mark(
                weakref.ref(module), type(module), children, num_attributes, tuple(settings), tuple(settings.values())
            )
        )
    return found


def each_module(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and all in it, as often as they have names."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from each_module(child)


def _settings_of(module: torch.nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if name[0] != "_" and name not in _NOT_OF_KV and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def name_of(kind: type) -> str:
    """Return the name of a class, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _source_digest(kind: type) -> str | None:
    """Return a digest of a class's source and of the values that it has from the function around it, if there are."""
    try:
        lines, first = inspect.getsourcelines(kind)
        path = inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return None
    outside = []
    for name, value in sorted(vars(kind).items()):
        given = getattr(value, "fget", None) or getattr(value, "__func__", value)
        function = inspect.unwrap(given) if callable(given) else None
        if not isinstance(function, FunctionType) or function.__qualname__ != f"{kind.__qualname__}.{name}":
            continue
        code = function.__code__
        # Where a file has two classes of a name, Python may find the source of the other one.
        if code.co_filename == path and not first <= code.co_firstlineno < first + len(lines):
            return None
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if variable != "__class__":
                try:
                    held = cell.cell_contents
                except ValueError:  # It is set later.
                    return None
                if not _is_plain(held):
                    return None
                outside.append((name, variable, held))
    return sha256(json.dumps([lines, outside]).encode()).hexdigest()
