"""What a node store's counts are called as metrics, and how much they grew: from statistics to samples, without Ray.

A store counts in plain numbers, and `NodeCore.counts` has them all. Once a second they become samples: counters by how
much they grew, gauges as they are. All tags have few values: nothing here has a hash, a salt or the name of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: Counts of one node store, as `NodeCore.counts` returns them.
Stats = dict[str, Any]
#: Values of a metric, by the values of its tags.
Values = dict[tuple[str, ...], float]
#: States of a slot, as fields of `PoolStats` without their "num_".
_STATES = ("free", "writing", "idle", "pinned", "quarantined")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a node store.

    Args:
        name: as Ray takes it. Prometheus shows it with "ray_" before it, and a counter with "_total" behind it.
        is_counter: it counts since the store began; if not, it is a gauge.
        description: one sentence.
        tags: names of its tags. All metrics have the tags "node" and "store", too, which are not among these.
        read: returns its values from the counts of a node store. A tag's value may be missing as long as it is 0.
    """

    name: str
    is_counter: bool
    description: str
    tags: tuple[str, ...]
    read: Callable[[Stats], Values]


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric: the growth of a counter, above 0, or a gauge as it is. `tags` are those of the metric."""

    metric: Metric
    tags: dict[str, str]
    value: float


def samples(before: Stats | None, after: Stats, metrics: Sequence[Metric] | None = None) -> list[Sample]:
    """Return what changed between two statistics of one node store.

    Args:
        before: the earlier ones; None for all since the store began. Those of another life of the store count as None.
        after: the later ones.
        metrics: those to be read; all of a node store when None.

    Returns:
        The counters that grew, and all gauges.
    """
    if before is not None and before["epoch"] != after["epoch"]:
        before = None
    found = []
    for metric in METRICS if metrics is None else metrics:
        values = metric.read(after)
        if metric.is_counter:
            values = _growth({} if before is None else metric.read(before), values)
        for tags, value in values.items():
            found.append(Sample(metric, dict(zip(metric.tags, tags, strict=True)), value))
    return found


def _growth(before: Values, after: Values) -> Values:
    # A count that went back began anew: a part of the store was replaced.
    grown = {
        tags: value - before.get(tags, 0) if value >= before.get(tags, 0) else value for tags, value in after.items()
    }
    return {tags: value for tags, value in grown.items() if value > 0}


def _of(*keys: str) -> Callable[[Stats], Values]:
    """Return a reader of a number, or of numbers by name, for a metric with one tag. A missing part has no values."""

    def read(stats: Stats) -> Values:
        found: Any = stats
        for key in keys:
            found = None if found is None else found.get(key)
        if found is None:
            return {}
        return (
            {(name,): float(value) for name, value in found.items()} if isinstance(found, dict) else {(): float(found)}
        )

    return read


def _named(part: str, **fields: str) -> Callable[[Stats], Values]:
    """Return a reader of several numbers of one part, each under the name of its keyword."""

    def read(stats: Stats) -> Values:
        found = stats[part] or {}
        return {(name,): float(found[field]) for name, field in fields.items() if field in found}

    return read


def _misses(stats: Stats) -> Values:
    misses = stats["traffic"]["miss_blocks"]
    return {(path, reason): float(count) for path in misses for reason, count in misses[path].items()}


def _pools(stats: Stats) -> Iterable[tuple[str, dict[str, int]]]:
    pools = (("memory", stats["pool"]), ("disk", (stats["disk"] or {}).get("pool")))
    return [(tier, pool) for tier, pool in pools if pool is not None]


def _slots(stats: Stats) -> Values:
    return {(tier, state): float(pool[f"num_{state}"]) for tier, pool in _pools(stats) for state in _STATES}


def _slot_bytes(stats: Stats) -> Values:
    return {(tier,): float(pool["num_slots"] * stats["slot_bytes"]) for tier, pool in _pools(stats)}


def _pinned_bytes(stats: Stats) -> Values:
    return {(): float((stats["pool"] or {"num_pinned": 0})["num_pinned"] * stats["slot_bytes"])}


def _pins(field: str) -> Callable[[Stats], Values]:
    return lambda stats: {(kind,): float(pins[field]) for kind, pins in stats["pins"].items()}


def _queues(stats: Stats) -> Values:
    queues = {**stats["queues"], **({} if stats["disk"] is None else {"disk": stats["disk"].get("num_unwritten", 0)})}
    return {(queue,): float(count) for queue, count in queues.items()}


def _of_tenants(**fields: str) -> Callable[[Stats], Values]:
    """Return a reader of counts of each tenant, each under the name of its keyword."""

    def read(stats: Stats) -> Values:
        tenants = stats.get("tenants", {}).items()
        return {(tenant, name): float(found[field]) for tenant, found in tenants for name, field in fields.items()}

    return read


def _tenant_handoffs(stats: Stats) -> Values:
    return {(tenant,): float(found["num_handoffs"]) for tenant, found in stats.get("tenants", {}).items()}


def _mover_runs(stats: Stats) -> Values:
    return {(): float(stats["mover_pid"] > 0)}


def _counter(name: str, description: str, tags: tuple[str, ...], read: Callable[[Stats], Values]) -> Metric:
    return Metric(f"raykv_{name}", True, description, tags, read)


def _gauge(name: str, description: str, tags: tuple[str, ...], read: Callable[[Stats], Values]) -> Metric:
    return Metric(f"raykv_{name}", False, description, tags, read)


#: All metrics of a node store.
METRICS = (
    _counter("hit_blocks", "Blocks that loads got, by tier.", ("tier",), _of("traffic", "hit_blocks")),
    _counter("miss_blocks", "Blocks that loads and fetches of tickets did not get.", ("path", "reason"), _misses),
    _counter("stored_blocks", "Blocks that became readable.", ("path",), _of("traffic", "stored_blocks")),
    _counter("in_bytes", "Bytes of blocks that came into memory.", ("path",), _of("traffic", "in_bytes")),
    _counter("out_bytes", "Bytes of blocks that readers got.", ("path",), _of("traffic", "out_bytes")),
    _counter("evicted_blocks", "Blocks evicted from memory.", (), _of("pool", "num_evicted")),
    _counter("evicted_ahead_blocks", "Blocks evicted by the watermarks' loop.", (), _of("reclaim", "num_evicted")),
    _counter("disk_evicted_blocks", "Blocks evicted from the disk.", (), _of("disk", "pool", "num_evicted")),
    _counter("disk_written_blocks", "Blocks written to the disk.", (), _of("disk", "num_written")),
    _counter("disk_dropped_blocks", "Blocks not written to the disk.", ("reason",), _of("disk", "dropped")),
    _counter("disk_read_blocks", "Blocks read from the disk.", (), _of("disk", "num_read")),
    _counter(
        "disk_unread_blocks",
        "Blocks of the disk that were damaged, refused, or read after their load's time.",
        ("reason",),
        _named("disk", damaged="num_damaged", refused="num_failed", late="num_late"),
    ),
    _counter("disk_trips", "How often the disk went off.", (), _of("disk", "num_trips")),
    _counter("abandoned_reads", "READs that were given up.", (), _of("num_abandoned_reads")),
    _counter("fenced_movers", "Movers that were killed to end their READs.", (), _of("num_fenced_movers")),
    _counter(
        "socket_failures",
        "Errors at the store's sockets.",
        ("reason",),
        _named(
            "ports", malformed="num_malformed", stranger="num_strangers_cut", unread="num_unread_cut",
            failure="num_failures",
        ),
    ),
    _counter(
        "tenant_evicted_blocks",
        "Blocks of a tenant evicted from memory, and those of them for its own new blocks at its quota.",
        ("tenant", "reason"),
        _of_tenants(all="num_evicted", quota="num_evicted_by_quota"),
    ),
    _counter(
        "tenant_refused",
        "Blocks, or hand-offs, that a quota refused.",
        ("tenant", "quota"),
        _of_tenants(
            bytes="num_refused_bytes", pins="num_refused_pins", handoffs="num_refused_handoffs",
            disk="num_refused_disk",
        ),
    ),
    _gauge(
        "tenant_bytes",
        "Bytes of slots that are a tenant's, of those that it pins, and of its places on the disk.",
        ("tenant", "kind"),
        _of_tenants(memory="num_bytes", pinned="num_pinned_bytes", disk="num_disk_bytes"),
    ),
    _gauge("tenant_handoffs", "Tickets of a tenant that hold blocks.", ("tenant",), _tenant_handoffs),
    _gauge("slots", "Slots by their state.", ("tier", "state"), _slots),
    _gauge("slot_bytes", "Bytes of all slots.", ("tier",), _slot_bytes),
    _gauge("pinned_bytes", "Bytes of slots that leases and hard pins hold.", (), _pinned_bytes),
    _gauge("pins", "Leases, hard pins and soft pins.", ("kind",), _pins("num")),
    _gauge("oldest_pin_s", "Age of the oldest lease or pin.", ("kind",), _pins("oldest_s")),
    _gauge("queued", "What waits or is under way.", ("queue",), _queues),
    _gauge("handoffs", "Tickets that hold blocks.", (), _of("num_handoffs")),
    _gauge("handoff_slots", "Slots that tickets hold.", (), _of("num_handoff_slots")),
    _gauge("handoff_fetches", "Fetches of tickets under way.", (), _of("num_handoff_fetches")),
    _gauge("disk_off", "1 while the disk is off.", (), _of("disk", "is_off")),
    _gauge("draining", "1 while the node is drained.", (), _of("draining")),
    _gauge("mover_runs", "1 while the node has a mover.", (), _mover_runs),
)  # fmt: skip
