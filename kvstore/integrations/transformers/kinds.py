"""Kinds of values in a program's code that can be identified, and what each of them holds."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from operator import attrgetter, is_
from typing import Any

import torch

from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers.tensors import tensor_digest

_KNOWN = ("torch", "transformers", "builtins", "typing", "abc")
"""Packages whose classes are identified by name: they come with a version, and users do not write them."""

KNOWN_VALUES = (*_KNOWN, "numpy", "math", "cmath", "functools", "collections", "operator", "enum", "types", "einops")
"""Packages whose functions, classes and modules are identified by name where a program holds them."""

AS_JSON = (int, float, str, bool, type(None))
BY_REPR = (
    complex, bytes, range, type(...), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
SEQUENCES = (list, tuple, torch.Size)
SETS = (set, frozenset)
MAPPINGS = (dict, OrderedDict, types.MappingProxyType)

NUMBERS = "biufcSUmM"
"""Kinds of NumPy dtypes whose bytes are all of their content; objects and records hold other values."""

IN_C = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip

WRAPPERS: Mapping[type, tuple[str, ...]] = {
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    functools._lru_cache_wrapper: ("__wrapped__",),
    contextlib._GeneratorContextManager: ("func", "args", "kwds"),
}
"""Types that make methods and properties of functions, or fix arguments; with the attributes that define them."""

CAN_CHANGE = (functools.partialmethod, functools.cached_property)

_NOT_OF_CODE = {
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__abstractmethods__",
    "_abc_impl", "__orig_bases__", "__parameters__", "__slotnames__", "__dataclass_fields__", "__dataclass_params__",
    "__match_args__", "_auto_class", "_can_set_attn_implementation_cached_value",
    "_can_set_experts_implementation_cached_value",
}  # fmt: skip
"""Attributes of a class for readers and tools; some of them appear only when they are asked for."""

_NOT_OF_MODULE = _NOT_OF_CODE | {"__init__", "__setstate__", "___needs_generation_tag_patch"}
"""`_NOT_OF_CODE`, and attributes of torch.nn.Module that torch.compile replaces to number new modules."""

OF_LIBRARIES = (
    "torch", "transformers", "numpy", "typing", "_thread", "threading", "logging", "weakref", "_contextvars", "re",
    "pybind11_builtins",
)  # fmt: skip
"""Packages of objects that code of a library holds; such objects are identified by their classes."""

_NUM_READ = 1 << 16
"""Largest tensor, in elements, whose content is compared before each load and save; not for weights and buffers."""

NAMED_BY_TORCH = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""Types of torch's operators; a program's own operators may have the same name and other code elsewhere."""

EMPTY = object()
"""Placeholder for a variable of the function around that is not set yet."""


def name_of(kind: type) -> str:
    """Return the name of a class, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_known(module: object, packages: tuple[str, ...] = _KNOWN) -> bool:
    """Whether a module is of one of these packages."""
    return str(module).split(".")[0] in packages


OF_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__")


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two rows hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def pairs_of(value: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return keys and values."""
    return (*value.keys(), *value.values())


def attributes_of(kind: type) -> list[tuple[str, Any]]:
    """Return a class's own attributes that code may read or run."""
    left_out = _NOT_OF_MODULE if kind is torch.nn.Module else _NOT_OF_CODE
    return [pair for pair in vars(kind).items() if pair[0] not in left_out]


def held_by_class(kind: type) -> list[Any]:
    """Return the objects that change what a class does if they are replaced."""
    return [type(kind), kind.__mro__, *(value for _, value in attributes_of(kind))]


def held_by_object(value: Any) -> list[Any]:
    """Return the values in `vars`, without the previous state that torch's contexts keep while they are on."""
    return [each for name, each in vars(value).items() if not name.startswith("prev")]


def held_by_cells(cells: tuple[types.CellType, ...]) -> list[Any]:
    """Return the values of a function's cells; EMPTY for a cell without a value yet."""
    found = []
    for cell in cells:
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(EMPTY)
    return found


def bytes_of_array(value: Any) -> tuple[object, ...]:
    """Return a digest, interned: states are compared by identity."""
    return (sys.intern(sha256(value.tobytes()).hexdigest()),)


def state_of_tensor(value: torch.Tensor) -> tuple[object, ...]:
    """Return a text that shows changes: count of writes, and content of small or address of large tensors."""
    version = 0 if value.is_inference() else value._version
    try:
        state = tensor_digest("", value) if value.numel() <= _NUM_READ else str(value.data_ptr())
    except (UnsupportedModel, NotImplementedError, RuntimeError):  # It may have no address, or no bytes.
        state = ""
    return (sys.intern(f"{version} {value.dtype} {tuple(value.shape)} {state}"),)


def settings_of_config(value: Any) -> tuple[object, ...]:
    """Return class and settings of a config; equal ones are the same objects."""
    return sys.intern(name_of(type(value))), sys.intern(value.to_json_string(use_diff=False))


def is_of_library(kind: type) -> bool:
    """Whether a library has a class under its name; classes made by its tools, as by dataclasses, only carry it."""
    found: Any = sys.modules.get(kind.__module__) if is_known(kind.__module__, KNOWN_VALUES) else None
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def is_of_python(kind: type) -> bool:
    """Whether objects of a class hold nothing but what `vars` shows."""
    if issubclass(kind, torch.nn.Module):
        return False  # Those of the model are covered; others may hold weights.
    return kind.__new__ is object.__new__ and not any(vars(each).get("__slots__") for each in kind.__mro__)
