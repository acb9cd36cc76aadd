"""A window layer hands out what the one of transformers does, and has all columns until it is told to forget them."""

from __future__ import annotations

import io
import random
import zipfile

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstore.errors import LayoutMismatch
from kvstore.integrations.transformers.cache.window_layer import KeptWindowLayer

ROWS, HEADS, DIM = 2, 2, 4


class Trio:
    """The same steps on three layers: the window with and without the past, and full attention."""

    def __init__(self, window):
        self.kept, self.own, self.full = KeptWindowLayer(window), DynamicSlidingWindowLayer(window), DynamicLayer()
        self.layers, self.num_rows = (self.kept, self.own, self.full), ROWS

    def update(self, num_columns):
        new = [torch.randn(self.num_rows, HEADS, num_columns, DIM) for _ in "kv"]
        assert self.kept.get_mask_sizes(num_columns) == self.own.get_mask_sizes(num_columns)
        kept, own, _ = (layer.update(*new) for layer in self.layers)
        for one, other in zip(kept, own, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()

    def each(self, verb, *args):
        for layer in self.layers:
            getattr(layer, verb)(*args)

    def check(self):
        assert self.kept.get_seq_length() == self.own.get_seq_length() == self.kept.num_columns()
        for one, other in ((self.kept.keys, self.own.keys), (self.kept.values, self.own.values)):
            assert torch.equal(one, other)
        keys, values = self.kept.whole()
        assert torch.equal(keys, self.full.keys)
        assert torch.equal(values, self.full.values)


def tensors_of(layer):
    """Return the bytes of all memory that a layer's tensors keep."""
    file = io.BytesIO()
    torch.save(layer, file)
    return [each.file_size for each in zipfile.ZipFile(file).infolist() if "/data/" in each.filename]


@pytest.mark.parametrize("window", [2, 3, 8, 24])
@pytest.mark.parametrize("seed", range(4))
def test_any_steps_leave_what_full_attention_has(window, seed):
    choose = random.Random(seed)
    torch.manual_seed(seed)
    trio = Trio(window)
    for step in range(60):
        trio.update(choose.choice((1, 1, 1, 2, 7, 16, 40)))
        if choose.random() < 0.3:
            rows = torch.tensor([choose.randrange(trio.num_rows) for _ in range(trio.num_rows)])
            trio.each(choose.choice(("reorder_cache", "batch_select_indices")), rows)
        if step == 5:
            trio.each("batch_repeat_interleave", 2)
            trio.num_rows *= 2
        if step % 3 == 0 or step == 59:
            trio.check()


@pytest.mark.parametrize("num_first", [3, 8, 9, 50])
def test_steps_that_are_taken_back(num_first):
    trio, choose = Trio(8), random.Random(num_first)
    for layer in (trio.kept, trio.own):
        layer.activate_past_recording()
    trio.update(num_first)
    for _ in range(30):
        num_candidates = choose.randrange(1, 6)
        trio.update(num_candidates)
        trio.each("crop", -choose.randrange(num_candidates))
        trio.check()


def test_too_many_columns_that_are_taken_back_leave_nothing_to_save():
    layer = KeptWindowLayer(8)
    layer.update(*torch.randn(2, ROWS, HEADS, 50, DIM))
    layer.activate_past_recording()
    layer.crop(-20)
    for _ in range(30):
        layer.update(*torch.randn(2, ROWS, HEADS, 1, DIM))
        assert layer.num_columns() == 0
        with pytest.raises(LayoutMismatch, match="wanted all"):
            layer.whole()


def test_what_is_forgotten_is_not_kept_again():
    layer = KeptWindowLayer(8)
    layer.update(*torch.randn(2, ROWS, HEADS, 50, DIM))
    layer.forget()
    layer.update(*torch.randn(2, ROWS, HEADS, 5, DIM))
    assert layer.num_columns() == layer.get_seq_length() == 55
    with pytest.raises(LayoutMismatch, match="window of 8 tokens"):
        layer.whole()
    layer.reset()
    assert layer.num_columns() == 0


def test_a_layer_that_is_reset_begins_anew():
    trio = Trio(8)
    trio.update(50)
    trio.each("reset")
    trio.update(20)
    trio.check()


@pytest.mark.parametrize("num_columns", [1, 5, 100])
def test_a_long_answer_is_a_few_tensors_and_each_column_is_kept_once(num_columns):
    layer = KeptWindowLayer(32)
    for _ in range(0, 1000, num_columns):
        layer.update(*torch.randn(2, ROWS, HEADS, num_columns, DIM))
    column_bytes = 2 * ROWS * HEADS * DIM * 4
    assert len(tensors_of(layer)) < 30
    assert sum(tensors_of(layer)) < 2 * (1000 + 32 + 100) * column_bytes
    layer.whole()
    assert sum(tensors_of(layer)) < (1000 + 32 + 100) * column_bytes
    layer.forget()
    assert sum(tensors_of(layer)) <= (32 + 100) * column_bytes


def test_other_caches_get_the_layers_of_transformers():
    from transformers import DynamicCache, MistralConfig

    cache = DynamicCache(config=MistralConfig(num_hidden_layers=1, sliding_window=8))
    assert type(cache.layers[0]) is DynamicSlidingWindowLayer
