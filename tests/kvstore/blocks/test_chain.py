import pytest

from kvstore.blocks.chain import HASH_BYTES, BlockHashes, decode_chain
from kvstore.blocks.codec import encode
from kvstore.errors import ChainBroken, InvalidRequest, KVStoreError, ProtocolError

NAMESPACE = b"n" * 32
HASHES = [bytes([i]) * 32 for i in range(1, 6)]
CHAIN = BlockHashes(NAMESPACE, NAMESPACE, 0, b"".join(HASHES))


def test_hashes_one_by_one_and_all():
    assert len(CHAIN) == 5
    assert CHAIN.hashes() == HASHES
    assert [CHAIN.hash_at(i) for i in range(5)] == HASHES


def test_tail_knows_its_parent_and_start():
    assert CHAIN.tail(0) is CHAIN
    tail = CHAIN.tail(2)
    assert (tail.parent, tail.start, tail.hashes()) == (HASHES[1], 2, HASHES[2:])
    assert tail.tail(1) == CHAIN.tail(3)
    assert len(CHAIN.tail(5)) == 0


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("head", lambda: CHAIN.head(1.5)), ("head", lambda: CHAIN.head(None)), ("tail", lambda: CHAIN.tail("a")),
        ("join", lambda: BlockHashes.join(CHAIN, None)), ("join", lambda: BlockHashes.join(b"", CHAIN)),
        ("common_prefix", lambda: CHAIN.common_prefix(None)),
    ],
)  # fmt: skip
def test_verbs_of_a_run_say_what_they_want(verb, call):
    with pytest.raises(InvalidRequest, match=f"BlockHashes.{verb}: wanted"):
        call()


def test_head_keeps_parent_and_start():
    head = CHAIN.tail(1).head(2)
    assert (head.parent, head.start, head.hashes()) == (HASHES[0], 1, HASHES[1:3])
    assert len(CHAIN.head(0)) == 0
    assert CHAIN.head(9) == CHAIN


@pytest.mark.parametrize(
    "chain", [CHAIN, CHAIN.tail(3), CHAIN.head(0), BlockHashes(NAMESPACE, HASHES[0], 2**32 - 1, b"")]
)
def test_round_trip(chain):
    assert decode_chain(chain.encode()) == chain
    assert decode_chain(memoryview(chain.encode())) == chain
    assert isinstance(decode_chain(memoryview(chain.encode())).data, bytes)


@pytest.mark.parametrize("cut", [1, HASH_BYTES - 1, 5 * HASH_BYTES + 1, len(CHAIN.encode())])
def test_cut_bytes_are_refused(cut):
    with pytest.raises(ProtocolError, match="no BlockHashes"):
        decode_chain(CHAIN.encode()[:-cut])


@pytest.mark.parametrize("num_bytes", [1, HASH_BYTES - 1, 5 * HASH_BYTES + 1])
def test_parts_of_a_hash_are_refused(num_bytes):
    with pytest.raises(ChainBroken, match="whole hashes"):
        decode_chain(encode([NAMESPACE, NAMESPACE, 0, bytes(num_bytes)]))


@pytest.mark.parametrize(
    "fields",
    [[bytes(31), bytes(32), 0], [bytes(32), bytes(33), 0], [bytes(32)] * 2 + [-1], [bytes(32)] * 2 + [1 << 32]],
)
def test_what_is_no_chain_is_refused(fields):
    with pytest.raises(ProtocolError, match="no BlockHashes"):
        decode_chain(encode([*fields, b""]))


@pytest.mark.parametrize(("start", "count"), [(2**32 - 1, 1), (2**32 - 3, 3), (2**32 - 2, 2), (2**32, 0), (2**70, 0)])
def test_a_run_that_ends_where_no_message_can_say_it_is_refused(start, count):
    """A store that took it would ask its peers what they cannot decode, and they would cut it off for everybody."""
    with pytest.raises(InvalidRequest, match="wanted the run to end at block 4294967295 at most"):
        BlockHashes(NAMESPACE, HASHES[-1], start, b"".join(HASHES[:count]))


def test_a_run_that_ends_where_no_message_can_say_it_is_refused_on_the_wire():
    ends_last = BlockHashes(NAMESPACE, HASHES[-1], 2**32 - 3, b"".join(HASHES[:2]))
    assert decode_chain(ends_last.encode()) == ends_last
    assert ends_last.tail(2).start == 2**32 - 1
    with pytest.raises(KVStoreError, match="wanted the run to end at block 4294967295 at most"):
        decode_chain(encode([NAMESPACE, HASHES[-1], 2**32 - 1, HASHES[0]]))


def test_a_block_named_twice_is_refused():
    CHAIN.check_unique()
    with pytest.raises(ChainBroken, match=r"wanted 6 different block hashes, .* got 5"):
        BlockHashes(NAMESPACE, NAMESPACE, 0, CHAIN.data + HASHES[2]).check_unique()


def test_hashes_that_begin_alike_are_different_all_the_same():
    alike = [b"same 8 b" + bytes([i]) * 24 for i in range(4)]
    run = BlockHashes(b"n" * 32, b"same 8 b" + b"p" * 24, 3, b"".join(alike))
    run.check_unique()
    with pytest.raises(ChainBroken):
        BlockHashes(run.namespace, run.parent, 3, run.data + alike[0]).check_unique()
    with pytest.raises(ChainBroken):
        BlockHashes(run.namespace, alike[3], 3, run.data).check_unique()


def test_a_block_that_is_its_own_parent_is_refused():
    with pytest.raises(ChainBroken, match="none of them"):
        BlockHashes(b"n" * 32, CHAIN.hash_at(2), 3, CHAIN.data).check_unique()


def test_each_piece_of_a_chain_knows_the_key_of_its_root():
    key = int.from_bytes(HASHES[0][:4], "little")
    assert CHAIN.root_key == CHAIN.head(1).root_key == CHAIN.tail(3).root_key == CHAIN[1:4][1:].root_key == key
    assert BlockHashes.join(CHAIN.head(2), CHAIN.tail(2)) == CHAIN
    assert decode_chain(CHAIN.tail(3).encode()).root_key == key
    assert CHAIN.head(0).root_key == 0


def test_a_run_that_was_made_by_hand_knows_it_only_at_the_start_of_its_chain():
    by_hand = BlockHashes(NAMESPACE, HASHES[0], 1, HASHES[1])
    assert by_hand.root_key == 0
    assert BlockHashes.join(by_hand, CHAIN.tail(2)).root_key == CHAIN.root_key
    assert BlockHashes(NAMESPACE, NAMESPACE, 0, CHAIN.data, 77).root_key == CHAIN.root_key, "the data decide"
    assert BlockHashes(NAMESPACE, HASHES[0], 1, HASHES[1], 77).root_key == 77


def test_runs_of_the_same_blocks_are_equal_whether_their_root_is_known_or_not():
    by_hand = BlockHashes(NAMESPACE, HASHES[0], 1, CHAIN.data[32:])
    assert by_hand == CHAIN.tail(1)
    assert {by_hand: 1}[CHAIN.tail(1)] == 1
    assert decode_chain(by_hand.encode()) == CHAIN.tail(1)
    assert by_hand != CHAIN.tail(2)
    assert by_hand != by_hand.data


@pytest.mark.parametrize("root_key", [-1, 1 << 32, 1.0, None, True])
def test_what_is_no_root_key_is_refused(root_key):
    with pytest.raises(InvalidRequest, match="root_key from 0 to"):
        BlockHashes(NAMESPACE, HASHES[0], 1, HASHES[1], root_key)
