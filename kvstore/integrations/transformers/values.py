"""Descriptions of values that a program has put into a model: data by content, code by what it does.

Every value that code may read counts or is refused: a value of an unknown kind must not be ignored silently.
"""

from __future__ import annotations

import json
import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from hashlib import sha256
from itertools import chain
from operator import is_
from typing import Any

import numpy
import torch
from transformers import PreTrainedConfig

from kvstore.integrations.transformers import kinds
from kvstore.integrations.transformers.tensors import tensor_digest


class UnclearError(Exception):
    """A value is of no known kind, so its effect in a program is not known.

    Args:
        where: name of the value's holder.
        what: description of the value.
    """


def digest_of(described: Any) -> str:
    """Return the SHA-256, in hex, of a description by `Reader.read`."""
    return sha256(json.dumps(described).encode()).hexdigest()


def refuse(_: object, where: str, what: str) -> Any:
    """Refuse an unclear value; this is the rule when an id is made from the values."""
    raise UnclearError(where, what)


class Reader:
    """Describes values as JSON, and sees whether values that it read were replaced since.

    Args:
        covered: names of modules, parameters and buffers, by id(): the model's id has them already.
        unclear: describes a value of no known kind; takes the value, the name of its holder, and its kind.
    """

    def __init__(self, covered: Mapping[int, str], unclear: Callable[[object, str, str], Any] = refuse) -> None:
        self._covered, self._unclear = covered, unclear
        #: Values being read, by id(): values may hold each other.
        self._open = dict[int, int]()
        #: Descriptions of the values read, and these values: they are kept alive so that no id() is used again.
        self._known, self._kept = dict[tuple[int, bool], Any](), list[Any]()
        self._functions = list[types.FunctionType]()
        self._parts = list[tuple[Callable[[Any], Sequence[object]], Any, Sequence[object]]]()
        self._held = list[object]()

    def are_same(self) -> bool:
        """Whether all values that were read are still the same objects."""
        return all(map(is_, chain.from_iterable(map(kinds.OF_FUNCTION, self._functions)), self._held)) and all(
            kinds.are_same(parts(owner), held) for parts, owner, held in self._parts
        )

    def read(self, value: Any, where: str, *, of_library: bool = False) -> Any:
        """Return the description of a value, as JSON has it.

        Args:
            value: of any kind.
            where: name of the value's holder, for error messages.
            of_library: whether code of a library holds the value; such code has its own objects.

        Raises:
            UnclearError: the value is unclear, and unclear values are refused.
        """
        if type(value) in kinds.AS_JSON:
            return value
        if id(value) in self._open:
            return ["itself", self._open[id(value)]]
        if (key := (id(value), of_library)) not in self._known:
            self._open[id(value)] = len(self._open)
            self._kept.append(value)
            try:
                self._known[key] = self._read(value, where, of_library)
            except UnclearError:
                raise
            # The program's own code may run here, such as a __bool__ or a __len__, and may fail in any way.
            except Exception as error:  # noqa: BLE001
                self._known[key] = self._unclear(value, where, f"{_kind(value)}, with {type(error).__name__}")
            finally:
                del self._open[id(value)]
        return self._known[key]

    def read_class(self, kind: type, where: str) -> Any:
        """Return the description of a class's own methods and other attributes.

        Raises:
            UnclearError: an attribute is unclear, and unclear values are refused.
        """
        self._mark(kinds.held_by_class, kind)
        is_library = kinds.is_known(kind.__module__)
        meta = type(kind)
        return [
            kinds.name_of(kind),
            [] if kinds.is_known(meta.__module__, kinds.KNOWN_VALUES) else self.read(meta, f"the class of {where}"),
            [
                (name, self.read(value, f"{where}.{name}", of_library=is_library))
                for name, value in sorted(kinds.attributes_of(kind), key=lambda pair: pair[0])
            ],
        ]

    def _mark(self, parts: Callable[[Any], Sequence[object]], owner: Any) -> None:
        self._parts.append((parts, owner, parts(owner)))

    def _read(self, value: Any, where: str, of_library: bool) -> Any:
        kind = type(value)
        if id(value) in self._covered:
            return ["of the model", self._covered[id(value)]]
        if isinstance(value, Enum):
            if kinds.is_of_library(kind):
                return ["member", kinds.name_of(kind), value.name]
            methods = [
                (name, self.read(each, f"{kinds.name_of(kind)}.{name}"))
                for name, each in sorted(vars(kind).items())
                if isinstance(each, types.FunctionType) or type(each) in kinds.WRAPPERS
            ]
            return ["member", kinds.name_of(kind), value.name, self.read(value.value, f"{where}.value"), methods]
        if kind in kinds.BY_REPR:
            return [kinds.name_of(kind), repr(value)]
        if isinstance(value, PreTrainedConfig):
            self._mark(kinds.settings_of_config, value)
            return ["config", *kinds.settings_of_config(value)]
        if kind in kinds.SEQUENCES:
            if kind is list:
                self._mark(tuple, value)
            found = [self.read(each, f"{where}[{at}]", of_library=of_library) for at, each in enumerate(value)]
            return [kinds.name_of(kind), found]
        if kind in kinds.SETS:
            if kind is set:
                self._mark(tuple, value)
            # The order of a set of texts differs from process to process.
            return [
                kinds.name_of(kind),
                sorted(json.dumps(self.read(each, where, of_library=of_library)) for each in value),
            ]
        if kind in kinds.MAPPINGS:
            self._mark(kinds.pairs_of, value)
            return [kinds.name_of(kind), [
                [self.read(key, f"a key of {where}", of_library=of_library),
                 self.read(each, f"{where}[{key!s:.40}]", of_library=of_library)]
                for key, each in value.items()
            ]]  # fmt: skip
        if isinstance(value, types.FunctionType):
            return self._function(value, where)
        if kind in kinds.WRAPPERS:
            names = kinds.WRAPPERS[kind]
            if kind in kinds.CAN_CHANGE:
                self._mark(kinds.held_by_object, value)
            return [kinds.name_of(kind), [
                self.read(getattr(value, name), f"{where} ({name})", of_library=of_library) for name in names
            ]]  # fmt: skip
        if isinstance(value, type):
            if kinds.is_of_library(value):
                return ["class", kinds.name_of(value)]
            return ["class", self.read_class(value, where), [self.read(each, where) for each in value.__mro__[1:]]]
        if isinstance(value, types.ModuleType) and kinds.is_known(value.__name__, kinds.KNOWN_VALUES):
            return ["module", value.__name__]
        if (found := self._array(value, kind, where)) is not None:
            return found
        if kind in kinds.IN_C:
            return self._in_c(value, where, of_library)
        if isinstance(value, numpy.ufunc) and getattr(numpy, name := str(value.__name__), None) is value:
            return ["numpy", name]
        if kind is logging.Logger or (kind in kinds.NAMED_BY_TORCH and str(value).startswith("aten.")):
            return [kinds.name_of(kind), "" if kind is logging.Logger else str(value)]  # Loggers change no KV.
        if kinds.is_known(kind.__module__) and kinds.is_of_library(kind) and kinds.is_of_python(kind):
            return self._object(value, where)
        if kind is weakref.ref:
            return ["weak", self.read(value(), where, of_library=of_library)]
        if of_library and kinds.is_known(kind.__module__, kinds.OF_LIBRARIES) and not isinstance(value, torch.Tensor):
            return ["object", kinds.name_of(kind)]
        return self._unclear(value, where, _kind(value))

    def _array(self, value: Any, kind: type, where: str) -> Any:
        """Return the description of a NumPy value or a tensor; None for anything else."""
        if isinstance(value, numpy.generic | numpy.ndarray | numpy.dtype):
            dtype = value if isinstance(value, numpy.dtype) else value.dtype
            is_plain = kind.__module__.split(".")[0] == "numpy" and dtype.kind in kinds.NUMBERS
            is_derived = isinstance(value, numpy.ndarray) and kind is not numpy.ndarray
            if not is_plain or is_derived or dtype.char in "gG":
                return self._unclear(value, where, f"{_kind(value)} of {dtype}")
            if isinstance(value, numpy.dtype):
                return ["dtype", dtype.str]
            if isinstance(value, numpy.ndarray):
                self._mark(kinds.bytes_of_array, value)
            return [kinds.name_of(kind), dtype.str, list(value.shape), sha256(value.tobytes()).hexdigest()]
        if isinstance(value, torch.Tensor):
            if self._unclear is refuse:
                return ["tensor", tensor_digest(where, value)]
            # Not by content: packed weights of a model with a model_id may be of any size.
            self._mark(kinds.state_of_tensor, value)
            return self._unclear(value, where, _kind(value))
        return None

    def _object(self, value: Any, where: str) -> Any:
        """Return the description of a library's object: its class, and all that it holds."""
        self._mark(kinds.held_by_object, value)
        return [kinds.name_of(type(value)), [
            (name, self.read(each, f"{where}.{name}", of_library=True))
            for name, each in sorted(vars(value).items())
            if not name.startswith("prev")  # torch's contexts keep the previous state there.
        ]]  # fmt: skip

    def _in_c(self, value: Any, where: str, of_library: bool) -> Any:
        if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType) and not of_library:
            return self._unclear(value, where, "a slot, whose values no digest sees")
        owner = getattr(value, "__self__", None) or getattr(value, "__objclass__", None)
        # Functions of pybind11 have their own record there.
        is_record = type(owner).__module__ == "pybind11_builtins"
        is_bound = not (owner is None or is_record or isinstance(owner, types.ModuleType | type))
        bound = [self.read(owner, where, of_library=of_library)] if is_bound else []
        whose = type(owner) if is_bound else owner
        module = (
            getattr(value, "__module__", None) or getattr(whose, "__module__", None) or getattr(whose, "__name__", "")
        )
        if not kinds.is_known(module, kinds.KNOWN_VALUES):
            return self._unclear(value, where, f"a function of {module} that is not of Python")
        return [kinds.name_of(type(value)), str(module), value.__qualname__, getattr(whose, "__qualname__", ""), bound]

    def _function(self, function: types.FunctionType, where: str) -> Any:
        """Return the description of a function: its code, its defaults, and variables of the function around it."""
        self._functions.append(function)
        self._held += kinds.OF_FUNCTION(function)
        code, module = function.__code__, function.__globals__.get("__name__")
        # Not by __module__, which a decorator copies from the function that it wraps.
        is_library = kinds.is_known(module)
        if is_library and code.co_filename == function.__globals__.get("__file__"):
            # Several lambdas, or functions within others, may have the same name.
            body = [module, code.co_qualname, code.co_firstlineno if "<" in code.co_qualname else 0]
        else:
            body = self._code(code)
        defaults = function.__defaults__, function.__kwdefaults__
        held = [self.read(each, f"a default of {where}", of_library=is_library) if each else [] for each in defaults]
        cells = function.__closure__ or ()
        if cells:
            self._mark(kinds.held_by_cells, cells)
        for variable, value in zip(code.co_freevars, kinds.held_by_cells(cells), strict=True):
            within = f"{variable} around {where}"
            if value is kinds.EMPTY:
                held.append(self._unclear(function, within, "a variable that is set later"))
            else:
                held.append([variable, self.read(value, within, of_library=is_library)])
        return ["function", body, held]

    def _code(self, code: types.CodeType) -> list[Any]:
        return [
            code.co_code.hex(), code.co_exceptiontable.hex(), code.co_flags, list(code.co_names),
            [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount],
            [list(code.co_varnames), list(code.co_freevars), list(code.co_cellvars)],
            [
                self._code(each) if isinstance(each, types.CodeType) else self.read(each, code.co_name)
                for each in code.co_consts
            ],
        ]  # fmt: skip


def _kind(value: object) -> str:
    return f"an object of {kinds.name_of(type(value))}"
