"""A namespace that travels as text makes the same hashes, or is refused."""

from __future__ import annotations

import json

import pytest

from kvstore import KVShape, Namespace
from kvstore.blocks.shape import SideTensor
from kvstore.errors import InvalidRequest
from kvstore.integrations.space_text import space_from_text, space_to_text

SHAPE = KVShape(
    num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16", block_size=32, planes="packed", num_layer_groups=2,
    sides=[SideTensor(name="scales", dtype="float32", dim=2, per_token=False)],
)  # fmt: skip
SPACE = Namespace(model="/a/model", shape=SHAPE, salt=b"\x00\xff", revision="r", lora="l", quantization='{"a": 1}')


def test_a_namespace_comes_back_with_the_same_hashes():
    back = space_from_text(space_to_text(SPACE))

    assert back == SPACE
    assert back.block_hashes(range(64)) == SPACE.block_hashes(range(64))
    assert back.shape.block_bytes == SHAPE.block_bytes


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "x", '{"digest": "", "shape": {}}', "[" * 100_000])
def test_what_is_no_such_text_is_refused(text):
    with pytest.raises(InvalidRequest, match="wanted the text"):
        space_from_text(text)


def test_a_namespace_whose_hashes_would_be_others_is_refused():
    said = json.loads(space_to_text(SPACE))
    with pytest.raises(InvalidRequest, match="same version"):
        space_from_text(json.dumps({**said, "model": "another"}))
    with pytest.raises(InvalidRequest, match="wanted the text"):
        space_from_text(json.dumps({**said, "shape": {**said["shape"], "num_layers": 0}}))


def test_the_namespace_of_a_private_tenant_comes_back_as_its_own():
    private = Namespace(model="m", shape=SHAPE, tenant="team-a")
    assert space_from_text(space_to_text(private)) == private
    assert private.digest != Namespace(model="m", shape=SHAPE).digest
