"""A namespace, chains and a tokenizer for the tests of the router's parts."""

from __future__ import annotations

from kvstore import KVShape, Namespace

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32", block_size=4)
SPACE = Namespace(model="a model", shape=SHAPE, salt=b"tenant", revision="main", quantization='{"cache": "auto"}')


def chain(*tokens: int):
    """Return the hashes of a prompt whose blocks have four times each of these tokens."""
    return SPACE.block_hashes([token for token in tokens for _ in range(4)])


class Letters:
    """A tokenizer with one token for each character; a special one begins a text."""

    begin = 1

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [*([self.begin] if add_special_tokens else []), *map(ord, text)]}
