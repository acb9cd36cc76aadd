import array
import hashlib
import json
import math
import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.blocks.hashing import BlockHashes, Namespace, space_of_tenant
from kvstore.blocks.shape import KVShape
from kvstore.errors import ChainBroken, ConfigError, InvalidRequest, NamespaceMismatch

SHAPE = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float16", "block_size": 4}
TOKENS = list(range(100, 112))
LAST_HEX = "af9bb8a2e766f093ac426d655bc7e0d7f51e132e649de9bfd38d16011bf3445a"
LAST_WITH_EXTRA_HEX = "2412f82a1fb11f01dadca3c78985f7093cd629f83644973c7f0d4011a99ce847"
WRAPPED_HEX = "c997f395ee6d4e8730d1d4122c32c88e47e696bd797da4afeeaaa45281ef46f8"
FIXED = """
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
shape = KVShape(num_layers=4, num_kv_heads=2, head_dim=8, dtype="float16", block_size=4)
space = Namespace(model="m", shape=shape, salt=bytes([0, 255]), revision="r", lora="l", quantization="q")
print(space.block_hashes(range(100, 112))[-1].hex())
print(space.block_hashes(range(100, 112), extra=[None, ["a", b"b", -3], []])[-1].hex())
print(space.wrap([b"engine", 7, -7])[-1].hex())
"""


def space(shape=None, **changes):
    base = {"model": "m", "shape": KVShape(**(SHAPE | (shape or {})))}
    return Namespace(**(base | changes))


def full_space():
    return space(salt=b"\x00\xff", revision="r", lora="l", quantization="q")


def expected_digest():
    shape_json = (
        '{"block_order_version":1,"block_size":4,"dtype":"float16","head_dim":8,"num_kv_heads":2,'
        '"num_layer_groups":1,"num_layers":4,"planes":"kv"}'
    )
    fields = {"model": "m", "salt": "00ff", "revision": "r", "lora": "l", "quantization": "q"}
    fields["shape"] = shape_json.encode().hex()
    text = json.dumps(dict(sorted(fields.items())), separators=(",", ":"))
    return hashlib.sha256(b"raykv/namespace/1" + text.encode()).digest()


def test_against_an_independent_implementation_and_fixed_values():
    last = expected_digest()
    assert full_space().digest == last
    for first in (100, 104, 108):
        last = hashlib.sha256(last + struct.pack("<4I", *range(first, first + 4))).digest()
    hashes = full_space().block_hashes(TOKENS)
    assert hashes[-1] == last
    assert last.hex() == LAST_HEX


def test_extra_keys_against_an_independent_implementation():
    def item(tag, encoded):
        return tag + struct.pack("<Q", len(encoded)) + encoded

    keys = struct.pack("<Q", 3) + item(b"s", b"a") + item(b"b", b"b") + item(b"i", b"\xfd")
    last = expected_digest()
    for first in (100, 104, 108):
        tail = b"x" + hashlib.sha256(keys).digest() if first == 104 else b""
        last = hashlib.sha256(last + struct.pack("<4I", *range(first, first + 4)) + tail).digest()
    assert full_space().block_hashes(TOKENS, extra=[None, ["a", b"b", -3], []])[-1] == last
    assert last.hex() == LAST_WITH_EXTRA_HEX


def test_wrap_against_an_independent_implementation():
    def one(tag, encoded):
        framed = tag + struct.pack("<Q", len(encoded)) + encoded
        return hashlib.sha256(b"raykv/wrap/1" + expected_digest() + framed).digest()

    wrapped = full_space().wrap([b"engine", 7, -7])
    assert list(wrapped) == [one(b"b", b"engine"), one(b"i", b"\x07"), one(b"i", b"\xf9")]
    assert wrapped[-1].hex() == WRAPPED_HEX


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_same_in_every_process(seed):
    out = subprocess.run(
        [sys.executable, "-c", FIXED],
        env=os.environ | {"PYTHONHASHSEED": seed},
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert out.stdout.split() == [LAST_HEX, LAST_WITH_EXTRA_HEX, WRAPPED_HEX]


def first_hash(namespace, **kwargs):
    return namespace.block_hashes(list(range(64)), **kwargs)[0]


def test_each_part_of_the_identity_alone_changes_the_first_hash():
    extra_of = {
        "media": [["image-1"]] + [None] * 15,
        "other media": [["image-2"]] + [None] * 15,
        "lora per block": [["lora", "a"]] + [None] * 15,
        "number": [[1]] + [None] * 15,
    }
    found = {
        "base": first_hash(space()),
        "model": first_hash(space(model="other")),
        "salt": first_hash(space(salt=b"tenant")),
        "empty byte salt": first_hash(space(salt=b"\x00")),
        "revision": first_hash(space(revision="x")),
        "lora": first_hash(space(lora="x")),
        "quantization": first_hash(space(quantization="x")),
        "num_layers": first_hash(space({"num_layers": 8})),
        "num_kv_heads": first_hash(space({"num_kv_heads": 4})),
        "head_dim": first_hash(space({"head_dim": 16})),
        "dtype bf16": first_hash(space({"dtype": "bfloat16"})),
        "dtype e4m3": first_hash(space({"dtype": "float8_e4m3fn"})),
        "dtype e5m2": first_hash(space({"dtype": "float8_e5m2"})),
        "dtype int8": first_hash(space({"dtype": "int8"})),
        "dtype uint8": first_hash(space({"dtype": "uint8"})),
        "block_size": first_hash(space({"block_size": 8})),
        "packed": first_hash(space({"planes": "packed"})),
        "single": first_hash(space({"planes": "single"})),
        "num_layer_groups": first_hash(space({"num_layer_groups": 2})),
    } | {name: first_hash(space(), extra=extra) for name, extra in extra_of.items()}
    assert len(set(found.values())) == len(found)


def test_namespace_equality_and_pickling():
    assert full_space() == full_space()
    again = pickle.loads(pickle.dumps(full_space()))
    assert again == full_space()
    assert again.digest == full_space().digest
    with pytest.raises(TypeError):
        Namespace("m", full_space().shape)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": ""},
        {"model": None},
        {"model": b"m"},
        {"salt": "text"},
        {"salt": bytearray(b"x")},
        {"lora": None},
        {"revision": 3},
        {"lora": "\ud83d\ude00"},
    ],
)
def test_bad_namespaces_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        space(**changes)
    with pytest.raises(ConfigError, match="shape"):
        Namespace(model="m", shape=None)


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        lambda tokens: np.array(tokens, np.int32),
        lambda tokens: np.array(tokens, np.uint64),
        lambda tokens: np.array(tokens, ">i4"),
        lambda tokens: np.repeat(np.array(tokens), 2)[::2],
        lambda tokens: array.array("l", tokens),
        lambda tokens: range(tokens[0], tokens[-1] + 1),
    ],
)
def test_any_kind_of_integers(make):
    assert space().block_hashes(make(TOKENS)) == space().block_hashes(TOKENS)


def test_torch_tokens():
    torch = pytest.importorskip("torch")
    assert space().block_hashes(torch.tensor(TOKENS)) == space().block_hashes(TOKENS)


def test_the_whole_token_range_is_told_apart():
    tokens = [0, 1, 255, 256, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    found = {space().block_hashes([token] * 4)[0] for token in tokens}
    assert len(found) == len(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        [-1, 1, 2, 3],
        [2**32, 1, 2, 3],
        [2**64, 1, 2, 3],
        [2**63, -1, 2, 3],
        [1.0, 2.0, 3.0, 4.0],
        [True, False],
        ["a"],
        [None],
        "text",
        b"text",
        [[1, 2], [3, 4]],
        [[1, 2], [3]],
        np.zeros((0, 4), np.int64),
        5,
        None,
        (token for token in TOKENS),
    ],
)
def test_bad_tokens_are_refused(tokens):
    with pytest.raises(InvalidRequest, match="wanted"):
        space().block_hashes(tokens)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_no_full_block(count):
    hashes = space().block_hashes(TOKENS[:count])
    assert (len(hashes), hashes.start, hashes.parent, list(hashes)) == (0, 0, space().digest, [])
    assert space().block_hashes(TOKENS[:count], extra=[]) == hashes
    assert "blocks=[0, 0)" in repr(hashes)


def test_partial_block_is_left_out():
    assert space().block_hashes(TOKENS[:11]) == space().block_hashes(TOKENS[:8])


@pytest.mark.parametrize("extra", [[], [None], [None] * 4, "abc", b"abc"])
def test_extra_needs_one_entry_per_full_block(extra):
    with pytest.raises(InvalidRequest, match="extra"):
        space().block_hashes([*TOKENS, 1], extra=extra)


@pytest.mark.parametrize("extra", [5, iter([None] * 3), {None}, {"a": ("b",)}, {None: ("b",)}, {1.0: ("b",)}])
def test_extra_is_a_list_or_a_mapping(extra):
    with pytest.raises(InvalidRequest, match="block_hashes: wanted extra as a"):
        space().block_hashes(TOKENS, extra=extra)


def test_blocks_may_be_counted_by_numpy():
    assert space().block_hashes(TOKENS, {np.int64(1): ["a"]}) == space().block_hashes(TOKENS, {1: ["a"]})


@pytest.mark.parametrize("hashes", [None, 5, np.array(5)])
def test_wrap_wants_a_sequence(hashes):
    with pytest.raises(InvalidRequest, match="wrap: wanted a sequence of hashes, got"):
        space().wrap(hashes)


@pytest.mark.parametrize("parent", [1, "a", b"p" * 32, [bytes(32)]])
def test_a_parent_is_a_run(parent):
    with pytest.raises(InvalidRequest, match="block_hashes: wanted parent as the BlockHashes"):
        space().block_hashes(TOKENS, parent=parent)
    with pytest.raises(InvalidRequest, match="wrap: wanted parent as the BlockHashes"):
        space().wrap([1], parent)


@pytest.mark.parametrize("entry", ["bare", b"bare", [1.5], [None], [True], [("a", 1.5)], 3, {"a"}])
def test_bad_extra_keys_are_refused(entry):
    with pytest.raises(InvalidRequest, match="extra keys"):
        space().block_hashes(TOKENS, extra=[None, entry, None])


def test_extra_of_nothing_is_no_extra():
    assert space().block_hashes(TOKENS, extra=[None, (), []]) == space().block_hashes(TOKENS)


def test_extra_changes_its_block_and_all_after_it():
    plain = space().block_hashes(TOKENS)
    other = space().block_hashes(TOKENS, extra=[None, ["image"], None])
    assert plain.common_prefix(other) == 1


def test_extra_encodings_do_not_collide():
    entries = [
        ["ab"],
        ["a", "b"],
        ["b", "a"],
        ["", "ab"],
        ["ab", ""],
        [b"ab"],
        [b"a", b"b"],
        ["a", b"b"],
        [1],
        ["1"],
        [b"1"],
        [b"\x01"],
        [-1],
        [255],
        [b"\xff"],
        [0],
        [b""],
        [""],
        [256],
        [1, 0],
        [-(2**70)],
        [2**70],
        ["\ud83d\ude00"],
        ["\U0001f600"],
    ]
    found = {space().block_hashes(TOKENS[:4], extra=[entry])[0] for entry in entries}
    assert len(found) == len(entries)


def test_wrap_tells_types_signs_and_namespaces_apart():
    engine = [0, 1, -1, 255, -256, 2**63, -(2**63), 2**64 - 1, 2**300, b"\x01", b"\xff", b"\x00", b"\x01\x00"]
    wrapped = space().wrap(engine)
    assert len(set(wrapped)) == len(engine)
    assert wrapped.parent == space().digest
    assert not set(wrapped) & set(space(salt=b"x").wrap(engine))
    assert wrapped == space().wrap(tuple(engine))


def test_wrapped_hashes_never_equal_token_hashes():
    hashes = space().block_hashes(TOKENS)
    assert not set(space().wrap(list(hashes))) & set(hashes)


def test_wrap_continues():
    whole = space().wrap([b"a", b"b", b"c"])
    head = space().wrap([b"a"])
    assert BlockHashes.join(head, space().wrap([b"b", b"c"], parent=head)) == whole


@pytest.mark.parametrize("engine", [b"abc", "abc", bytearray(b"a"), [b""], ["a"], [1.0], [True], [None]])
def test_bad_engine_hashes_are_refused(engine):
    with pytest.raises(InvalidRequest, match="wrap"):
        space().wrap(engine)


def test_parent_of_another_namespace_is_refused():
    other = space(salt=b"x").block_hashes(TOKENS)
    with pytest.raises(NamespaceMismatch):
        space().block_hashes(TOKENS, parent=other)
    with pytest.raises(NamespaceMismatch):
        space().wrap([b"a"], parent=other)
    with pytest.raises(NamespaceMismatch):
        BlockHashes.join(space().block_hashes(TOKENS), other)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.integers(0, 15))
def test_chains_continue(tokens, cut_blocks):
    whole = space().block_hashes(tokens)
    cut = 4 * min(cut_blocks, len(whole))
    head = space().block_hashes(tokens[:cut])
    tail = space().block_hashes(tokens[cut:], parent=head)
    assert tail == whole[cut // 4 :]
    assert BlockHashes.join(head, tail) == whole


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=4, max_size=40), st.data())
def test_hashes_agree_exactly_on_the_shared_prefix(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    a, b = space().block_hashes(tokens), space().block_hashes(other)
    shared = min(at // 4, len(a))
    assert a.common_prefix(b) == b.common_prefix(a) == shared
    assert [x == y for x, y in zip(a, b, strict=True)] == [i < shared for i in range(len(a))]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 12), st.data())
def test_slices_are_runs(count, data):
    whole = space().block_hashes(list(range(4 * count)))
    bound = st.none() | st.integers(-count - 2, count + 2)
    first, last = data.draw(bound), data.draw(bound)
    part = whole[first:last]
    assert list(part) == list(whole)[first:last]
    begin = slice(first, last).indices(count)[0]
    assert part.start == begin
    assert part.parent == (whole[begin - 1] if begin else space().digest)
    again = part[1:]
    assert list(again) == list(part)[1:]
    assert BlockHashes.join(BlockHashes.join(whole[:begin], part), whole[begin + len(part) :]) == whole


def test_indexing():
    hashes = space().block_hashes(TOKENS)
    assert hashes[0] == hashes[-3] == hashes.data[:32]
    assert hashes[2] == hashes[-1] == hashes.data[-32:]
    assert list(hashes) == [hashes[0], hashes[1], hashes[2]]
    assert hashes[0] in hashes
    for bad in (3, -4):
        with pytest.raises(IndexError):
            hashes[bad]
    for bad in (slice(None, None, 2), slice(None, None, -1)):
        with pytest.raises(ChainBroken):
            hashes[bad]
    for bad in (None, "1", 1.0, math.nan, np.zeros(2), [0]):
        with pytest.raises(TypeError, match="BlockHashes: wanted an integer or a slice, got "):
            hashes[bad]
    assert hashes[np.int64(1)] == hashes[1]


def test_join_refuses_gaps_overlaps_and_strangers():
    hashes = space().block_hashes(TOKENS)
    other = space().block_hashes([7] * 12)
    for a, b in [
        (hashes[:1], hashes[2:]),
        (hashes[:2], hashes[1:]),
        (hashes[1:], hashes[:1]),
        (hashes[:1], other[1:]),
        (hashes, hashes),
    ]:
        with pytest.raises(ChainBroken):
            BlockHashes.join(a, b)


def test_common_prefix_needs_the_same_first_block():
    hashes = space().block_hashes(TOKENS)
    assert hashes.common_prefix(hashes) == 3
    assert hashes.common_prefix(hashes[:2]) == 2
    assert hashes[1:].common_prefix(hashes) == 0
    assert hashes.common_prefix(space(salt=b"x").block_hashes(TOKENS)) == 0


@pytest.mark.parametrize(
    "args",
    [
        (b"short", 0, b"n" * 32, b""),
        (b"n" * 32, 0, b"short", b""),
        (b"n" * 32, 0, b"n" * 32, b"x" * 31),
        (b"n" * 32, 0, b"n" * 32, bytearray(32)),
        (b"n" * 32, -1, b"n" * 32, b""),
        (b"n" * 32, 0, b"p" * 32, b""),
        (b"n" * 32, 1, b"n" * 32, b""),
        (None, 0, b"n" * 32, b""),
    ],
)
def test_bad_runs_are_refused(args):
    namespace, start, parent, data = args
    with pytest.raises(InvalidRequest, match="wanted"):
        BlockHashes(namespace, parent, start, data)


def test_run_survives_pickling_and_prints_short():
    hashes = space().block_hashes(list(range(4000)))
    assert pickle.loads(pickle.dumps(hashes)) == hashes
    assert len(repr(hashes)) < 100


def test_extra_keys_may_be_tuples_and_nest_without_ambiguity():
    keys = [["a", "b"], [("a", "b")], [("a",), "b"], ["a", ("b",)], [("a", ("b",))], [("ab",)], ["ab"]]
    firsts = {space().block_hashes(TOKENS[:4], extra=[key])[0] for key in keys}
    assert len(firsts) == len(keys)


def test_extra_keys_by_block_index():
    tokens = TOKENS[:12]
    listed = space().block_hashes(tokens, extra=[None, [("image", 7)], None])
    assert space().block_hashes(tokens, extra={1: [("image", 7)]}).data == listed.data
    assert listed[0] == space().block_hashes(tokens)[0]
    with pytest.raises(InvalidRequest, match="3"):
        space().block_hashes(tokens, extra={3: ["x"]})


def test_extra_may_be_any_sequence_of_one_entry_per_block():
    class Entries:
        def __init__(self, entries):
            self.entries = entries

        def __len__(self):
            return len(self.entries)

        def __getitem__(self, index):
            return self.entries[index]

    own, entries = space(), [None, ("a",), None, None]
    tokens = list(range(4 * own.shape.block_size))
    wanted = own.block_hashes(tokens, extra=entries)
    array = np.empty(4, object)
    array[:] = entries
    for extra in (Entries(entries), dict(enumerate(entries)).values(), array):
        assert own.block_hashes(tokens, extra=extra) == wanted


@pytest.mark.parametrize("num_entries", [3, 5])
def test_extra_that_gives_other_entries_than_it_counts_is_refused(num_entries):
    class Table:
        """As a table that counts its rows and gives its columns."""

        def __len__(self):
            return 4

        def __iter__(self):
            return iter([None] * num_entries)

    own = space()
    with pytest.raises(InvalidRequest, match=f"one entry per full block, 4, got {num_entries}"):
        own.block_hashes(range(4 * own.shape.block_size), extra=Table())


def test_blocks_that_continue_a_run_have_the_root_of_its_chain():
    first = space().block_hashes(range(256))
    assert space().block_hashes(range(256, 512), parent=first).root_key == first.root_key != 0
    wrapped = space().wrap([b"a", b"b"])
    assert space().wrap([b"c"], parent=wrapped).root_key == wrapped.root_key != 0


def test_a_tenant_is_part_of_every_hash_and_none_leaves_them_as_they_were():
    names = ["", "a", "b"]
    chains = [space(tenant=name).block_hashes(TOKENS) for name in names]
    assert len({own for chain in chains for own in chain}) == 3 * len(chains[0])
    assert chains[0] == space().block_hashes(TOKENS)
    assert space(salt=b"a").digest != space(tenant="a").digest
    with pytest.raises(ConfigError, match="tenant as text"):
        space(tenant=7)


def test_the_namespace_of_a_tenant_is_its_own_only_where_tenants_are_private():
    plain = space()
    assert space_of_tenant(plain, "a", is_private=False) is plain
    assert space_of_tenant(plain, "", is_private=True) is plain
    private = space_of_tenant(plain, "a", is_private=True)
    assert private == space(tenant="a") == space_of_tenant(private, "a", is_private=True)
    for tenant in ("b", ""):
        with pytest.raises(ConfigError, match="got one of tenant 'a'"):
            space_of_tenant(private, tenant, is_private=True)
