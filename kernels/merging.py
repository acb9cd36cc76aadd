"""Join adjacent items into runs. Needs no torch, so the store's processes use it as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
"""Ids, positions, addresses and sizes, as numpy and the kernels take them."""


def begins_of_runs(
    targets: npt.NDArray[Any], sources: npt.NDArray[Any], lengths: I64 | int, *groups: I64
) -> npt.NDArray[np.bool_]:
    """Return for each item whether it begins a run; arguments as for `merge_runs`."""
    begins = np.ones(len(targets), np.bool_)
    later, each = begins[1:], lengths if isinstance(lengths, int) else lengths[:-1]
    np.not_equal(targets[1:], targets[:-1] + each, out=later)
    later |= sources[1:] != sources[:-1] + each
    for group in groups:
        later |= group[1:] != group[:-1]
    return begins


def merge_runs(
    targets: npt.NDArray[Any], sources: npt.NDArray[Any], lengths: I64 | int, *groups: I64
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], I64]:
    """Join items that follow each other on both sides; their order stays the same.

    Args:
        targets: integers `[n]`, where each item begins on one side.
        sources: integers `[n]`, where it begins on the other side.
        lengths: `[n]`, in the same unit, or one length for all.
        groups: `[n]` each; items that differ in one of them stay separate. For example, the driver refuses a copy from
            one piece of registered memory into the next.

    Returns:
        (targets, sources, lengths) of the runs.
    """
    first = np.flatnonzero(begins_of_runs(targets, sources, lengths, *groups))
    if isinstance(lengths, int):
        merged = (np.concatenate((first[1:], (len(targets),))) - first) * lengths
    else:
        merged = np.add.reduceat(lengths, first)
    return targets[first], sources[first], merged
