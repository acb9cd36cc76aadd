"""Read traces of WEKA's kv-cache-tester: conversations of coding agents.

A conversation is an object with `block_size`, `hash_id_scope` and `requests`. A request has `t` (seconds since the
conversation began), `in` and `out` (tokens), `hash_ids`, and `type`: "n", "s", or "subagent", which has `requests` of
its own. A file is one conversation, an array of them, or one on each line. All conversations begin at time 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvstore.bounds import clip
from kvstore.errors import InvalidRequest
from kvstore.replay.records import Record, Where


class WekaRequest(msgspec.Struct, rename={"input_tokens": "in", "output_tokens": "out", "kind": "type"}):
    """A request, or a subagent with requests of its own."""

    t: float
    kind: str = "n"
    input_tokens: int = 0
    output_tokens: int = 0
    hash_ids: list[int] = []
    requests: list[WekaRequest] = []


class WekaConversation(msgspec.Struct):
    """A conversation."""

    requests: list[WekaRequest]
    block_size: int = 0
    hash_id_scope: str = "local"


def weka_records(text: str, lines: Sequence[str], path: Path) -> tuple[Iterator[Record], int]:
    """Return the requests of all conversations in the order of their time, and the tokens of a block; 0 when not said.

    Raises:
        InvalidRequest: the file is not of this format, or its conversations have blocks of several sizes.
    """
    conversations = list(_conversations(text, lines, path))
    sizes = {conversation.block_size for _, conversation in conversations if conversation.block_size}
    if len(sizes) > 1 or min(sizes, default=1) < 1:
        raise InvalidRequest(
            f"{path}: wanted one block_size in all conversations, 1 or more, got {sorted(sizes)}; replay them alone"
        )
    records = list[Record]()
    try:
        is_relative = any(_is_relative(conversation.requests) for _, conversation in conversations)
        for index, (where, conversation) in enumerate(conversations):
            scope = f"conversation {index}" if conversation.hash_id_scope == "local" else ""
            records += _records_of(conversation.requests, where, scope, 0.0, is_relative)
    except RecursionError as error:
        raise InvalidRequest(
            f"{path}: wanted subagents a few levels deep, got hundreds of levels; use another file"
        ) from error
    records.sort(key=lambda record: record.time)
    return iter(records), next(iter(sizes), 0)


def _conversations(text: str, lines: Sequence[str], path: Path) -> Iterator[tuple[Where, WekaConversation]]:
    """Yield each conversation with its place."""
    try:
        whole = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        whole = None  # Not one value: a conversation on each line.
    if whole is None:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = Where(path, number)
                yield where, _decoded(where, line, msgspec.json.decode, line)
        return
    for number, each in enumerate(whole if isinstance(whole, list) else [whole], 1):
        where = Where(path, number, "conversation")
        yield where, _decoded(where, each, msgspec.convert, str(each)[:200])


def _decoded(where: Where, value: Any, decode: Any, shown: str) -> WekaConversation:
    try:
        conversation: WekaConversation = decode(value, type=WekaConversation)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(
            f"{where}: wanted an object with requests of t, type, in, out and hash_ids, got {clip(shown)} ({error}); "
            "repair it, or name another --format"
        ) from error
    if conversation.hash_id_scope not in ("local", "global"):
        raise InvalidRequest(
            f"{where}: wanted hash_id_scope local or global, got {clip(conversation.hash_id_scope)}; repair it"
        )
    return conversation


def _is_relative(requests: Sequence[WekaRequest]) -> bool:
    """Whether a subagent's requests count from its own begin. Both forms exist; a request before its subagent tells."""
    return any(inner.t < each.t or _is_relative(each.requests) for each in requests for inner in each.requests)


def _records_of(
    requests: Sequence[WekaRequest], where: Where, scope: str, began: float, is_relative: bool
) -> Iterator[Record]:
    for each in requests:
        time = began + each.t
        if each.hash_ids:  # A subagent has none, and not all requests have them.
            yield Record(where, time, each.input_tokens, each.output_tokens, each.hash_ids, scope)
        yield from _records_of(each.requests, where, scope, time if is_relative else 0.0, is_relative)
