"""Says whether two schedules have come to the same state, from which the same things can follow.

A state is what the threads can see and where they stand: their frames with all that can be reached from these, the
pool and its memory too. It is compared as one pickle. Parts of an expression that is half computed are in no frame's
locals; how many points a thread has passed stands in for them.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from array import array
from collections.abc import Collection, Sequence
from hashlib import blake2b
from itertools import count
from types import FunctionType
from typing import Any

import numpy as np

_LOCK = type(threading.Lock())


class _Opaque:
    """Stands in a pickle for what pickle does not take, or not by its value."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, constant: object) -> None:
        super().__init__(file, 5)
        self._constant = constant

    def reducer_override(self, value: Any) -> Any:
        # The third of these is what identifies the value; it may lead back to it.
        if value is self._constant:
            return _Opaque, (), None
        kind = type(value)
        if kind is FunctionType:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return _Opaque, (), (id(value.__code__), value.__defaults__, cells)
        if kind is np.ndarray or kind is array or kind is memoryview:
            return _Opaque, (), value.tobytes()
        if kind is _LOCK:
            return _Opaque, (), value.locked()
        if kind is count:
            return _Opaque, (), repr(value)
        return NotImplemented


def state_of(idents: Sequence[int], left: Collection[int], constant: object, skipped: str, more: object) -> bytes:
    """Return a digest of the state of some threads, none of which runs now but the calling one; empty if unknown.

    Args:
        idents: of the threads.
        left: those of them, by number, that have not ended.
        constant: an object that counts as the same always, whatever is in it.
        skipped: a file whose frames do not count.
        more: counts too.
    """
    frames = sys._current_frames()
    stacks = []
    for number in sorted(left):
        frame = frames.get(idents[number])
        while frame is not None:
            code = frame.f_code
            if code.co_filename not in (skipped, __file__):
                stacks.append((number, id(code), frame.f_lasti, frame.f_locals))
            frame = frame.f_back
    file = io.BytesIO()
    try:
        _Pickler(file, constant).dump((stacks, more))
    except (TypeError, pickle.PicklingError):
        return b""
    return blake2b(file.getbuffer(), digest_size=16).digest()
