"""What the modules of a model are: their classes, their plain settings, and the source of classes of a user's own.

A config says how a model was to be built. It may be edited afterwards, and modules may be replaced; what runs is them.
"""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any

import numpy
import torch

from kvstore.errors import UnsupportedModel

_NOT_OF_KV = {"training", "gradient_checkpointing", "name_or_path", "loss_type", "max_seq_len_cached"}
"""Settings of modules that say where a model came from or how it is trained, or that change while it runs."""

_KNOWN = ("torch", "transformers", "builtins", "typing", "abc")
"""Packages whose classes are told by their names: they come with a version, and users do not write them."""

_PLAIN = (int, float, str, bool, type(None), torch.dtype, numpy.generic, Enum)


def modules_digest(model: Any) -> str:
    """Return SHA-256, in hex, over the name, class and plain settings of each module, by each of its names."""
    tree = [
        (name, name_of(type(module)), _code_of_graph(module), sorted(_settings_of(module).items()))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    return _digest(tree)


def _code_of_graph(module: torch.nn.Module) -> str:
    """Return the code of a module that torch.fx wrote: its class has the name of all of them."""
    return module.code if isinstance(module, torch.fx.GraphModule) else ""


def sources_of(model: Any) -> dict[str, list[str]]:
    """Return digests of the code of all classes that are neither of torch nor of transformers, by name of the module.

    Two programs may each have a class of one name, with another `forward`; and so may two modules of one model. Of
    classes of these libraries that counts which a program has put in the place of their own.

    Args:
        model: whose modules they are.

    Raises:
        UnsupportedModel: there is no source that tells a class from others of its name; pass model_id.
    """
    found, digests = dict[str, list[str]](), dict[type, str]()
    for name, module in model.named_modules(remove_duplicate=False):
        kinds = type(module).__mro__
        for kind in kinds:
            if kind not in digests:
                digests[kind] = _patches_digest(kind) if _is_known(kind.__module__) else _source_digest(kind)
        if own := [digests[kind] for kind in kinds if digests[kind]]:
            found[name] = own
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """A module as it was.

    Args:
        module: weak, so that it can be freed; no other is taken for it while this is held.
        kind: its class.
        children: names of the modules in it.
        num_attributes: of all kinds.
        names: of its plain settings.
        values: of these.
        others: names of its settings that are not plain.
        kinds: of these.
    """

    module: weakref.ref[torch.nn.Module]
    kind: type
    children: tuple[str, ...]
    num_attributes: int
    names: tuple[str, ...]
    values: tuple[object, ...]
    others: tuple[str, ...]
    kinds: tuple[type, ...]

    def is_of(self, module: torch.nn.Module) -> bool:
        held = vars(module)
        return (
            self.module() is module
            and type(module) is self.kind
            and len(held) == self.num_attributes
            and tuple(module._modules) == self.children
            and tuple(map(held.get, self.names)) == self.values
            and tuple(type(held.get(name)) for name in self.others) == self.kinds
        )


class ModuleMarks:
    """What the modules of a model were like when it was wrapped.

    Args:
        model: which is not kept alive.
    """

    def __init__(self, model: Any) -> None:
        self._digest, self._marks = modules_digest(model), _marks_of(model)
        kinds = {kind for module in model.modules() for kind in type(module).__mro__}
        self._functions = {kind: _functions_of(kind) for kind in kinds}

    def are_of(self, model: Any) -> bool:
        """Whether all modules are the same ones, or others that are like them, and no method of a class is another."""
        if any(_functions_of(kind) != functions for kind, functions in self._functions.items()):
            return False
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
        settings, held = _settings_of(module), vars(module)
        others = tuple(name for name in held if name[0] != "_" and name not in settings and name not in _NOT_OF_KV)
        found.append(
            _Mark(
                module=weakref.ref(module),
                kind=type(module),
                children=tuple(module._modules),
                num_attributes=len(held),
                names=tuple(settings),
                values=tuple(settings.values()),
                others=others,
                kinds=tuple(type(held[name]) for name in others),
            )
        )
    return found


def _functions_of(kind: type) -> dict[str, FunctionType]:
    """Return the methods of a class itself, but for those of Python, which tools may wrap for a moment."""
    return {name: each for name, each in vars(kind).items() if type(each) is FunctionType and name[:2] != "__"}


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
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _digest(fields: Any) -> str:
    return sha256(json.dumps(_as_json(fields)).encode()).hexdigest()


def _as_json(value: Any) -> Any:
    """Return plain values, in lists and tuples too, as JSON has them: numbers of NumPy with their kind, say."""
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return value if type(value) in (int, float, str, bool, type(None)) else f"{name_of(type(value))} {value!r}"


def name_of(kind: type) -> str:
    """Return the name of a class, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_known(module: str) -> bool:
    return module.split(".")[0] in _KNOWN


class _UnclearError(Exception):
    """There is code of which it cannot be told what it does."""


def _source_digest(kind: type) -> str:
    """Return a digest of a class's source, and of its code and plain values as they are now.

    The source alone would not do: its file may have been edited since, and has no values of a function around it.

    Raises:
        UnsupportedModel: it cannot be read, or does not say all.
    """
    try:
        lines, first = inspect.getsourcelines(kind)
        path, held = inspect.getsourcefile(kind), list[Any]()
        for name, value in _held_by(kind):
            if isinstance(value, FunctionType):
                code = inspect.unwrap(value).__code__
                is_own = value.__qualname__ == f"{kind.__qualname__}.{name}" and code.co_filename == path
                # Where a file has two classes of a name, Python may find the source of the other one.
                if is_own and not first <= code.co_firstlineno < first + len(lines):
                    raise _UnclearError
                held.append((name, _function(value, [])))
            elif _is_plain(value) and name[0] != "_":
                held.append((name, value))
    except (OSError, TypeError, _UnclearError):
        raise UnsupportedModel(
            f"wanted classes whose source can be read, got {name_of(kind)} without one that says all (it has no "
            "file, another class of its name is in it, or it uses objects of the function in which it is defined), "
            "so that another class of that name could not be told from it; pass model_id= with a name that only "
            "this model has, code and weights"
        ) from None
    return _digest([name_of(kind), lines, held])


def _patches_digest(kind: type) -> str:
    """Return a digest of what a program has put into a class of a library; empty where there is nothing.

    Raises:
        UnsupportedModel: it uses objects of the function in which it is defined.
    """
    held = list[Any]()
    for name, value in _held_by(kind):
        if isinstance(value, FunctionType) and not _is_of_library(value):
            try:
                held.append((name, _function(value, [])))
            except _UnclearError:
                raise UnsupportedModel(
                    f"wanted code that can be told from other code, got {name_of(kind)}.{name} in place of the "
                    f"library's, by {value.__globals__.get('__name__')}, with objects of the function around it; pass "
                    "model_id= with a name that only this model has, code and weights"
                ) from None
    return _digest([name_of(kind), held]) if held else ""


def _held_by(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class has itself, by name; functions without what makes methods and properties of them."""
    for name, value in sorted(vars(kind).items()):
        for attribute in ("fget", "__func__", "func"):
            given = getattr(value, attribute, None)
            value = given if isinstance(given, FunctionType) else value
        yield name, value


def _is_of_library(function: FunctionType) -> bool:
    # Not by __module__, which a decorator copies from the function that it wraps.
    return _is_known(str(function.__globals__.get("__name__")))


def _function(function: FunctionType, seen: list[FunctionType]) -> list[Any]:
    """Return what a function does: its code, plain defaults, and what it has from the function around it.

    Raises:
        _UnclearError: that are other objects than plain ones and functions, or they are set later.
    """
    if function in seen:
        return [seen.index(function)]
    seen.append(function)
    is_of_library = _is_of_library(function)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held = [value for value in defaults if _is_plain(value)]
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if variable == "__class__":
            continue
        try:
            value = cell.cell_contents
        except ValueError:
            raise _UnclearError from None
        if isinstance(value, FunctionType):
            held.append(_function(value, seen))
        elif _is_plain(value):
            held.append((variable, value))
        elif not is_of_library:
            raise _UnclearError
    return [function.__qualname__ if is_of_library else _code(function.__code__), held]


def _code(code: CodeType) -> list[Any]:
    constants = [_code(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def _constant(value: object) -> str:
    # The order of a set of texts is another one in each process.
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
