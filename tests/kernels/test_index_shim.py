"""index.cu, executed on the CPU, against its oracle, with the edge cases that page code gets wrong."""

import numpy as np
import pytest
import torch

from kvstore.kernels import index
from kvstore.kernels import reference_index as oracle

LENGTHS = [[3, 0], [0, 3], [0, 0], [0], [], [4], [8], [5, 4, 0, 1, 9], [1, 1, 1], [0, 7, 0, 0, 8, 3, 0]]
DTYPES = [torch.int32, torch.int64]


def guarded(values, dtype):
    """A tensor between guards, so that reading past it would be seen as another value."""
    whole = torch.full((len(values) + 8,), -77, dtype=dtype)
    whole[4 : 4 + len(values)] = torch.tensor(values, dtype=dtype)
    return whole[4 : 4 + len(values)]


def slots_of(lengths, page_size, seed=0, num_pages=64):
    """Token slots as an allocator of pages gives them, page 0 first."""
    rng, slots = np.random.default_rng(seed), []
    free = [0, *(1 + rng.permutation(num_pages - 1)).tolist()]
    for length in lengths:
        for begin in range(0, length, page_size):
            page = free.pop(0)
            slots += [page * page_size + at for at in range(min(page_size, length - begin))]
    return slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_slots_and_pages_there_and_back(shim, lengths, page_size, dtype):
    slots = slots_of(lengths, page_size)
    batch = index.make_batch(lengths, page_size, "cpu")
    given = guarded(slots, dtype)
    pages = index.slots_to_pages(batch, given, shim.run)
    assert pages.tolist() == oracle.slots_to_pages(slots, lengths, page_size)
    assert pages.tolist().count(0) == (1 if slots else 0)  # page 0 is a page, and comes back as one
    assert index.pages_to_slots(batch, guarded(pages.tolist(), dtype), shim.run).tolist() == slots
    counts, last = index.last_pages(batch, given, shim.run)
    assert (counts.tolist(), last.tolist()) == oracle.last_pages(slots, lengths, page_size)
    assert given.tolist() == slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(20))
def test_random_slots(shim, seed, dtype):
    rng = np.random.default_rng(seed)
    page_size = int(rng.integers(1, 9))
    lengths = rng.integers(0, 20, rng.integers(1, 7)).tolist()
    slots = np.array(slots_of(lengths, page_size, seed), np.int64)
    for place in rng.permutation(len(slots))[:3]:
        slots[place] = rng.choice([-1, slots[place] + 1, 0])
    batch = index.make_batch(lengths, page_size, "cpu")
    pages = index.slots_to_pages(batch, guarded(slots.tolist(), dtype), shim.run).tolist()
    assert pages == oracle.slots_to_pages(slots.tolist(), lengths, page_size)
    assert index.pages_to_slots(batch, guarded(pages, dtype), shim.run).tolist() == oracle.pages_to_slots(
        pages, lengths, page_size
    )


def test_the_last_length_at_every_boundary(shim):
    for page_size in (1, 4, 16):
        lengths = [0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size]
        batch = index.make_batch(lengths, page_size, "cpu")
        slots = torch.tensor(slots_of(lengths, page_size))
        counts = index.last_pages(batch, slots, shim.run)[0].tolist()
        assert counts == [length and (length - 1) % page_size + 1 for length in lengths]


def test_a_prefix_that_is_not_page_aligned_is_seen(shim):
    # Tokens 0..2 in page 1, then a fresh page: from there on a token's place in its page is not its own.
    batch = index.make_batch([6], 4, "cpu")
    pages = index.slots_to_pages(batch, torch.tensor([4, 5, 6, 8, 9, 10]), shim.run)
    assert pages.tolist() == [-1, -1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_ragged_repack(shim, lengths, dtype):
    rng = np.random.default_rng(len(lengths))
    whole = torch.from_numpy(rng.integers(0, 99, (9, 7))).to(dtype)
    table, rows = whole[:, :5], rng.permutation(9)[: len(lengths)].tolist()
    before = whole.clone()
    batch = index.make_batch(lengths, 2, "cpu")
    pages = index.repack_pages(batch, table, rows, shim.run, capacity=batch.num_pages)
    counts = [oracle.num_pages(length, 2) for length in lengths]
    assert pages.tolist() == oracle.repack_pages(table.tolist(), rows, counts)
    assert torch.equal(whole, before)


def test_many_more_sequences_than_thread_blocks(shim):
    lengths = [at % 3 for at in range(3000)]
    slots = slots_of(lengths, 2, num_pages=4000)
    batch = index.make_batch(lengths, 2, "cpu")
    assert index.slots_to_pages(batch, torch.tensor(slots), shim.run).tolist() == oracle.slots_to_pages(
        slots, lengths, 2
    )


def test_nothing_is_written_past_the_end(shim, monkeypatch):
    """Outputs are made by torch.empty: here they lie between guards."""
    made = []

    def empty(count, dtype, device):
        made.append(torch.full((count + 8,), -77, dtype=dtype))
        return made[-1][4 : count + 4]

    monkeypatch.setattr(torch, "empty", empty)
    for lengths in LENGTHS:
        batch = index.make_batch(lengths, 4, "cpu")
        slots = torch.tensor(slots_of(lengths, 4), dtype=torch.int64)
        pages = index.slots_to_pages(batch, slots, shim.run)
        index.pages_to_slots(batch, pages, shim.run)
        index.last_pages(batch, slots, shim.run)
    assert len(made) == 3 * len(LENGTHS)
    assert all((whole[:4] == -77).all() and (whole[-4:] == -77).all() for whole in made)


def must_not_run(launch):
    raise AssertionError(f"launched {launch.name}")


BATCH = index.make_batch([3, 0, 5], 4, "cpu")
TABLE = torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: index.make_batch([3, -1], 4, "cpu"), "lengths >= 0"),
        (lambda: index.make_batch([1.5], 4, "cpu"), "float64"),
        (lambda: index.make_batch([1], 0, "cpu"), "page_size=0"),
        (lambda: index.split_evenly(5, 2), "multiple of 2 sequences, got 5"),
        (lambda: index.slots_to_pages(BATCH, torch.zeros(7, dtype=torch.int32), must_not_run), "wanted 8"),
        (lambda: index.slots_to_pages(BATCH, torch.zeros(8), must_not_run), "int32 or int64"),
        (lambda: index.slots_to_pages(BATCH, torch.zeros(8, dtype=torch.int32).to("meta"), must_not_run), "meta"),
        (lambda: index.pages_to_slots(BATCH, torch.zeros(4, dtype=torch.int32), must_not_run), "wanted 3"),
        (lambda: index.repack_pages(BATCH, TABLE, [0, 1], must_not_run), "each of 3 sequences"),
        (lambda: index.repack_pages(BATCH, TABLE, [0, 1, 3], must_not_run), r"in \[0, 3\)"),
        (lambda: index.repack_pages(BATCH, TABLE[:, :1], [0, 1, 2], must_not_run), "at most 1 pages"),
        (lambda: index.repack_pages(BATCH, TABLE, [0, 1, 2], must_not_run, capacity=2), "at most 2 pages, got 3"),
        (lambda: index.repack_pages(BATCH, TABLE.T, [0, 1, 1], must_not_run), "dense rows"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert index.split_evenly(6, 2) == 3
