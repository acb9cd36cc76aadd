"""Bugs in who may hold what, and until when: leases, pins, peers, movers, clients that go."""

from __future__ import annotations

from poolcheck.mutant import (
    COLUMNS,
    EXPLORER,
    FAULTS,
    GAP,
    LEASES,
    LRU,
    MODEL,
    PEERS,
    POOL,
    POOL_PINS,
    POOL_RULES,
    PRESENCE_RULES,
    SLOTS,
    STALE,
    WIRE,
    Mutant,
    bug,
)
from poolcheck.patch import Patch

OWNERS = "tests/kvstore/client/test_client_owner.py"

HOLDERS = (
    Mutant(
        name="two-step pin",
        source="TensorRT-LLM: has refs, claim, add ref",
        patches=(
            GAP,
            Patch(
                LEASES,
                "self._affordable(self._table.index.find_prefix(chain.namespace, chain.data), kind)\n",
                (
                    "self._affordable(self._table.index.find_prefix(chain.namespace, chain.data), kind)\n"
                    "        self._table.gap()\n"
                ),
            ),
        ),
        tests=(f"{EXPLORER}[claim_pin_evict]",),
    ),
    bug(
        "no epoch",
        "vLLM: a peer restarts at the same address",
        POOL,
        "return epoch in (None, self.epoch) and self._leases.release(lease_id, owner)",
        "return self._leases.release(lease_id, owner)",
        f"{STALE}::test_what_names_another_life_of_the_store_changes_nothing",
    ),
    bug(
        "no epoch in notifications",
        "vLLM: a peer restarts at the same address",
        "kvstore.node.peer_service",
        "if epoch == self._core.epoch:",
        "if True:",
        f"{PEERS}::test_a_notification_for_another_life_of_the_store_frees_nothing",
    ),
    Mutant(
        name="expire under a reader",
        source="Mooncake: leases lost under readers",
        patches=(
            GAP,
            Patch(
                LEASES,
                "        return self._drop_all([i for i, lease in self._leases.items() if lease.deadline_s < now_s])\n",
                (
                    "        late = [i for i, lease in self._leases.items() if lease.deadline_s < now_s]\n"
                    "        self._table.gap()\n"
                    "        return self._drop_all([i for i in late if i in self._leases])\n"
                ),
            ),
        ),
        tests=(f"{EXPLORER}[expire_renew_evict]",),
    ),
    bug(
        "release not idempotent",
        "LMCache: ref counts below what is held",
        LEASES,
        "        lease = self._leases.pop(lease_id)\n",
        "        lease = self._leases[lease_id]\n",
        f"{EXPLORER}[wrong_releases]",
    ),
    bug(
        "release by anybody",
        "TensorRT-LLM: unpin takes raw ids",
        LEASES,
        "return lease if lease is not None and lease.owner == owner else None",
        "return lease",
        f"{EXPLORER}[wrong_releases]",
    ),
    bug(
        "lease shortened by renew",
        "Mooncake: leases lost under readers",
        LEASES,
        ("        lease.deadline_s = max(lease.deadline_s, deadline_s)\n        return True\n"),
        ("        lease.deadline_s = deadline_s\n        return True\n"),
        f"{EXPLORER}[expire_renew_evict]",
    ),
    bug(
        "lookup that pins",
        "LMCache, Mooncake: what is looked up stays pinned",
        POOL,
        "            return self._table.index.num_ready(namespace, data)\n",
        "            asked = Chain(namespace, namespace, 0, data)\n"
        '            return len(self._leases.pin(asked, "lookup", _NEVER_S, PinKind.LEASE).slots)\n',
        MODEL,
    ),
    bug(
        "not the oldest first",
        "TensorRT-LLM: a touch loses its place",
        LEASES,
        "        return self._table.eviction.touched(slots)\n",
        "        return 0\n",
        MODEL,
    ),
    bug(
        "leak on a fault in a save",
        "LMCache: half-written memory is never given back",
        "kvstore.client.save_load",
        (
            "                with contextlib.suppress(KVStoreError):\n"
            "                    yield from asking(connection, Op.ABORT_STORE, end, timeout_s=call_timeout_s)\n"
            "                raise\n"
        ),
        "                raise\n",
        f"{FAULTS}_leaves_nothing[save]",
    ),
    bug(
        "leak on a fault in a shutdown",
        "LMCache, Ray: segments outlive their owner",
        "kvstore.node.core",
        "            steps.callback(self._close_memory)\n",
        "",
        f"{FAULTS}_of_a_shutdown_leaves_nothing_open",
    ),
    bug(
        "alone for ever",
        "ours: what another node has is said to be absent",
        "kvstore.remote.sole_node",
        "                if number == self._number:\n                    self._say(False)\n",
        "                pass\n",
        f"{PRESENCE_RULES}::test_other_nodes_count_until_the_directory_knows_of_none_and_from_the_moment_it_does",
    ),
    bug(
        "a read that outlived its lease",
        "Mooncake: bytes read after the lease ended",
        "kvstore.remote.peer_read",
        "clock.now_s() < self._valid_until_s",
        "True",
        "tests/kvstore/node/test_node.py::test_a_block_counts_only_if_the_lease_covered_its_read",
    ),
    bug(
        "pin budget not enforced",
        "ours",
        COLUMNS,
        "        if room >= len(slots):\n",
        "        if True:\n",
        f"{POOL_RULES}::test_pins_have_a_budget",
    ),
    bug(
        "pin quota not enforced",
        "ours",
        LEASES,
        "                if room < 0:\n",
        "                if False:\n",
        f"{POOL_PINS}::test_hard_pins_have_a_quota_of_their_own",
    ),
    bug(
        "hard pin treated as soft",
        "ours",
        POOL,
        "grant = self._leases.pin(chain, owner, deadline_s, kind)",
        "grant = self._leases.pin(chain, owner, deadline_s, PinKind.SOFT)",
        f"{POOL_PINS}::test_a_hard_pin_is_never_evicted_and_ends_only_by_hand_or_with_its_owner",
    ),
    bug(
        "soft pin treated as hard",
        "ours",
        LRU,
        "            elif held_back:\n",
        "            elif False:\n",
        f"{POOL_PINS}::test_soft_pins_go_last_and_only_when_nothing_else_is_left",
    ),
    bug(
        "soft pin ignored",
        "ours",
        LRU,
        "            if slot in soft_pins:\n",
        "            if False:\n",
        f"{POOL_PINS}::test_soft_pins_go_last_and_only_when_nothing_else_is_left",
    ),
    bug(
        "soft pin kept for the next block in the slot",
        "ours",
        SLOTS,
        " for slot, generation in given if living[slot] == generation)",
        " for slot, _ in given)",
        f"{POOL_PINS}::test_a_soft_pin_that_ended_protects_no_more_and_not_the_next_block_in_the_slot",
    ),
    bug(
        "peers share one owner",
        "TensorRT-LLM: unpin takes raw ids",
        "kvstore.node.peer_service",
        'return f"store-{key.hex()}"',
        'return "peers"',
        f"{PEERS}::test_a_peer_cannot_release_the_lease_of_another_by_its_id",
    ),
    bug(
        "the report of another mover counts",
        "ours",
        "kvstore.mover.link",
        "elif not self.is_present(connection):",
        "elif False:",
        f"{WIRE}::test_what_another_mover_reports_counts_for_nothing",
    ),
    bug(
        "more blocks are taken for read than were asked for",
        "ours",
        "kvstore.mover.link",
        "if done.num_blocks > num_blocks or (",
        "if (",
        f"{WIRE}::test_a_mover_that_says_what_cannot_be_is_replaced_and_nothing_is_published",
    ),
    bug(
        "a READ done twice",
        "ours",
        "kvstore.mover.process",
        "if read.read_id <= self._last_read_id or read",
        "if read",
        "tests/kvstore/mover/test_mover.py::test_a_mover_that_is_told_what_cannot_be_ends_and_writes_nothing",
    ),
    bug(
        "slots free while a given-up READ writes",
        "NIXL: a released handle still writes",
        "kvstore.remote.peer_read",
        "self._end(segment, 0 if done.terminal else done.read_id)",
        "self._end(segment, 0)",
        "tests/kvstore/node/test_node.py::test_a_read_that_never_ends_is_quarantined_until_it_does",
    ),
    bug(
        "fence skipped",
        "ours",
        "kvstore.node.fence",
        "        if self._mover.fence():\n",
        "        if True:\n",
        f"{WIRE}::test_a_spoilt_message_at_every_step_leaves_nothing[dropped]",
    ),
    bug(
        "late grant kept",
        "ours",
        "kvstore.rpc.server",
        "                if gave is not None and gave[0] >= since:\n",
        "                if False:\n",
        f"{OWNERS}::test_what_comes_after_its_caller_gave_up_is_given_back[pin]",
    ),
    bug(
        "heard grant taken back",
        "ours",
        "kvstore.rpc.server",
        "gave[0] >= since",
        "gave[0] >= 0",
        f"{OWNERS}::test_a_pin_is_given_back_over_another_connection_than_it_was_taken",
    ),
    bug(
        "goodbye lost after a reset",
        "ours",
        "kvstore.rpc.server",
        "            if not connection.local:\n                logger",
        "            if True:\n                logger",
        "tests/kvstore/rpc/test_control.py::test_goodbye_is_heard_also_of_a_client_that_left_an_answer_unread",
    ),
)
