"""The identity of a model's KV: all of the model counts, but what is written here as harmless.

The source of a class is hashed as bytes and never understood. What cannot be told from others of its kind is refused.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as every_module
from transformers import PreTrainedConfig

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.errors import InvalidRequest, UnsupportedModel
from kvstore.integrations.transformers.cache.columns import layers_of, shape_of
from kvstore.integrations.transformers.supported import check_mode
from kvstore.integrations.transformers.tensors import is_plain, tensor_digest

logger = logging.getLogger(__name__)

_HARMLESS_IN_CONFIG = {
    # Where the config came from; the version that runs counts, not the one that wrote it.
    "_name_or_path", "_commit_hash", "_post_init_done", "architectures", "transformers_version", "model_type",
    # Names of a head's outputs, and of its kind.
    "id2label", "label2id", "problem_type",
    # What a call returns. `generate` decides by itself whether it uses a cache, and needs one here.
    "return_dict", "use_cache", "output_hidden_states",
    # `generate` sets another one for each decoded token, and sets it back.
    "_experts_implementation_internal",
}  # fmt: skip

_HARMLESS_IN_MODULES = {
    # Where the model came from, how it is loaded, shared out to devices, trained and compiled.
    "name_or_path", "hf_device_map", "_is_hf_initialized", "gradient_checkpointing", "loss_type", "_loss_function",
    "_weight_conversions", "_use_kernels",
    "_compiled_call", "_compiled_call_impl",
    # Settings of calls, and what a call feeds to the model: both are looked at in each call.
    "generation_config", "prepare_inputs_for_generation",
    # Notes of the last call, of its longest prompt and of how to take its hidden states.
    "_previous_max_cache_length", "max_seq_len_cached", "_output_capturing_hooks_installed", "_can_record_outputs",
    # Notes of Python on abstract classes.
    "_abc_impl",
    # They count on their own; training mode is refused.
} | set(vars(torch.nn.Module()))  # fmt: skip

_HARMLESS_METHODS = ("__init__", "__setstate__")
"""They ran when the model was made, and torch.compile puts others there to number new modules."""

_PLAIN = (int, float, str, bool, type(None))
_BY_TEXT = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, complex, bytes, range)

_NUM_SAMPLED = 16
"""Elements of each tensor that are compared, as torch does not count writes through `.data`."""


def kv_shape(model: Any, block_size: int) -> tuple[KVShape, torch.device]:
    """Return the shape of a model's blocks, and the device of their KV.

    Raises:
        UnsupportedModel: as for `layers_of` and `shape_of`.
    """
    layers = layers_of(model)
    return shape_of(layers, block_size), layers[0].keys.device


def namespace_of(model: Any, shape: KVShape, model_id: str | None, salt: bytes) -> Namespace:
    """Return the namespace of a model's blocks; arguments as for `identity_of` and `Namespace`."""
    weights, revision = identity_of(model, model_id)
    return Namespace(model=weights, revision=revision, shape=shape, salt=salt)


def identity_of(model: Any, model_id: str | None) -> tuple[str, str]:
    """Return two texts that two models have in common only if equal tokens give them equal KV.

    The first one is a digest of all bytes of all weights. A name and a revision are not enough: weights are fine-tuned,
    merged or quantised under one name. A sample of them could miss an edit of a few rows. The second one is a digest of
    all else: classes, settings, config, versions of the libraries, and the files of the code. Machines may share too
    little: a buffer computed at start-up, such as RoPE's frequencies, may differ in its last bit.

    Args:
        model: the model.
        model_id: the user's name of exactly these weights, in every process that shares. It replaces the digest of
            weights, and answers for objects and code that no digest shows. All else counts as before.

    Raises:
        UnsupportedModel: no digest can be taken of a weight, a setting or a class; pass model_id.
    """
    is_named = model_id is not None
    counted = [sorted(settings_of(model, is_named=is_named)), _digests_of_code(model, is_named=is_named)]
    weights = f"id:{model_id}" if is_named else weights_digest(model)
    return f"transformers:{weights}", sha256(json.dumps(counted).encode()).hexdigest()


def weights_digest(model: Any) -> str:
    """Return SHA-256 over names, dtypes, shapes and all bytes of a model's parameters and buffers, in hex.

    Every name counts, also if a tensor has several: otherwise models with differently tied layers would have one
    digest. Takes as long as a few threads need to hash each tensor once. Weights on a GPU are copied to the host in
    pieces.

    Raises:
        UnsupportedModel: a weight is not in memory, or its bytes are not all of its content; pass model_id then.
    """
    named = sorted(
        chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)),
        key=lambda pair: pair[0],
    )
    first = {id(tensor): (name, tensor) for name, tensor in reversed(named)}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="raykv-digest") as threads:
        digests = dict(zip(first, threads.map(lambda pair: tensor_digest(*pair), first.values()), strict=True))
    return sha256(json.dumps([(name, digests[id(tensor)]) for name, tensor in named]).encode()).hexdigest()


def settings_of(model: Any, *, is_named: bool) -> list[tuple[str, str]]:
    """Return all that a model is besides its weights and its code, as pairs of a name and a text.

    Args:
        model: whose modules, hooks and configs they are.
        is_named: whether a name answers for what has no text of its own; otherwise it is refused.

    Raises:
        UnsupportedModel: there is such a thing, or a config that JSON cannot hold.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    configs = {
        id(value): value
        for _, module in modules
        for value in vars(module).values()
        if isinstance(value, PreTrainedConfig)
    }
    parts = {id(each): name for name, each in modules} | {each: f"config {at}" for at, each in enumerate(configs)}

    def text(name: str, value: object) -> tuple[str, str]:
        if type(value) in _PLAIN:
            return name, repr(value)
        try:
            return name, json.dumps(_as_json(parts, is_named, value))
        except Exception as error:  # Values of a config or a module may be anything, with a repr of their own.
            raise UnsupportedModel(
                f"wanted settings that can be told from others, got {name}: {error}. Those are numbers, texts, None, "
                "dtypes, and functions and classes of a file, alone or in lists, dicts and sets; take this one "
                "out, or pass model_id= with a name that only this model has, its code and objects included"
            ) from error

    found = [
        text("libraries", [transformers.__version__, str(torch.__version__)]),
        text("device", model.device.type),
        # torch.get_float32_matmul_precision() fails once one of these was set. What was not set is as IEEE has it.
        *(
            text(f"products in float32, {at}", each.matmul.fp32_precision.replace("none", "ieee"))
            for at, each in enumerate((torch.backends.cuda, torch.backends.mkldnn))
        ),
        *(text(f"config {at}", _fields_of(each)) for at, each in enumerate(configs.values())),
        *(text(f"{name} of all modules", hook) for name, hook in _hooks_of(every_module, "_global")),
        *(
            text(f"class {name_of(kind)}.{key}", value)
            for kind in {kind for _, module in modules for kind in type(module).__mro__}
            if not _is_of(kind, "builtins", "torch", "transformers")
            for key, value in _attributes_of(kind)
        ),
    ]
    for name, module in modules:
        found.append((name, name_of(type(module))))
        found += [text(f"{at} of {name}", hook) for at, hook in _hooks_of(module)]
        found += [
            text(f"{name}.{key}", value) for key, value in vars(module).items() if key not in _HARMLESS_IN_MODULES
        ]
    return found


def _hooks_of(owner: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the hooks that may change what modules compute, by kind and place; those of libraries and ours only look.

    With each goes whether it is called with the keyword arguments.
    """
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        with_kwargs = getattr(owner, f"{prefix}{name}_with_kwargs", ())
        counted = (
            [hook, key in with_kwargs]
            for key, hook in getattr(owner, prefix + name).items()
            if not _is_of(hook, "transformers", "kvstore")
        )
        yield from ((f"{name} {at}", each) for at, each in enumerate(counted))


def _is_of(value: Any, *packages: str) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] in packages


def _attributes_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that a class has for all of its modules; of a method, its defaults: files tell the rest."""
    for name, value in vars(kind).items():
        functions = _functions_of(value)
        if functions or not (name in _HARMLESS_IN_MODULES or name.startswith("__")):
            yield name, [_defaults_of(each) for each in functions] or value


def _defaults_of(function: Any) -> list[Any]:
    return [getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)]


def _fields_of(config: PreTrainedConfig) -> list[Any]:
    return [
        name_of(type(config)),
        {key: each for key, each in sorted(vars(config).items()) if key not in _HARMLESS_IN_CONFIG},
    ]


def _as_json(parts: Mapping[int, str], is_named: bool, value: Any) -> Any:
    """Return JSON that only equal values have; `parts` names those that count on their own.

    Types are exact: an object of a subclass may hold more than its items.
    """
    kind, inner = name_of(type(value)), partial(_as_json, parts, is_named)
    if type(value) in _PLAIN:
        return value
    if id(value) in parts:
        return ["part", parts[id(value)]]
    if isinstance(value, PreTrainedConfig):
        return [kind, inner(_fields_of(value))]
    if type(value) in (list, tuple, dict):
        return [kind, *map(inner, value.items() if type(value) is dict else value)]
    if type(value) in (set, frozenset):
        return [kind, *sorted(map(inner, value), key=repr)]
    if type(value) in _BY_TEXT:
        return [kind, str(value)]
    if type(value) is partial:
        return [kind, *map(inner, (value.func, value.args, value.keywords))]
    if _has_no_state(value):
        return [kind, value.__module__, value.__qualname__, inner(_defaults_of(value))]
    if is_named:
        return ["unclear", kind]
    raise TypeError(f"an object of {kind}")


def _has_no_state(value: Any) -> bool:
    """Whether a value is a class or a function that its name and its file tell from others."""
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    return isinstance(value, type | FunctionType) and "<" not in value.__qualname__ and bool(_file_of(value))


def name_of(kind: type) -> str:
    """Return the name of a class, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _digests_of_code(model: Any, *, is_named: bool) -> list[str]:
    """Return digests of the files of the modules' classes, of their methods, and of what these files import by name.

    Raises:
        UnsupportedModel: a class or a method has no file, and no name answers for it.
    """
    kinds: set[Any] = {kind for part in model.modules() for kind in type(part).__mro__ if kind is not object}
    methods: list[Any] = [
        each
        for kind in kinds
        for name, value in vars(kind).items()
        if name not in _HARMLESS_METHODS
        for each in _functions_of(value)
    ]
    if not is_named and (found := [each for each in chain(kinds, methods) if not _file_of(each)]):
        raise UnsupportedModel(
            f"wanted classes of files, got {found[0].__module__}.{found[0].__qualname__} without one, so that another "
            "of that name could not be told from it; pass model_id= with a name that only this model has, code and "
            "weights"
        )
    held: list[Any] = []
    for part in model.modules():
        held += [
            *(hook for _, (hook, _) in _hooks_of(part)),
            *(each for name, each in vars(part).items() if name not in _HARMLESS_IN_MODULES),
        ]
    for module in {kind.__module__ for kind in kinds} & set(sys.modules):
        held += list(vars(sys.modules[module]).values())
    files = {_file_of(each) for each in chain(kinds, methods, held)} - {""}
    return sorted({sha256(Path(file).read_bytes()).hexdigest() for file in files})


def _functions_of(value: Any) -> list[FunctionType]:
    """Return the functions in an attribute of a class: a method, also a static one, or a property."""
    held = (
        value.func if isinstance(value, cached_property) else value,
        getattr(value, "__func__", None),
        getattr(value, "fget", None),
    )
    return [each for each in held if isinstance(each, FunctionType)]


def _file_of(value: Any) -> str:
    """Return the file of source that a module, a class or a function comes from; empty if there is none."""
    try:
        path = inspect.getfile(value)
    except (OSError, TypeError):
        return ""
    return path if path.endswith(".py") and os.path.isfile(path) else ""


class Snapshot:
    """The state of a model when its identity was taken: a digest of all weights before each call would take too long.

    Args:
        model: whose settings and tensors are remembered; not kept alive.
        is_named: as for `settings_of`.
    """

    def __init__(self, model: Any, *, is_named: bool) -> None:
        self._is_named = is_named
        self._state = self._state_of(model)

    def check(self, model: Any) -> None:
        """Refuse a model that was changed since, or whose KV would be random or of another dtype now.

        Raises:
            InvalidRequest: a weight, a buffer, a module, a setting or a config is another one, or was written to; the
                model is in training mode, or autocast is on.
            UnsupportedModel: as for `settings_of`.
        """
        check_mode(model)
        if changed := sorted({name for name, _ in self._state_of(model) ^ self._state}):
            raise InvalidRequest(
                f"wanted the model that this namespace was made of, got another: {changed[0]} and {len(changed) - 1} "
                "other parts changed or moved since; make a new PrefixCachedModel or PagedStore, which gets the "
                "namespace of the new model"
            )

    def is_of(self, model: Any) -> bool:
        """Whether `check` finds nothing; otherwise the log says what."""
        try:
            self.check(model)
        except (InvalidRequest, UnsupportedModel) as error:
            logger.warning("nothing is loaded, saved or handed off: %s", error)
            return False
        return True

    def _state_of(self, model: Any) -> set[tuple[str, object]]:
        tensors = [
            (f"{prefix}.{name}", _mark(each))
            for prefix, module in model.named_modules(remove_duplicate=False)
            for name, each in chain(module._parameters.items(), module._buffers.items())
            if each is not None
        ]
        return {*settings_of(model, is_named=self._is_named), *tensors}


def _mark(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what shows that a tensor was replaced or written to; while it is held, no other storage is like its own.

    The storage may be freed meanwhile. Quantised and distributed tensors may have none. torch counts no writes to those
    of inference mode, so all of their bytes are in it; and none through `.data`, so a few elements are.
    """
    place, sample = tuple[object, ...](), tuple[object, ...]()
    with contextlib.suppress(NotImplementedError, RuntimeError):
        place = tensor.data_ptr(), StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    if is_plain(tensor):
        flat = tensor.detach().reshape(-1)
        # Not a whole number of rows apart, so that not all are of one column.
        some = flat[:: max(1, (len(flat) - 1) // _NUM_SAMPLED)][:_NUM_SAMPLED]
        sample = (
            tensor.shape,
            some.cpu().contiguous().view(torch.uint8).numpy().tobytes(),
            tensor_digest("", tensor) if tensor.is_inference() else "",
        )
    return type(tensor), tensor.dtype, 0 if tensor.is_inference() else tensor._version, sample, place
