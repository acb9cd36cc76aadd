"""What a soak does, drawn from a seed: the chains that all clients share, each client's operations, the faults.

The choices are the same in every run of one seed; when they happen, and what they meet, is not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np

import kvstore
from kvstore.blocks.hashing import BlockHashes
from kvstore.disk.records import PAGE_BYTES, RECORD_BYTES

#: 32 KiB a block.
SHAPE = kvstore.KVShape(num_layers=2, num_kv_heads=4, head_dim=64, dtype="bfloat16", block_size=16)
#: 384 slots for about 1,400 different blocks, so that eviction never ends.
CAPACITY_BYTES = 384 * SHAPE.block_bytes
NUM_ROOTS, NUM_BRANCHES, CHAIN_BLOCKS = 12, 6, 40
#: Room on the disk of a node for nearly all of them, so that blocks are evicted there, too, now and then.
DISK_CAPACITY_BYTES = 1400 * (SHAPE.block_bytes + PAGE_BYTES + RECORD_BYTES)

#: Processes that save one block in parts, on each node.
NUM_RANKS = 2

#: Short times, so that every deadline is met many times.
SETTINGS = {
    "lease_ttl_s": 5.0,
    "lease_margin_s": 0.5,
    "transfer_timeout_s": 2.0,
    "call_timeout_s": 2.0,
    "chunk_bytes": 4 * SHAPE.block_bytes,
}
#: With a time limit that hangs of the disk pass, and stops of the store.
_DISK_SETTINGS = {"disk_capacity_bytes": DISK_CAPACITY_BYTES, "disk_timeout_s": 1.0}


class Verb(Enum):
    """What a client does."""

    SAVE = "save"
    LOAD = "load"
    LOAD_PAIR = "load pair"
    LOOKUP = "lookup"
    LEASE = "lease"
    LAPSE = "lapse"
    PREFETCH = "prefetch"
    ABANDON_LOAD = "abandon load"
    ABANDON_SAVE = "abandon save"
    LOAD_WEIGHTS = "load of changing weights"
    PUBLISH = "publish"
    BEGIN_PUBLISH = "begin publish"
    PUBLISH_AND_LEAVE = "publish and leave"
    FETCH = "fetch"
    FETCH_TWICE = "fetch twice"
    FETCH_FORGED = "fetch forged"
    ABANDON_FETCH = "abandon fetch"
    WITHDRAW_AT_ONCE = "withdraw while publishing"
    FORK = "fork"


_WEIGHTS = {
    Verb.SAVE: 24,
    Verb.LOAD: 40,
    Verb.LOAD_PAIR: 4,
    Verb.LOOKUP: 10,
    Verb.LEASE: 10,
    Verb.LAPSE: 2,
    Verb.PREFETCH: 5,
    Verb.ABANDON_LOAD: 4,
    Verb.ABANDON_SAVE: 3,
    Verb.LOAD_WEIGHTS: 6,
    Verb.PUBLISH: 8,
    Verb.BEGIN_PUBLISH: 8,
    Verb.PUBLISH_AND_LEAVE: 1,
    Verb.FETCH: 14,
    Verb.FETCH_TWICE: 2,
    Verb.FETCH_FORGED: 1,
    Verb.ABANDON_FETCH: 2,
    Verb.WITHDRAW_AT_ONCE: 6,
    Verb.FORK: 1,
}
#: How long what is published is kept: some of it is gone before anybody asks, some waits for whoever fetches next.
_TTLS_S = (0.1, 1.0, 4.0, 15.0)
_SAVES = (Verb.SAVE, Verb.ABANDON_SAVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One operation of a client.

    Args:
        verb: what is done.
        chain: index of the chain.
        first: first block of the run.
        num_blocks: length of the run.
        skip_tokens: of a load, tokens at the front that must stay as they are.
        wait_s: how long a lease is held, a job waited for before it is abandoned, a ticket left before it is withdrawn.
        ttl_s: how long what is published is kept.
        num_copies: how many get the ticket; it is good for one of them.
        is_withdrawn: whether the publisher takes its blocks back.
        is_named: whether a ticket is made, and sent, before the store hears of it.
        is_early: whether such a ticket says so, so that a fetch waits.
    """

    verb: Verb
    chain: int
    first: int
    num_blocks: int
    skip_tokens: int
    wait_s: float
    ttl_s: float
    num_copies: int
    is_withdrawn: bool
    is_named: bool
    is_early: bool


class Fault(Enum):
    """What happens to the store from outside.

    Signals to one process, but for `CLEAR`, `CROWD_STORE` and the faults of a node's disk after them.
    """

    KILL_CLIENT = "kill client"
    KILL_MOVER = "kill mover"
    KILL_STORE = "kill store"
    KILL_DIRECTORY = "kill directory"
    KILL_SUPERVISOR = "kill supervisor"
    KILL_RANK = "kill rank"
    STOP_CLIENT = "stop client"
    STOP_MOVER = "stop mover"
    STOP_STORE = "stop store"
    STOP_DIRECTORY = "stop directory"
    #: Ray's own control store, for `GCS_STOPPED_S`.
    STOP_GCS = "stop gcs"
    #: Stopped and resumed again and again, so that it happens within copies.
    SHAKE_CLIENT = "shake client"
    SHAKE_STORE = "shake store"
    SHAKE_MOVER = "shake mover"
    #: More connections than the store has descriptors for, see `MAX_DESCRIPTORS`.
    CROWD_STORE = "crowd store"
    CLEAR = "clear"
    #: Bytes of the slot file or of the index: flipped, zero, those of another place, those that were there before.
    FLIP_SLOTS = "flip slots"
    ZERO_SLOTS = "zero slots"
    COPY_SLOTS = "copy slots"
    PUT_BACK_SLOTS = "put back slots"
    FLIP_INDEX = "flip index"
    ERASE_INDEX = "erase index"
    COPY_INDEX = "copy index"
    TRUNCATE_SLOTS = "truncate slots"
    #: Calls find the disk full, or fail, or do not return for a while.
    FILL_DISK = "fill disk"
    FAIL_DISK = "fail disk"
    HANG_DISK = "hang disk"


SPOILING = (
    Fault.FLIP_SLOTS, Fault.ZERO_SLOTS, Fault.COPY_SLOTS, Fault.PUT_BACK_SLOTS, Fault.FLIP_INDEX, Fault.ERASE_INDEX,
    Fault.COPY_INDEX, Fault.TRUNCATE_SLOTS,
)  # fmt: skip
REFUSING = (Fault.FILL_DISK, Fault.FAIL_DISK, Fault.HANG_DISK)
#: Of each process of the store and of each client, as `ulimit -n` sets it.
MAX_DESCRIPTORS = 256
GCS_STOPPED_S = 20.0
#: By how much the clocks of two callers of `clear` differ, who take turns.
CLOCKS_APART_S = 10.0
#: How long a shaken process is stopped, and goes on, each time.
SHAKEN_S = (0.002, 0.04)


#: One deck; decks are shuffled one by one, so that every fault comes about as often as it is named here.
_DECK = (
    *(Fault.KILL_CLIENT,) * 3, *(Fault.KILL_MOVER,) * 3, *(Fault.KILL_STORE,) * 2, Fault.KILL_DIRECTORY,
    Fault.KILL_SUPERVISOR, *(Fault.KILL_RANK,) * 3, *(Fault.STOP_CLIENT,) * 2, *(Fault.STOP_MOVER,) * 3,
    *(Fault.STOP_STORE,) * 2, Fault.STOP_DIRECTORY, Fault.STOP_GCS, *(Fault.SHAKE_CLIENT,) * 3, Fault.SHAKE_STORE,
    Fault.SHAKE_MOVER, Fault.CROWD_STORE, *(Fault.CLEAR,) * 4, *SPOILING, *REFUSING, Fault.HANG_DISK,
)  # fmt: skip
#: What concerns the disk alone, and what may cross it.
_DISK_DECK = (*SPOILING, *REFUSING, *REFUSING, Fault.KILL_STORE, Fault.KILL_STORE, Fault.CLEAR, Fault.SHAKE_STORE)
#: The first deck is a short one, so that a short soak meets each kind of process.
_FIRST_DECK = (Fault.KILL_CLIENT, Fault.KILL_MOVER, Fault.STOP_MOVER, Fault.KILL_STORE, Fault.FLIP_SLOTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultChoice:
    """One fault.

    Args:
        fault: what happens.
        victim: index of the client or node that it happens to, to be taken modulo their number.
        pause_s: quiet time before it.
        stopped_s: how long a stopped process stays stopped.
        alone: whether recovery is waited for before the next fault.
        is_between: of bytes on disk, whether they change between two lives of the store; else while it is open.
    """

    fault: Fault
    victim: int
    pause_s: float
    stopped_s: float
    alone: bool
    is_between: bool


def space() -> kvstore.Namespace:
    """Return the namespace of what clients save."""
    return kvstore.Namespace(model="soak", shape=SHAPE)


def weights_space() -> kvstore.Namespace:
    """Return the namespace that is cleared now and then, and that only the driver saves to."""
    return kvstore.Namespace(model="soak with changing weights", shape=SHAPE)


def ranks_space() -> kvstore.Namespace:
    """Return the namespace that two ranks save in parts, whose weights change too."""
    return kvstore.Namespace(model="soak in two ranks", shape=SHAPE)


def chains(of: kvstore.Namespace) -> list[BlockHashes]:
    """Return the chains of a namespace: for each root several branches that leave it at different blocks."""
    made, size = [], SHAPE.block_size
    for root in range(NUM_ROOTS):
        for branch in range(NUM_BRANCHES):
            tokens = np.arange(CHAIN_BLOCKS * size) + 1_000_000 * (root + 1)
            if branch:
                tokens[branch * CHAIN_BLOCKS // NUM_BRANCHES * size :] += 100_000 * branch
            made.append(of.block_hashes(tokens))
    return made


def probe_chain(number: int, num_blocks: int) -> BlockHashes:
    """Return a chain that no client knows, another one for each number."""
    tokens = np.arange(num_blocks * SHAPE.block_size) + 100_000_000 + 1000 * number
    return space().block_hashes(tokens)


def choices(seed: int, client: int, life: int) -> Iterator[Choice]:
    """Yield the operations of one life of a client, without end."""
    rng = random.Random(f"{seed}/client/{client}/{life}")
    verbs, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    while True:
        verb = rng.choices(verbs, weights)[0]
        # The product prefers low indexes: some chains are hot, most are not.
        root = int(rng.random() * rng.random() * NUM_ROOTS)
        if verb in _SAVES and rng.random() < 0.8:
            # Mostly saved on one node only, so that the other one has to fetch.
            root = root // 2 * 2 + client % 2
        chain = root * NUM_BRANCHES + rng.randrange(NUM_BRANCHES)
        num_blocks = rng.randint(1, CHAIN_BLOCKS)
        first = rng.randrange(num_blocks) if rng.random() < 0.1 else 0
        num_blocks -= first
        skip_tokens = rng.randint(1, num_blocks * SHAPE.block_size) if rng.random() < 0.25 else 0
        yield Choice(
            verb=verb, chain=chain, first=first, num_blocks=num_blocks, skip_tokens=skip_tokens,
            wait_s=rng.random() ** 3 * 0.2, ttl_s=rng.choice(_TTLS_S), num_copies=rng.choice((1, 1, 1, 2)),
            is_withdrawn=rng.random() < 0.15, is_named=rng.random() < 0.5, is_early=rng.random() < 0.5,
        )  # fmt: skip


def disk_settings(seed: int) -> dict[str, object]:
    """Return the settings of the disk tier: by the seed, blocks are written behind saves or at eviction."""
    rng = random.Random(f"{seed}/disk settings")
    return {**_DISK_SETTINGS, "disk_write": rng.choice(("through", "back"))}


def faults(seed: int, only_disk: bool = False) -> Iterator[FaultChoice]:
    """Yield the faults of a soak, without end; those of the disk and what may cross them, if it is to be only that."""
    rng = random.Random(f"{seed}/faults")
    deck = list(_DISK_DECK if only_disk else _FIRST_DECK)
    while True:
        rng.shuffle(deck)
        for fault in deck:
            yield FaultChoice(
                fault=fault, victim=rng.randrange(1 << 16), pause_s=rng.uniform(0.2, 2.5),
                # Now within all timeouts, now beyond the one of a transfer, now beyond the one of a call.
                stopped_s=rng.choice((0.05, 0.5, 1.5, 2.5, 4.0)), alone=rng.random() < 0.8,
                is_between=rng.random() < 0.4,
            )  # fmt: skip
        deck = list(_DISK_DECK if only_disk else _DECK)
