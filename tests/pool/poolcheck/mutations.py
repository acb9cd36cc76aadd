"""The bugs that block pools have had, one small change each, and the tests that have to see it."""

from __future__ import annotations

from dataclasses import dataclass

from poolcheck.patch import Patch

_POOL, _SLOTS, _LEASES, _WRITES = "kvstore.pool", "kvstore.slots", "kvstore.leases", "kvstore.writes"
_EXPLORER = "tests/pool/test_explorer.py::test_every_schedule_up_to_three_preemptions"
_LINES = "tests/pool/test_explorer.py::test_a_preemption_at_every_line_of_the_pool"
_MODEL = "tests/pool/test_model.py::TestPoolMachine::runTest"
_FAULTS = "tests/pool/test_faults.py::test_a_fault_at_every_step"
_STALE = "tests/pool/test_stale.py"
_PEERS = "tests/kvstore/test_peer_control.py"

#: Lets a mutant give the lock away in the middle of a step, as code does that takes it twice.
_GAP = Patch(
    _POOL,
    "        self._table = SlotTable(num_slots)\n",
    "        self._table = SlotTable(num_slots)\n"
    "        self._table.gap = lambda: (self._lock.release(), self._lock.acquire())\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One bug.

    Args:
        name: in a few words.
        source: where it was seen.
        patches: put it back.
        tests: must catch it, one of them at least.
    """

    name: str
    source: str
    patches: tuple[Patch, ...]
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        name="no lock",
        source="TensorRT-LLM: LRU lists shared by two threads",
        patches=(Patch(_POOL, "with self._lock:", "if True:", everywhere=True),),
        tests=(f"{_LINES}[claim_pin_evict]",),
    ),
    Mutant(
        name="two-step pin",
        source="TensorRT-LLM: has refs, claim, add ref",
        patches=(
            _GAP,
            Patch(
                _LEASES,
                "        slots, num_refused = self._affordable(self._table.find_prefix(hashes), kind)\n",
                "        slots, num_refused = self._affordable(self._table.find_prefix(hashes), kind)\n"
                "        self._table.gap()\n",
            ),
        ),
        tests=(f"{_EXPLORER}[claim_pin_evict]",),
    ),
    Mutant(
        name="two-step unpin",
        source="TensorRT-LLM: drop ref, has refs, release",
        patches=(
            _GAP,
            Patch(
                _SLOTS,
                "        self.num_pinned -= num_idle\n",
                "        self.num_pinned -= num_idle\n        self.gap()\n",
            ),
        ),
        tests=(f"{_EXPLORER}[readers_of_a_cleared_block]",),
    ),
    Mutant(
        name="peek, then claim",
        source="TensorRT-LLM: a victim is pinned before it is taken",
        patches=(
            _GAP,
            Patch(
                _SLOTS,
                "                # At once: the order may name this slot twice, and nobody must get it twice.\n",
                "                self.gap()\n",
            ),
        ),
        tests=(f"{_EXPLORER}[claim_pin_evict]",),
    ),
    Mutant(
        name="free slots peeked at",
        source="TensorRT-LLM: one free block for two takers",
        patches=(
            _GAP,
            Patch(
                _SLOTS,
                "        claimed = free[: -wanted - 1 : -1]\n",
                "        claimed = free[: -wanted - 1 : -1]\n        self.gap()\n",
            ),
        ),
        tests=(f"{_EXPLORER}[two_writers]",),
    ),
    Mutant(
        name="no re-check after the copy",
        source="TensorRT-LLM: onboard swaps what was pinned meanwhile",
        patches=(
            Patch(_WRITES, "if table.doomed and not table.doomed.isdisjoint(slots):", "if False:"),
            Patch(
                _SLOTS,
                "        for own in hashes:\n            del writing[own]\n",
                "        self.doomed -= set(slots)\n        for own in hashes:\n            writing.pop(own, None)\n",
            ),
        ),
        tests=(f"{_EXPLORER}[write_clear_read]",),
    ),
    Mutant(
        name="publish before the copy",
        source="LMCache: failed stores stay visible",
        patches=(
            Patch(
                _POOL,
                "            return self._writes.prepare(chain, hashes, terms, needs_parent=needs_parent)\n",
                "            ticket = self._writes.prepare(chain, hashes, terms, needs_parent=needs_parent)\n"
                "            if ticket.write_id and num_parts == 1:\n"
                "                self._writes.complete(\n"
                "                    ticket.write_id, self._writes.find(ticket.write_id, owner, None, None), None\n"
                "                )\n"
                "            return ticket\n",
            ),
        ),
        tests=(f"{_EXPLORER}[duplicates]",),
    ),
    Mutant(
        name="free on cancel",
        source="NIXL: a released handle still writes",
        patches=(
            Patch(_WRITES, "aside=bool(quarantine)", "aside=False"),
            Patch(_WRITES, "        if quarantine and pending:\n", "        if False:\n"),
        ),
        tests=(f"{_EXPLORER}[cancelled_transfer]",),
    ),
    Mutant(
        name="no generation",
        source="Dynamo, NIXL: old descriptors read new blocks",
        patches=(Patch(_SLOTS, "            generation[slot] += 1\n", ""),),
        tests=(f"{_STALE}::test_every_life_of_a_slot_has_a_number",),
    ),
    Mutant(
        name="no epoch",
        source="vLLM: a peer restarts at the same address",
        patches=(
            Patch(
                _POOL,
                "return epoch in (None, self.epoch) and self._leases.release(lease_id, owner)",
                "return self._leases.release(lease_id, owner)",
            ),
        ),
        tests=(f"{_STALE}::test_what_names_another_life_of_the_store_changes_nothing",),
    ),
    Mutant(
        name="no epoch in notifications",
        source="vLLM: a peer restarts at the same address",
        patches=(Patch("kvstore.peer_control", "if epoch == self._core.epoch:", "if True:"),),
        tests=(f"{_PEERS}::test_a_notification_for_another_life_of_the_store_frees_nothing",),
    ),
    Mutant(
        name="expire under a reader",
        source="Mooncake: leases lost under readers",
        patches=(
            _GAP,
            Patch(
                _LEASES,
                "        return self._drop_all([i for i, lease in self._leases.items() if lease.deadline_s < now_s])\n",
                "        late = [i for i, lease in self._leases.items() if lease.deadline_s < now_s]\n"
                "        self._table.gap()\n"
                "        return self._drop_all([i for i in late if i in self._leases])\n",
            ),
        ),
        tests=(f"{_EXPLORER}[expire_renew_evict]",),
    ),
    Mutant(
        name="release not idempotent",
        source="LMCache: ref counts below what is held",
        patches=(
            Patch(_LEASES, "        lease = self._leases.pop(lease_id)\n", "        lease = self._leases[lease_id]\n"),
        ),
        tests=(f"{_EXPLORER}[wrong_releases]",),
    ),
    Mutant(
        name="release by anybody",
        source="TensorRT-LLM: unpin takes raw ids",
        patches=(
            Patch(
                _LEASES,
                "return lease if lease is not None and lease.owner == owner else None",
                "return lease",
            ),
        ),
        tests=(f"{_EXPLORER}[wrong_releases]",),
    ),
    Mutant(
        name="double release frees a neighbour",
        source="TensorRT-LLM: two trackers of one pin",
        patches=(Patch(_SLOTS, "            refs = ref_count[slot] - 1\n", "            refs = 0\n"),),
        tests=(f"{_EXPLORER}[two_readers_and_eviction]",),
    ),
    Mutant(
        name="lease shortened by renew",
        source="Mooncake: leases lost under readers",
        patches=(
            Patch(
                _LEASES,
                "        lease.deadline_s = max(lease.deadline_s, deadline_s)\n        return True\n",
                "        lease.deadline_s = deadline_s\n        return True\n",
            ),
        ),
        tests=(f"{_EXPLORER}[expire_renew_evict]",),
    ),
    Mutant(
        name="lookup that pins",
        source="LMCache, Mooncake: what is looked up stays pinned",
        patches=(
            Patch(
                _POOL,
                "            return len(list(takewhile(self._table.ready.__contains__, hashes)))\n",
                '            return len(self._leases.pin(hashes, "lookup", _NEVER_S, PinKind.LEASE).slots)\n',
            ),
        ),
        tests=(_MODEL,),
    ),
    Mutant(
        name="evict the root first",
        source="SGLang, LightLLM: prefixes with holes",
        patches=(
            Patch(_SLOTS, "if ref_count[slot] or num_children[slot] or own", "if ref_count[slot] or own"),
            Patch("kvstore.eviction", "slot = current.pop()", "slot = current.pop(0)"),
        ),
        tests=(_MODEL,),
    ),
    Mutant(
        name="not the oldest first",
        source="TensorRT-LLM: a touch loses its place",
        patches=(Patch(_LEASES, "        return self._table.order.touch(slots)\n", "        return 0\n"),),
        tests=(_MODEL,),
    ),
    Mutant(
        name="clear misses what is being written",
        source="engines: KV of old weights after an update",
        patches=(
            Patch(
                _SLOTS,
                "            if own in self.writing:\n                lost[own] = slot\n"
                "                self.doom(slot)\n",
                "            if own in self.writing:\n",
            ),
        ),
        tests=(f"{_EXPLORER}[write_clear_read]",),
    ),
    Mutant(
        name="clear frees what is read",
        source="LMCache: memory freed under a transfer",
        patches=(
            Patch(
                _SLOTS,
                "            if self.ref_count[slot]:\n                self.unfindable.add(slot)\n",
                "            if False:\n                self.unfindable.add(slot)\n",
            ),
        ),
        tests=(f"{_EXPLORER}[clear_under_reader]",),
    ),
    Mutant(
        name="half-visible parts",
        source="LightLLM: ready before every rank has copied",
        patches=(Patch(_WRITES, "elif len(parts.done) == parts.num_parts:", "elif parts.done:"),),
        tests=(f"{_EXPLORER}[two_ranks]",),
    ),
    Mutant(
        name="a dead rank's block goes on",
        source="LightLLM: ready before every rank has copied",
        patches=(
            Patch(
                _WRITES,
                "                parts.writers.discard(write.terms.part)\n",
                "                parts.writers.discard(write.terms.part)\n                parts.num_parts -= 1\n",
            ),
            Patch(_WRITES, "        self.doom([slot for slot in pending if slot not in table.doomed])\n", ""),
            Patch(
                _WRITES,
                "                self._leave(slot, parts)\n            else:\n",
                "            else:\n",
            ),
        ),
        tests=(f"{_EXPLORER}[a_rank_dies]",),
    ),
    Mutant(
        name="a second copy",
        source="LMCache: one chunk stored by every worker",
        patches=(Patch(_WRITES, "if not writing.keys().isdisjoint(hashes):", "if False:"),),
        tests=(f"{_EXPLORER}[duplicates]",),
    ),
    Mutant(
        name="eviction without an event",
        source="LMCache, Dynamo: routers send to blocks that are gone",
        patches=(Patch(_SLOTS, "            self.events.append((False, hashes))\n", ""),),
        tests=(f"{_EXPLORER}[two_writers_one_victim]",),
    ),
    Mutant(
        name="leak on a fault in a save",
        source="LMCache: half-written memory is never given back",
        patches=(
            Patch(
                "kvstore.jobs",
                "                with contextlib.suppress(KVStoreError):\n"
                "                    connection.call(Op.ABORT_STORE, end, timeout_s=call_timeout_s)\n"
                "                raise\n",
                "                raise\n",
            ),
        ),
        tests=(f"{_FAULTS}_leaves_nothing[save]",),
    ),
    Mutant(
        name="leak on a fault in a shutdown",
        source="LMCache, Ray: segments outlive their owner",
        patches=(Patch("kvstore.node", "            steps.callback(self._close_arena)\n", ""),),
        tests=(f"{_FAULTS}_of_a_shutdown_leaves_nothing_open",),
    ),
    Mutant(
        name="a read that outlived its lease",
        source="Mooncake: bytes read after the lease ended",
        patches=(Patch("kvstore.peer_read", "time.monotonic() < self._valid_until_s", "True"),),
        tests=("tests/kvstore/test_node.py::test_a_block_counts_only_if_the_lease_covered_its_read",),
    ),
)
