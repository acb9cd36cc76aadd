"""The kernels on a GPU: byte for byte what the oracle does, guards included."""

import mmap
import threading

import numpy as np
import pytest
import torch

from copy_case import CROSS, DTYPES, ORDERS, Case, ElevenPlanes
from kvstore.bench.gpu import BESIDE, run_gpu
from kvstore.kernels import host_register, index
from kvstore.kernels import reference_index as index_oracle
from kvstore.kernels import reference_tokens as oracle
from kvstore.kernels.direct import DirectCopies
from kvstore.kernels.gpu import GpuCopier, runner
from kvstore.kernels.launch import Style
from kvstore.kernels.module import ACROSS, INSIDE
from kvstore.kernels.plan import plan_copy
from kvstore.kernels.spans import block_spans
from kvstore.kernels.staging import StagingRing
from kvstore.kernels.stored import StoredBlock

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def placed_case(case, where):
    engines = [engine.on(DEVICE) for engine in case.engines]
    buffer = case.buffer.clone().pin_memory() if where == "pinned" else case.buffer.to(DEVICE)
    return engines, buffer, GpuCopier(case.plan(engines))


def assert_equal(case, engines, buffer, to_slots):
    torch.cuda.synchronize()
    wanted_engines, wanted_buffer, _ = case.expected(to_slots)
    assert torch.equal(buffer.cpu(), wanted_buffer)
    for got, want in zip(engines, wanted_engines, strict=True):
        assert torch.equal(got.raw.cpu(), want.raw)


def run(case, where, to_slots, **options):
    engines, buffer, copier = placed_case(case, where)
    slots, spans = case.slots_of(buffer), copier.place(case.spans(copier.plan.paging))
    if to_slots:
        copier.pack(spans, slots, **options)
    else:
        copier.unpack(spans, slots, **options)
    assert_equal(case, engines, buffer, to_slots)


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("where", ["device", "pinned"])
def test_random_copies(where, to_slots):
    for seed in range(150):
        run(Case(seed, big=seed % 3 == 0), where, to_slots, max_ctas=[None, 1, 16][seed % 3])


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("dim", [64, 512, 2048, 8192])
@pytest.mark.parametrize(("strip", "apart"), [(None, False), (1, False), (3, False), (3, True), (4, False), (4, True)])
def test_strips_of_planes(monkeypatch, strip, apart, dim, to_slots):
    """Planes from shorter than a warp to very long, in strips of their own choice (None) and of any width."""
    if strip is not None:
        threads = INSIDE if dim > 64 else ACROSS
        monkeypatch.setattr("kvstore.kernels.launch.style_of", lambda *_: Style(threads, strip, apart))
    case = ElevenPlanes(dim)
    engine, slots = case.engine.to(DEVICE), case.slots.to(DEVICE)
    copier = GpuCopier(case.plan(engine))
    spans = copier.place(case.spans(copier.plan.paging))
    (copier.pack if to_slots else copier.unpack)(spans, slots)
    want_engine, want_slots = case.expected(to_slots)
    assert torch.equal(engine.cpu(), want_engine)
    assert torch.equal(slots.cpu(), want_slots)


@pytest.mark.parametrize("order", ORDERS + CROSS)
def test_every_layout(order):
    for seed, dtype in enumerate(DTYPES):
        for token_mode in (True, False):
            for to_slots in (True, False):
                run(Case(seed, order, dtype, token_mode, big=True), "device", to_slots)


def copied_through(case, copies_of, to_slots):
    """Copy a case through a ring or directly; returns engines and buffer."""
    engines, buffer, copier = placed_case(case, "pinned")
    slots, slot_ids = case.slots_of(buffer), case.slot_ids
    used = slot_ids >= 0
    spare = iter(np.setdiff1d(np.arange(case.num_slots), slot_ids))
    real = np.array([slot if slot >= 0 else next(spare) for slot in slot_ids], np.int64)
    case.slot_ids, count = np.where(used, np.arange(len(real)), -1), case.num_slots
    case.num_slots = len(real)
    spans = case.spans(copier.plan.paging)
    case.slot_ids, case.num_slots = slot_ids, count
    copies = copies_of(copier)
    done = copies.save(spans, slots, real) if to_slots else copies.load(slots, real, spans)
    done.synchronize()
    return engines, buffer


def check_staged(case, to_slots, chunk_bytes):
    engines, buffer = copied_through(
        case, lambda c: StagingRing(c, layers=case.layers, heads=case.heads, chunk_bytes=chunk_bytes), to_slots
    )
    wanted_engines, wanted_buffer, _ = case.expected(to_slots)
    for got, want in zip(engines, wanted_engines, strict=True):
        assert torch.equal(got.raw.cpu(), want.raw)
    if not case.stored.sides:  # What aligns side tensors is copied, too, but belongs to nobody.
        assert torch.equal(buffer, wanted_buffer)
    want = oracle.slot_sections(case.slots_of(wanted_buffer), case.stored)
    for section, wanted in zip(oracle.slot_sections(case.slots_of(buffer), case.stored), want, strict=True):
        assert torch.equal(section, wanted)


@pytest.mark.parametrize("chunk_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize("to_slots", [True, False])
def test_the_staging_ring(to_slots, chunk_bytes):
    for seed in range(60):
        check_staged(Case(seed, big=seed % 3 == 0), to_slots, chunk_bytes)


@pytest.mark.parametrize("to_slots", [True, False])
def test_rows_that_all_heads_or_all_tokens_share(to_slots):
    for seed in range(6000, 6040):
        case = Case(seed, shared=True)
        run(case, "device", to_slots)
        check_staged(case, to_slots, 5000)
        engines, buffer = copied_through(case, lambda c: DirectCopies(c.plan), to_slots)
        assert_equal(case, engines, buffer, to_slots)


@pytest.mark.parametrize("to_slots", [True, False])
def test_direct_copies(to_slots):
    for seed in range(40):
        case = Case(seed)
        engines, buffer = copied_through(case, lambda c: DirectCopies(c.plan), to_slots)
        assert_equal(case, engines, buffer, to_slots)


@pytest.mark.parametrize("direct", [True, False])
def test_slots_of_memory_that_is_registered_in_pieces(direct):
    """Neighbouring slots lie on both sides of a boundary, and neighbouring engine blocks belong to them."""
    stored = StoredBlock(block_dims=(1, 2, 2, 2, 16, 64), dtype="bfloat16")  # 16 KiB
    cache = torch.randint(-99, 99, (8, 2, 2, 2, 16, 64), device=DEVICE).to(torch.bfloat16)
    views = list(cache.unbind(2))
    copier = GpuCopier(plan_copy(views, stored))
    memory = mmap.mmap(-1, 8 * stored.block_bytes)
    raw = np.frombuffer(memory, np.uint8)
    slots = torch.from_numpy(raw).view(8, stored.block_bytes)
    pieces = [raw.ctypes.data + at * stored.block_bytes for at in (0, 3, 6)]
    host_register.check_same_addresses(0)
    for address, count in zip(pieces, (3, 3, 2), strict=True):
        host_register.register(address, count * stored.block_bytes, 0)
    with pytest.raises(RuntimeError, match="ALREADY_REGISTERED"):
        host_register.register(pieces[0], 4096, 0)
    copies = (
        DirectCopies(copier.plan, slots_per_piece=3)
        if direct
        else StagingRing(copier, chunk_bytes=1 << 20, slots_per_piece=3)
    )
    spans = block_spans(copier.plan.paging, range(1, 8), range(7), 7)
    copies.save(spans, slots, range(1, 8)).synchronize()
    before = cache.clone()
    assert torch.equal(slots[1:].view(torch.bfloat16).view(7, 2, 2, 2, 16, 64), before[1:].cpu())
    cache.zero_()
    copies.load(slots, range(1, 8), spans).synchronize()
    assert torch.equal(cache[1:], before[1:])
    assert not cache[0].any()
    for address in pieces:
        host_register.unregister(address, 0)
    with pytest.raises(RuntimeError, match="NOT_REGISTERED"):
        host_register.unregister(pieces[0], 0)
    del raw, slots


def test_offsets_beyond_two_to_the_31_elements():
    stored = StoredBlock(block_dims=(1, 2, 1, 2, 4, 16), dtype="bfloat16")
    raw = torch.zeros((5 << 30) // 2, dtype=torch.bfloat16, device=DEVICE)
    view = raw.as_strided((2, 2, 2, 4, 16), ((1 << 31) + 8, 1 << 20, 1 << 19, 16, 1))
    data = torch.from_numpy(np.random.default_rng(1).integers(1, 99, (2, 2, 4, 16))).to(torch.bfloat16)
    view[1].copy_(data)
    copier = GpuCopier(plan_copy([view], stored))
    slots = torch.zeros(3, stored.block_bytes, dtype=torch.uint8, device=DEVICE)
    spans = copier.place(block_spans(copier.plan.paging, [1], [2], 3))
    copier.pack(spans, slots)
    assert torch.equal(slots[2].view(torch.bfloat16).view(2, 2, 4, 16).cpu(), data)
    view[1].zero_()
    copier.unpack(spans, slots)
    assert torch.equal(view[1].cpu(), data)
    assert int(raw.count_nonzero()) == data.numel()


def test_unlike_engines_share_a_block():
    """Two writers in NHD with pages of 16, four readers in HND with pages of 4, one block of 32 tokens."""
    stored = StoredBlock(block_dims=(2, 8, 2, 2, 32, 64), dtype="float16")
    whole = torch.randn(4, 6, 2, 16, 8, 64, dtype=torch.float16, device=DEVICE)  # L B P T H D
    slots = torch.zeros(4, stored.block_bytes, dtype=torch.uint8, device=DEVICE)
    written = [3, 0, 5, 2]
    for rank in range(2):
        layers, heads = stored.part(rank, 2)
        views = [whole[layer, ..., heads.start : heads.stop, :].permute(0, 3, 1, 2, 4) for layer in layers]
        copier = GpuCopier(plan_copy(views, stored, layers=layers, heads=heads))
        copier.pack(copier.place(block_spans(copier.plan.paging, written, [2, 1], 4)), slots)
    pages = np.random.default_rng(0).permutation(40)[:16]
    for tp_rank in range(4):
        for pp_rank in range(2):
            layers, heads = stored.part(tp_rank, 4, pp_rank, 2)
            mine = torch.zeros(len(layers), 40, 2, 2, 4, 64, dtype=torch.float16, device=DEVICE)  # L B P H T D
            views = [layer.transpose(1, 2) for layer in mine]
            copier = GpuCopier(plan_copy(views, stored, layers=layers, heads=heads))
            spans = block_spans(copier.plan.paging, pages, [2, 1], 4, skip_prefix_tokens=5)
            copier.unpack(copier.place(spans), slots)
            got = mine[:, pages].permute(0, 2, 3, 1, 4, 5).reshape(len(layers), 2, 2, 64, 64)  # L P H T D
            want = whole[layers.start : layers.stop, written][..., heads.start : heads.stop, :]
            want = want.permute(0, 2, 4, 1, 3, 5).reshape(len(layers), 2, 2, 64, 64)
            assert torch.equal(got[..., 5:, :], want[..., 5:, :])
            assert not got[..., :5, :].any()


def test_what_cannot_be_reached_is_refused():
    stored = StoredBlock(block_dims=(1, 1, 1, 1, 4, 16), dtype="uint8")
    view = torch.zeros(3, 1, 1, 4, 16, dtype=torch.uint8, device=DEVICE)
    copier = GpuCopier(plan_copy([view], stored))
    spans = copier.place(block_spans(copier.plan.paging, [1], [0], 2))
    with pytest.raises(ValueError, match="pageable"):
        copier.pack(spans, torch.zeros(2, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="CUDA device"):
        GpuCopier(plan_copy([view.cpu()], stored))
    with pytest.raises(ValueError, match="host memory"):
        block_spans(copier.plan.paging, torch.tensor([1], device=DEVICE), [0], 2)
    with pytest.raises(ValueError, match="at least 2 chunks"):
        StagingRing(copier, num_chunks=1)


def test_index_kernels():
    run_launch = runner("index.cu", torch.device(DEVICE))
    rng = np.random.default_rng(3)
    for dtype in (torch.int32, torch.int64):
        for page_size in (1, 4, 16):
            lengths = rng.integers(0, 70, 300).tolist()
            counts = [index_oracle.num_pages(length, page_size) for length in lengths]
            pages = rng.permutation(sum(counts)).tolist()
            batch = index.make_batch(lengths, page_size, DEVICE)
            given = torch.tensor(pages, dtype=dtype, device=batch.device)
            slots = index.pages_to_slots(batch, given, run_launch)
            assert slots.tolist() == index_oracle.pages_to_slots(pages, lengths, page_size)
            assert torch.equal(index.slots_to_pages(batch, slots, run_launch), given)
            counts, last = index.last_pages(batch, slots, run_launch)
            assert (counts.tolist(), last.tolist()) == index_oracle.last_pages(slots.tolist(), lengths, page_size)


def test_the_benchmark_measures_every_way_and_checks_ours():
    rows = run_gpu(["70B/TP8", "MLA"], [16], [3], 1, 1 << 30, lambda text: None)
    assert {row["direction"] for row in rows} == {"pack", "unpack", "gpu_to_host", "host_to_gpu", "both", BESIDE}
    assert {"limit", "ours", "torch_gather", "memcpy_per_fragment"} <= {row["way"] for row in rows}
    assert all(row["gb_per_s"] > 0 for row in rows if row["way"] != "no_load")
    assert all(row["product_ms"] > 0 for row in rows if row["direction"] == BESIDE)


def test_a_thread_that_never_used_cuda_can_copy():
    case = Case(7, "BPTHD", "bfloat16", token_mode=False)
    engines, buffer, copier = placed_case(case, "pinned")
    spans, failed = case.spans(copier.plan.paging), []

    def copy():
        try:
            copier.pack(copier.place(spans), case.slots_of(buffer))
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(60)
    assert failed == []
    assert_equal(case, engines, buffer, True)
