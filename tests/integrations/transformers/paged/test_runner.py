"""The same bits, however much of a prompt was there, and where it ended."""

from __future__ import annotations

import random

import pytest
import torch

from kvstore.errors import InvalidRequest

PROMPT = random.Random(2).choices(range(211), k=100)


@pytest.mark.parametrize("kind", ["full", "window", "both"])
@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
def test_logits_are_those_of_transformers_own_cache(small, plain_logits, same, kind, page_size):
    engine = small(kind, page_size=page_size, num_pages=320 // page_size)
    for num_tokens in (1, 15, 16, 17, 48, 100):  # Each finds the pages of those before.
        request = engine.index.acquire(PROMPT[:num_tokens])
        logits = engine.prefill(request, PROMPT[:num_tokens])
        request.release()
        assert same(logits, plain_logits(engine.model, PROMPT[:num_tokens]))
    assert engine.index.match(PROMPT).num_tokens >= 64


@pytest.mark.parametrize("kind", ["full", "window", "both"])
@pytest.mark.parametrize("piece", [1, 5, 16, 33])
def test_pieces_of_any_size_give_the_same_bits(small, plain_logits, same, kind, piece):
    engine = small(kind, page_size=4, num_pages=40)
    request = engine.index.acquire(PROMPT)
    logits = engine.prefill(request, PROMPT, piece)
    request.release()
    assert same(logits, plain_logits(engine.model, PROMPT))


def test_a_window_needs_pages_for_itself_and_a_piece_only(small, plain_logits, same):
    engine = small("both", page_size=4, num_pages=40, num_window_pages=16)
    request = engine.index.acquire(PROMPT)
    logits = engine.prefill(request, PROMPT, 16)
    assert same(logits, plain_logits(engine.model, PROMPT))
    assert (request.pages(1) >= 0).sum() <= 16 < len(request.pages(1))
    request.release()


def test_a_page_that_is_equal_in_part_is_copied(small, plain_logits, same):
    engine = small("both", page_size=16)
    first = engine.index.acquire(PROMPT)
    engine.prefill(first, PROMPT)
    first.release()
    other = [*PROMPT[:70], 3, 1, 2]
    request = engine.index.acquire(other)
    engine.cache.copy(request.prepare_copy())
    assert request.complete_copy() == 6
    assert same(engine.prefill(request, other), plain_logits(engine.model, other))
    request.release()


def test_drafts_are_checked_in_one_step_and_rejected_ones_leave_nothing(small, plain_logits, same):
    engine = small("both", page_size=4)
    request = engine.index.acquire(PROMPT)
    tokens = [*PROMPT, int(engine.prefill(request, PROMPT).argmax())]
    right = int(plain_logits(engine.model, tokens).argmax())
    for drafts, num_accepted in (([right + 1, 5, 5], 0), ([right, 7, 7, 7, 7, 7], 1)):
        request.prepare_step(1 + len(drafts))
        logits = engine.runner.run(request, tokens + drafts, len(tokens) - 1, 1 + len(drafts))
        assert same(logits[0], plain_logits(engine.model, tokens))
        assert (drafts[0] == int(logits[0].argmax())) == bool(num_accepted)
        request.complete_step(0 if not num_accepted else 2)
    tokens.append(right)
    assert request.num_tokens == len(tokens)
    assert same(engine.runner.run(request, tokens, len(tokens))[0], plain_logits(engine.model, tokens))
    request.release()


def test_known_tokens_are_not_written_again(small, same):
    engine = small("full", page_size=4)
    request = engine.index.acquire(PROMPT[:30])
    engine.prefill(request, PROMPT[:30])
    before = [tensor.clone() for tensor in engine.cache.tensors[0]]
    logits = engine.runner.run(request, PROMPT[:30], 30, 30)
    assert logits.shape == (30, 211)
    assert all(same(old, new) for old, new in zip(before, engine.cache.tensors[0], strict=True))
    request.release()


def test_one_wrong_bit_of_a_page_changes_the_answer(small, plain_logits, same):
    """So equal logits say that every byte was right."""
    engine = small("full", page_size=16)
    first = engine.index.acquire(PROMPT)
    engine.prefill(first, PROMPT)
    page = int(first.pages()[2])
    first.release()
    bits = engine.cache.tensors[0][0].view(torch.int32)
    bits[1, page, 3, 1, 5] ^= 1 << 20
    request = engine.index.acquire(PROMPT)
    assert not same(engine.prefill(request, PROMPT), plain_logits(engine.model, PROMPT))
    request.release()


def test_a_request_has_slots_for_what_is_computed(small):
    engine = small("full")
    request = engine.index.acquire(PROMPT)
    for tokens, known, num_logits in (([], 0, 1), (PROMPT, -1, 1), (PROMPT, 101, 1), (PROMPT, 0, 0), (PROMPT, 0, 101)):
        with pytest.raises(InvalidRequest):
            engine.runner.run(request, tokens, known, num_logits)
    with pytest.raises(InvalidRequest):
        engine.runner.run(request, PROMPT, 0)  # No slots yet.
    request.release()


def test_tokens_that_see_pages_which_were_given_up_are_refused(small, plain_logits, same):
    engine = small("window")
    request = engine.index.acquire(PROMPT)
    engine.prefill(request, PROMPT)  # Trimmed at the end.
    for known, num_logits in ((100, 60), (40, 1)):
        with pytest.raises(InvalidRequest, match="windows"):
            engine.runner.run(request, PROMPT, known, num_logits)
    assert same(engine.runner.run(request, PROMPT, 100)[0], plain_logits(engine.model, PROMPT))
    request.release()


@pytest.mark.parametrize("step_tokens", [0, -1, 1.5, 5000])
def test_steps_of_no_size_are_refused(small, step_tokens):
    with pytest.raises(InvalidRequest, match="step_tokens"):
        small("full", step_tokens=step_tokens)
