"""A load beside readers of what the engine had already: not one byte of the hit is ever written. And each place that
knows the mask, once without it: the same readers have to see that."""

import threading

import numpy as np
import pytest
import torch

from cpu_shim import build_shim
from kvstore.kernels import spans
from kvstore.kernels.gpu import GpuCopier
from kvstore.kernels.launch import Tables, launches
from kvstore.kernels.module import KERNELS, OPTIONS
from kvstore.kernels.staging import StagingRing
from overlap import Overlap, module_without_mask, without_mask

NUM_READS = 2000


def bytes_seen_wrong(case, load):
    """Load again and again while another thread compares the hit NUM_READS times; return what it saw."""
    seen, started, ended = [], threading.Event(), threading.Event()

    def read():
        started.set()
        seen.extend(int(case.num_wrong()) for _ in range(NUM_READS))
        ended.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert started.wait(20)
    while not ended.is_set():
        load()
    reader.join(20)
    assert len(seen) == NUM_READS
    return sum(seen)


def load_by_shim(shim, case, listed):
    """A load by the kernel's code on the CPU; out of bounds is whatever is not the cache."""
    tables = [Tables(s.engine_bases.ctypes.data, s.slot_offsets.ctypes.data) for s in case.plan.sections]
    shim.allow(case.slots, writable=[case.cache])

    def load():
        for launch in launches(case.plan, tables, listed, listed.rows.ctypes.data, case.slots, to_slots=False):
            shim.run(launch)

    return load


def test_the_oracle_leaves_the_hit_alone():
    case = Overlap()
    assert bytes_seen_wrong(case, lambda: case.load_by_oracle(case.cache)) == 0
    assert case.is_loaded()


def test_the_kernel_leaves_the_hit_alone(shim):
    case = Overlap()
    assert bytes_seen_wrong(case, load_by_shim(shim, case, case.spans())) == 0
    assert case.is_loaded()


def test_readers_see_an_oracle_without_the_mask():
    case, mutant = Overlap(), module_without_mask("reference_tokens.py")
    assert bytes_seen_wrong(case, lambda: case.load_by_oracle(case.cache, mutant)) > 0


def test_readers_see_a_list_without_the_mask(shim):
    case = Overlap()
    load = load_by_shim(shim, case, case.spans(module_without_mask("spans.py")))
    assert bytes_seen_wrong(case, load) > 0


def test_readers_see_a_kernel_without_the_mask(tmp_path, repo_root):
    case = Overlap()
    mutant = build_shim(tmp_path, repo_root, {"pack.cu": without_mask("pack.cu")})
    assert bytes_seen_wrong(case, load_by_shim(mutant, case, case.spans())) > 0


def wrong_on_gpu(case, copier, listed):
    """The same with a stream that loads and a stream that reads; half of the loads go through a staging ring."""
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    ring = StagingRing(copier, chunk_bytes=1)  # a stored block each: the hit ends inside a chunk
    placed, near = copier.place(listed), case.slots.to(case.device)
    wrong = torch.zeros((), dtype=torch.int64, device=case.device)
    torch.cuda.synchronize()
    for turn in range(NUM_READS):
        with torch.cuda.stream(writer):
            if turn % 2:
                copier.unpack(placed, near)
            elif turn % 8 == 0:
                writer.wait_event(ring.load(case.slots, np.arange(8), listed))
        with torch.cuda.stream(reader):
            wrong += case.num_wrong()
        if turn % 64 == 63:  # or the list of what is queued grows without end
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return int(wrong)


def gpu_case():
    case = Overlap(heads=8, layers=4, dim=256, device="cuda")
    return case, GpuCopier(case.plan)


@pytest.mark.gpu
def test_loads_on_a_gpu_leave_the_hit_alone():
    case, copier = gpu_case()
    assert wrong_on_gpu(case, copier, case.spans()) == 0
    assert case.is_loaded()


@pytest.mark.gpu
@pytest.mark.parametrize("file", ["spans.py", "pack.cu"])
def test_readers_on_a_gpu_see_loads_without_the_mask(file):
    case, copier = gpu_case()
    if file == "spans.py":
        mutant = module_without_mask(file).block_spans
        rows = mutant(
            case.plan.paging, case.pages, range(8), 8, num_tokens=case.num_tokens, skip_prefix_tokens=case.hit
        ).rows
        listed = spans.Spans(rows=rows, paging=case.plan.paging, num_slots=8)
    else:
        cupy = pytest.importorskip("cupy")
        listed, names = case.spans(), KERNELS[file]
        module = cupy.RawModule(code=without_mask(file), options=OPTIONS, name_expressions=names)
        kernels = {name: module.get_function(name).kernel for name in names}
        copier._kernels = {name: kernel.ptr for name, kernel in kernels.items()}
    assert wrong_on_gpu(case, copier, listed) > 0
