"""Copies of one registered CUDA cache: launches of pack.cu on the caller's stream. The one file that launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.kernels.driver import copy_run, launch, on_device
from kvstore.kernels.launch import Launch, Tables, check_slots, check_window, launches, moved
from kvstore.kernels.module import load
from kvstore.kernels.plan import CopyPlan
from kvstore.kernels.spans import COLUMNS, Spans
from kvstore.kernels.streams import index_of

_MIN_ROWS = 1024


def runner(file: str, device: torch.device, stream: torch.cuda.Stream | None = None) -> Callable[[Launch], None]:
    """Return a function that launches kernels of a file.

    Args:
        file: a key of `module.KERNELS`.
        device: a CUDA device.
        stream: where they run; default the current stream of this call.

    Raises:
        ImportError: CuPy is not installed.
        ValueError: not a CUDA device.
    """
    index = _cuda_index(device)
    kernels = load(file, index)
    handle = (torch.cuda.current_stream(index) if stream is None else stream).cuda_stream

    def run(work: Launch) -> None:
        with on_device(index):
            launch(kernels[work.name], work.num_ctas, work.num_threads, work.args, handle)

    return run


def _cuda_index(device: torch.device) -> int:
    if device.type != "cuda":
        raise ValueError(f"wanted a CUDA device, got {device}; kernels/reference.py copies CPU tensors")
    return index_of(device)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedSpans:
    """A list of spans, and its copy on the device at `address`; `memory` keeps it alive."""

    spans: Spans
    address: int
    memory: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCopy:
    """The launches of a copy, for a list of spans at `address` on the device."""

    work: list[Launch]
    address: int


class GpuCopier:
    """Copy between the CUDA cache of one plan and slots in device or pinned host memory.

    Everything is checked before the first launch; all work is asynchronous on the given stream. The cache's tensors are
    kept alive; they, the slots and placed spans must stay until the stream is done.

    Args:
        plan: from `plan_copy` over CUDA tensors.

    Raises:
        ValueError: the plan's tensors are not on a CUDA device.
        ImportError: CuPy is not installed.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self.plan = plan
        self._index = _cuda_index(plan.device)
        self._kernels = load("pack.cu", self._index)
        self._held = [
            (torch.from_numpy(s.engine_bases).to(plan.device), torch.from_numpy(s.slot_offsets).to(plan.device))
            for s in plan.sections
        ]
        self._tables = [Tables(bases.data_ptr(), offsets.data_ptr()) for bases, offsets in self._held]

    def place(self, spans: Spans, stream: torch.cuda.Stream | None = None, memory: Tensor | None = None) -> PlacedSpans:
        """Copy a list of spans to the device, in the order of the stream.

        Args:
            spans: the list.
            stream: where it is copied; default the current one.
            memory: int64 on the device, long enough, read only by work on this stream; default new memory.
        """
        chosen = torch.cuda.current_stream(self.plan.device) if stream is None else stream
        if memory is None or memory.numel() < spans.rows.size:
            with torch.cuda.stream(chosen):
                size = max(spans.rows.size, _MIN_ROWS * len(COLUMNS))
                memory = torch.empty(size, dtype=torch.int64, device=self.plan.device)
        if len(spans):
            with on_device(self._index):
                copy_run(
                    memory.data_ptr(), spans.rows.__array_interface__["data"][0], spans.rows.nbytes, chosen.cuda_stream
                )
        return PlacedSpans(spans, memory.data_ptr(), memory)

    def pack(
        self,
        spans: PlacedSpans,
        slots: Tensor,
        *,
        stream: torch.cuda.Stream | None = None,
        max_ctas: int | None = None,
    ) -> None:
        """Copy the tokens of spans from the engine into slots.

        Args:
            spans: from `place`; other tokens are touched on neither side.
            slots: uint8 `[S, slot_bytes]`, on the engine's device or in pinned host memory.
            stream: where it runs; default the current one.
            max_ctas: cap on thread blocks.

        Raises:
            ValueError: slots that cannot be reached, are too small or do not fit the spans; nothing was written.
            RuntimeError: the driver refused a launch.
        """
        self._copy(True, spans, slots, stream, max_ctas)

    def unpack(
        self,
        spans: PlacedSpans,
        slots: Tensor,
        *,
        stream: torch.cuda.Stream | None = None,
        max_ctas: int | None = None,
    ) -> None:
        """Copy the tokens of spans from slots into the engine; arguments as for `pack`.

        It is fastest when the spans came from `Spans.to_unpack`.
        """
        self._copy(False, spans, slots, stream, max_ctas)

    def _copy(
        self, to_slots: bool, placed: PlacedSpans, slots: Tensor, stream: torch.cuda.Stream | None, max_ctas: int | None
    ) -> None:
        check_slots(self.plan, slots)
        check_window(self.plan, placed.spans, slots.shape[0], 0, None, 0, max_ctas)
        chosen = torch.cuda.current_stream(self.plan.device) if stream is None else stream
        with on_device(self._index):
            self.launch_prepared(self.prepare(to_slots, placed, slots, 0, None, 0, max_ctas), chosen.cuda_stream)

    def prepare(
        self,
        to_slots: bool,
        placed: PlacedSpans,
        slots: Tensor,
        begin: int,
        end: int | None,
        first_slot: int = 0,
        max_ctas: int | None = None,
    ) -> PreparedCopy:
        """Return the launches of `pack` or `unpack`; the caller has made their checks.

        Raises:
            ValueError: the copy is too large for one launch; nothing was launched.
        """
        work = launches(
            self.plan, self._tables, placed.spans, placed.address, slots, to_slots=to_slots,
            begin=begin, end=end, first_slot=first_slot, max_ctas=max_ctas,
        )  # fmt: skip
        return PreparedCopy(list(work), placed.address)  # All at once: after a refusal nothing is half done.

    def launch_prepared(self, copy: PreparedCopy, stream: int, address: int | None = None, slots_by: int = 0) -> None:
        """Launch what `prepare` returned, on the device.

        Args:
            copy: may be launched again and again.
            stream: handle of the stream.
            address: of another list, with the same numbers of spans and tokens.
            slots_by: bytes, in whole slots, from the copy's slots to the slots to use.

        Raises:
            RuntimeError: the driver refused a launch.
        """
        list_by = 0 if address is None else address - copy.address
        for one in [moved(each, list_by, slots_by) for each in copy.work] if list_by or slots_by else copy.work:
            launch(self._kernels[one.name], one.num_ctas, one.num_threads, one.args, stream)
