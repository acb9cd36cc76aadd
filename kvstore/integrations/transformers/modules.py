"""Descriptions of a model's modules: their classes, their settings and their code.

A config says how a model was to be built. Later edits and replaced modules are not in it, so the modules count.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers.kinds import is_known, name_of, state_of_tensor
from kvstore.integrations.transformers.values import Reader, UnclearError, digest_of

_NOT_OF_KV = {
    "gradient_checkpointing", "name_or_path", "loss_type", "max_seq_len_cached", "generation_config",
    # How transformers compiles, shards, loads, ties and saves a model; its own kinds of attention count in no id.
    "_attn_implementation", "_compiled_call", "_compiled_call_impl", "_ep_plan", "_fsdp_plan", "_is_hf_initialized",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_no_split_modules", "_pp_plan",
    "_skip_keys_device_placement", "_tp_plan", "_tp_size", "_use_kernels", "_device_mesh", "_weight_conversions",
    "_output_capturing_hooks_installed", "all_tied_weights_keys", "_previous_max_cache_length",
    # What a decoding loop feeds to the model; the witness checks that run by run.
    "prepare_inputs_for_generation", "hf_device_map", "_loss_function",
} | set(vars(torch.nn.Module()))  # fmt: skip
"""Settings of modules that say where a model came from or how it is trained, or that change while it runs."""


def modules_digest(model: Any) -> str:
    """Return the SHA-256, in hex, of each module's class and settings, under each of its names.

    Unclear values count by their class alone; `sources_of` refuses them.
    """
    reader = Reader(_covered_by(model), lambda value, *_: ["unclear", name_of(type(value))])
    return digest_of(_tree(model, reader))


def sources_of(model: Any) -> dict[str, Any]:
    """Return digests of the code and the settings of all modules, by name of the module.

    Two programs, or two modules of one model, may have classes of one name with a different `forward`. In classes of
    torch and transformers, attributes that a program has replaced count.

    Args:
        model: whose modules they are.

    Raises:
        UnsupportedModel: a value or code cannot be told from others of its kind; pass model_id.
    """
    reader = Reader(_covered_by(model))
    try:
        tree = _tree(model, reader)
        return {"settings": digest_of(tree), "code": _code_of(model, reader, needs_source=True)}
    except UnclearError as error:
        where, what = error.args
        raise UnsupportedModel(
            f"wanted plain values and code that can be told from others, got {where}: {what}. Plain are "
            "numbers, texts, None, enums, arrays, tensors, and tuples, lists, dicts and sets of them; an object of "
            "another kind, or a variable that is set later, could hold anything. Make it one of these, or pass "
            "model_id= with a name that only this model has, code and weights"
        ) from error


def _by_identity(value: object, where: str, _: str) -> Any:
    state = state_of_tensor(value) if isinstance(value, torch.Tensor) else []
    return ["unclear", name_of(type(value)), id(value), where, *state]


def _covered_by(model: Any) -> dict[int, str]:
    """Return names, by id(), of objects that count by themselves: modules, parameters, buffers and configs."""
    first = {id(each): each for config in configs_of(model) for each in configs_in(config)}
    configs = ((f"config {at}", each) for at, each in enumerate(first.values()))
    named = chain(model.named_modules(), model.named_parameters(), model.named_buffers(), configs)
    return {id(each): name for name, each in named}


def configs_of(model: Any) -> Iterator[PreTrainedConfig]:
    """Yield the configs of a model's modules, under any name, once for each place that has them."""
    for _, module in model.named_modules(remove_duplicate=False):
        for each in (getattr(module, "config", None), *vars(module).values()):
            if isinstance(each, PreTrainedConfig):
                yield each


def configs_in(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and all configs in it."""
    yield config
    for each in vars(config).values():
        if isinstance(each, PreTrainedConfig):
            yield from configs_in(each)


def _tree(model: Any, reader: Reader) -> list[Any]:
    return [
        (
            name,
            name_of(type(module)),
            # All modules that torch.fx wrote have the same class name.
            module.code if isinstance(module, torch.fx.GraphModule) else "",
            [(key, reader.read(value, f"{name}.{key}" if name else key)) for key, value in _settings_of(module)],
        )
        for name, module in model.named_modules(remove_duplicate=False)
    ]


def _settings_of(module: torch.nn.Module) -> list[tuple[str, object]]:
    is_graph = isinstance(module, torch.fx.GraphModule)  # All its content is in its code.
    return [
        (name, value)
        for name, value in sorted(vars(module).items())
        if name not in _NOT_OF_KV and not (is_graph and (name[0] == "_" or name in ("meta", "graph")))
    ]


def _code_of(model: Any, reader: Reader, *, needs_source: bool) -> dict[str, list[str]]:
    found, digests = dict[str, list[str]](), dict[type, str]()
    for name, module in model.named_modules(remove_duplicate=False):
        for kind in type(module).__mro__:
            if kind not in digests:
                held = reader.read_class(kind, name_of(kind))
                lines = _source_of(kind) if needs_source and not is_known(kind.__module__) else []
                digests[kind] = digest_of([lines, held])
        found[name] = [digests[kind] for kind in type(module).__mro__]
    return found


def _source_of(kind: type) -> list[str]:
    """Return the source lines of a class.

    Raises:
        UnsupportedModel: they cannot be read, or may be another class's.
    """
    try:
        lines, first = inspect.getsourcelines(kind)
        path = inspect.getsourcefile(kind)
    except (OSError, TypeError):
        pass
    else:
        codes = [inspect.unwrap(each).__code__ for each in _own_functions(kind)]
        # Where a file has two classes of one name, Python may find the source of the other one.
        if all(first <= each.co_firstlineno < first + len(lines) for each in codes if each.co_filename == path):
            return lines
    raise UnsupportedModel(
        f"wanted classes whose source can be read, got {name_of(kind)} without one that says all (it has no file, or "
        "another class of its name is in it), so that another class of that name could not be told from it; pass "
        "model_id= with a name that only this model has, code and weights"
    )


def _own_functions(kind: type) -> Iterator[FunctionType]:
    """Yield the functions defined in a class, without the wrappers that make methods and properties of them."""
    for name, value in vars(kind).items():
        given = next(
            (getattr(value, each, None) for each in ("fget", "__func__", "func") if hasattr(value, each)), value
        )
        if isinstance(given, FunctionType) and given.__qualname__ == f"{kind.__qualname__}.{name}":
            yield given


class _Mark:
    """The state of a module when it was marked; no other module is taken for it while this is held."""

    def __init__(self, module: torch.nn.Module) -> None:
        settings = _settings_of(module)
        self._module, self._kind = weakref.ref(module), type(module)
        self._children, self._num_attributes = tuple(module._modules), len(vars(module))
        self._names, self._values = [name for name, _ in settings], [value for _, value in settings]

    def is_of(self, module: torch.nn.Module) -> bool:
        held = vars(module)
        return (
            self._module() is module
            and type(module) is self._kind
            and len(held) == self._num_attributes
            and tuple(module._modules) == self._children
            and all(map(is_, map(held.get, self._names), self._values))
        )


class ModuleMarks:
    """The state of a model's modules when the model was wrapped.

    Args:
        model: whose modules are remembered; not kept alive.
    """

    def __init__(self, model: Any) -> None:
        self._seen = self._look_at(model)

    def _look_at(self, model: Any) -> tuple[Reader, str, list[_Mark]]:
        # One walk gives the digest and the values to compare, so that neither can miss what the other has.
        reader = Reader(_covered_by(model), _by_identity)
        code = _code_of(model, reader, needs_source=False)
        digest = digest_of([_tree(model, reader), code])
        return reader, digest, [_Mark(module) for _, module in model.named_modules(remove_duplicate=False)]

    def are_of(self, model: Any) -> bool:
        """Whether all modules are the same objects, or others with the same code and values."""
        reader, digest, marks = self._seen
        modules = [module for _, module in model.named_modules(remove_duplicate=False)]
        if (
            len(modules) == len(marks)
            and all(mark.is_of(module) for mark, module in zip(marks, modules, strict=True))
            and reader.are_same()
        ):
            return True
        # Slow and rare: a value was replaced by an equal one, or a module by one like it.
        now = self._look_at(model)
        if now[1] != digest:
            return False
        self._seen = now  # One assignment, and only if nothing changed: other threads compare with it meanwhile.
        return True
