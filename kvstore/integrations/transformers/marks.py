"""Checks that a model is still what its namespace was made from: its weights, buffers, modules and config.

A digest of all weights before each `generate` would take too long. Addresses, torch's counts of writes, and a few
elements of each tensor show almost every change; docs/transformers.md says which changes they do not show.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from hashlib import sha256
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kvstore.errors import InvalidRequest
from kvstore.integrations.transformers.identity import config_of
from kvstore.integrations.transformers.modules import ModuleMarks

_NUM_SAMPLED = 16
"""Elements of each tensor that are compared, as torch does not count writes through `.data`."""


class _Mark:
    """A tensor's place, and how often it was written."""

    def __init__(self, tensor: torch.Tensor) -> None:
        #: Weak, so that weights can be freed; while this is held, no other storage gets its address.
        self._storage: StorageWeakRef | None = None
        # Quantised and distributed tensors may have none of their own.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._state = _state(tensor)

    def is_of(self, tensor: torch.Tensor) -> bool:
        if self._storage is not None and self._storage.cdata != tensor.untyped_storage()._cdata:
            return False
        return self._state == _state(tensor)


class _Marks:
    """The state of several tensors: a mark of each, and a few elements."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._marks, self._samples = [_Mark(each) for each in tensors], _samples(tensors)

    def are_of(self, tensors: list[torch.Tensor]) -> bool:
        if len(tensors) != len(self._marks) or not all(map(_Mark.is_of, self._marks, tensors)):
            return False
        samples = _samples(tensors)
        return len(samples) == len(self._samples) and all(
            one.device == other.device and torch.equal(one, other)
            for one, other in zip(samples, self._samples, strict=True)
        )


class Marks:
    """The state of a model when it was wrapped.

    Args:
        model: whose parameters, buffers, modules and config are remembered; not kept alive.
    """

    def __init__(self, model: Any) -> None:
        weights, derived, self._names = _tensors_of(model)
        self._modules = ModuleMarks(model)
        self._config = json.dumps(config_of(model), sort_keys=True)
        self._weights, self._derived = _Marks(weights), _Marks(derived)
        self._derived_digests = [(tuple(each.shape), _digest(each)) for each in derived]

    def check(self, model: Any) -> None:
        """Refuse a model that was changed since it was wrapped.

        A buffer outside the checkpoint may grow, as sinusoids do for a long prompt.

        Raises:
            InvalidRequest: weights or buffers were written to or moved, a module was replaced or its settings
                changed, or the config changed.
        """
        weights, derived, names = _tensors_of(model)
        if self._names != names:
            self._refuse("weights")
        if not self._modules.are_of(model):
            self._refuse("modules")
        if not self._weights.are_of(weights):
            self._refuse("weights")
        if not self._derived.are_of(derived):
            if len(derived) != len(self._derived_digests) or not all(
                _begins_with(each, *known) for each, known in zip(derived, self._derived_digests, strict=True)
            ):
                self._refuse("buffers")
            # Only the marks are replaced; the digests stay those of when the namespace was made.
            self._derived = _Marks(derived)
        if self._config != json.dumps(config_of(model), sort_keys=True):
            self._refuse("config")

    def _refuse(self, what: str) -> None:
        raise InvalidRequest(
            f"wanted the {what} that this namespace was made of, got another: changed or moved since; close this "
            "PrefixCachedModel and make a new one, which gets the namespace of the new model"
        )


def _tensors_of(model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[str, int]]]:
    """Return parameters with saved buffers, derived buffers, and all names with their tensors' numbers.

    Each tensor is listed once; the numbers show a layer that is tied to another one than before.
    """
    weights, derived = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    numbers, names = dict[int, int](), list[tuple[str, int]]()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for kind in (module._parameters, module._buffers):
            for name, each in kind.items():
                if each is not None:
                    is_derived = kind is module._buffers and name in module._non_persistent_buffers_set
                    (derived if is_derived else weights)[id(each)] = each
                    names.append((f"{prefix}.{name}", numbers.setdefault(id(each), len(numbers))))
    return list(weights.values()), list(derived.values()), names


def _state(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the address of the first element, dtype, shape, and torch's count of writes; 0 where it keeps none."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, 0 if tensor.is_inference() else tensor._version


def _samples(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return bytes of a few elements of each plain tensor: one gather for each device and dtype."""
    found = defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]](list)
    with torch.no_grad():
        for each in tensors:
            if type(each) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not each.is_meta and each.numel():
                found[each.device, each.dtype].append(_sample(each))
        return [torch.cat(each).view(torch.uint8) for each in found.values()]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    # Not a whole number of rows apart, so that not all are of one column.
    num, step = min(_NUM_SAMPLED, tensor.numel()), max(1, (tensor.numel() - 1) // _NUM_SAMPLED)
    if tensor.is_contiguous():
        return tensor.as_strided((num,), (step,), tensor.storage_offset())
    return tensor[torch.unravel_index(step * torch.arange(num, device=tensor.device), tensor.shape)]


def _begins_with(tensor: torch.Tensor, shape: tuple[int, ...], digest: bytes) -> bool:
    """Whether a tensor has its old content, or that with more rows behind it."""
    if tensor.dim() != len(shape) or tuple(tensor.shape[1:]) != shape[1:] or (shape and len(tensor) < shape[0]):
        return False
    return _digest(tensor[: shape[0]] if shape else tensor) == digest


def _digest(tensor: torch.Tensor) -> bytes:
    found = sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if not tensor.is_meta:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()
