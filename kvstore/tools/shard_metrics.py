"""What the counts of a directory's shards are called as metrics; see `kvstore.tools.metrics`."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.tools.metrics import Metric, Stats, Values


def _of(field: str) -> Callable[[Stats], Values]:
    return lambda stats: {(str(stats["shard"]),): float(stats[field])}


#: All metrics of one shard, whose number is their tag. The tag "node" is the node on which its actor runs.
SHARD_METRICS = tuple(
    Metric(
        f"raykv_directory_{name}",
        is_counter,
        description,
        ("shard",),
        _of(field),
    )
    for name, is_counter, description, field in (
        ("blocks", False, "Different blocks that a shard knows.", "num_blocks"),
        ("bytes", False, "Memory of its tables.", "num_bytes"),
        ("nodes", False, "Nodes that publish to it.", "num_nodes"),
        ("batches", True, "Batches of announcements, also empty ones.", "num_batches"),
        ("locates", True, "Questions of stores.", "num_locates"),
        ("walks", True, "Questions for which all blocks of a long prompt were looked up.", "num_walked"),
        ("resyncs", True, "Full announcements that began.", "num_resyncs"),
        ("gaps", True, "Batches out of turn, after which a node announces all anew.", "num_gaps"),
        ("dropped_blocks", True, "Blocks that were not noted because the tables were full.", "num_dropped"),
    )
)
