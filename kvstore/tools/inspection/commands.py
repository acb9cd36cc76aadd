"""The commands `kvstore inspect ...`; the command line gives them the way to join a store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, BinaryIO

import click

from kvstore.blocks.chain import BlockHashes
from kvstore.bounds import clip
from kvstore.errors import InvalidRequest
from kvstore.tools.commands import ADDRESS, JSON, NAME, POSITIVE, Group, Seconds
from kvstore.tools.inspection.finding import Answers, absent, is_error, the_chain, the_namespace
from kvstore.tools.inspection.tables import (
    show_chain,
    show_handoffs,
    show_leases,
    show_namespaces,
    show_silent,
    show_tenants,
)
from kvstore.tools.inspection.tokens import chain_of, read_tokens

_HASH_DIGITS = 64
_HEX = re.compile("[0-9a-f]+")
_MOST_ID_DIGITS = 20
_MOST_ROWS = 10_000
_LIMIT = click.option(
    "--limit", type=click.IntRange(1, _MOST_ROWS), default=100, show_default=True, help="Most rows of a node."
)
_TIMEOUT = click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(0.1, 600.0),
    default=10.0,
    show_default=True,
    help="Seconds for the answers of all nodes.",
)
Connect = Callable[[str, str | None], Any]


def inspect_group(connect: Connect) -> click.Group:
    """Return the group of commands; `connect` returns the handle of a store, by its name and address."""
    group = Group(
        "inspect",
        short_help="Look into a store: namespaces, chains, leases, hand-offs, tenants.",
        help="Look into a store that runs: what its nodes have, where, and what holds it.\n\nNothing is changed, and "
        "no block or token is shown. A node that does not answer in time is named, and the exit status is 1.",
    )
    for make in (_namespace_command, _chain_command, _lease_command, _handoff_command, _tenant_command):
        make(connect, group)
    return group


def _ask(store: Any, what: str, timeout_s: float, **options: Any) -> Answers:
    """Return each node's answer; a node without a store has an error."""
    absent_stores = {node: {"error": "this node has no store that can be found"} for node in store.node_ids()}
    return {**absent_stores, **store.inspect(what, timeout_s=timeout_s, **options)}


def _end(ctx: click.Context, store: Any, nodes: Answers, as_json: bool, show: Callable[[], None], **more: Any) -> None:
    if as_json:
        click.echo(json.dumps({"name": store.config.name, **more, "nodes": nodes}))
    else:
        show()
        show_silent(nodes)
    ctx.exit(1 if any(map(is_error, nodes.values())) else 0)


def _namespace_command(connect: Connect, group: click.Group) -> None:
    @group.command("namespace", short_help="What each namespace has.")
    @click.argument("prefix", required=False, metavar="[DIGEST-PREFIX]")
    @NAME
    @ADDRESS
    @JSON
    @_LIMIT
    @_TIMEOUT
    @click.pass_context
    def namespace(
        ctx: click.Context,
        prefix: str | None,
        name: str,
        address: str | None,
        as_json: bool,
        limit: int,
        timeout_s: float,
    ) -> None:
        """Show what each namespace has on each node and tier: blocks, bytes, pins, and how often it was cleared.

        A namespace is named by its digest (`Namespace.digest.hex()`), or the first digits of it. Of a single one there
        is more: chains, priorities, and the age of its last use.

        Example: kvstore inspect namespace 3f9a
        """
        store = connect(name, address)
        nodes = _ask(store, "namespaces", timeout_s, prefix=_prefix(prefix or ""), limit=limit)
        if prefix:
            the_namespace(nodes, prefix)
        _end(ctx, store, nodes, as_json, lambda: show_namespaces(name, nodes, has_details=bool(prefix)))


def _chain_command(connect: Connect, group: click.Group) -> None:
    @group.command("chain", short_help="Which node has which run of a chain.")
    @click.option("--hash", "hashes", multiple=True, metavar="HEX", help="Hash of a block; may be repeated, in order.")
    @click.option("--tokens", type=click.File("rb"), help="File of token ids, or - for stdin.")
    @click.option("--namespace", "prefix", metavar="DIGEST-PREFIX", help="Of the tokens.")
    @click.option("--block-size", type=POSITIVE, help="Tokens in a block of that namespace.")
    @NAME
    @ADDRESS
    @JSON
    @_LIMIT
    @_TIMEOUT
    @click.pass_context
    def chain(
        ctx: click.Context,
        hashes: tuple[str, ...],
        tokens: BinaryIO | None,
        prefix: str | None,
        block_size: int | None,
        name: str,
        address: str | None,
        as_json: bool,
        limit: int,
        timeout_s: float,
    ) -> None:
        """Show which node has which run of a chain: its tier, pins and priority, and the age of its last use.

        The hash of one block is enough: the blocks before it are found from there. Token ids are hashed here, without
        adapters and media, and are not shown.

        Example: kvstore inspect chain --tokens prompt.json --namespace 3f9a --block-size 16
        """
        if bool(hashes) == bool(tokens):
            raise click.UsageError("give --hash or --tokens, one of them")
        if tokens is not None and not (prefix and block_size):
            raise click.UsageError("--tokens needs --namespace and --block-size, which decide what their hashes are")
        if tokens is None and (prefix or block_size):
            raise click.UsageError("--namespace and --block-size are for --tokens; a hash names its namespace")
        store = connect(name, address)
        wanted = _by_hash(store, hashes, timeout_s) if tokens is None else None
        if tokens is not None:
            found = _ask(store, "namespaces", timeout_s, prefix=_prefix(prefix or ""), limit=_MOST_ROWS)
            wanted = chain_of(read_tokens(tokens), the_namespace(found, prefix or ""), block_size or 1)
        assert wanted is not None, "one of the two"
        nodes = _ask(store, "chain", timeout_s, chain=wanted, limit=limit)
        said = {"namespace": wanted.namespace.hex(), "start": wanted.start, "num_blocks": len(wanted)}
        missing = absent(nodes, wanted)
        _end(
            ctx,
            store,
            nodes,
            as_json,
            lambda: show_chain(wanted, nodes, by_tokens=bool(tokens)),
            **said,
            absent=missing,
        )


def _by_hash(store: Any, texts: tuple[str, ...], timeout_s: float) -> BlockHashes:
    hashes = []
    for text in texts:
        if len(text) != _HASH_DIGITS or not _HEX.fullmatch(text.lower()):
            raise InvalidRequest(
                f"--hash: wanted {_HASH_DIGITS} digits in hexadecimal, got {text[:80]!r}; give a block's whole hash"
            )
        hashes.append(bytes.fromhex(text))
    return the_chain(_ask(store, "path", timeout_s, hashes=hashes), hashes)


def _lease_command(connect: Connect, group: click.Group) -> None:
    @group.command("lease", short_help="Leases and pins, and what ends them.")
    @click.argument("text", required=False, metavar="[ID]")
    @NAME
    @ADDRESS
    @JSON
    @_LIMIT
    @_TIMEOUT
    @click.pass_context
    def lease(
        ctx: click.Context,
        text: str | None,
        name: str,
        address: str | None,
        as_json: bool,
        limit: int,
        timeout_s: float,
    ) -> None:
        """Show leases and pins, the oldest first: owner, blocks, age, seconds left, and what ends each.

        With an id, also which blocks it holds. The bytes are those of the slots that it keeps.

        Example: kvstore inspect lease --limit 5
        """
        lease_id = None if text is None else _lease_id(text)
        store = connect(name, address)
        nodes = _ask(store, "leases", timeout_s, lease_id=lease_id, limit=limit)
        if lease_id is not None and not any(each["leases"] for each in nodes.values() if not is_error(each)):
            raise InvalidRequest(
                f"ID: wanted a lease or pin that is held, got {lease_id}, which no node that answered has; it has "
                "ended: `kvstore inspect lease` lists those that are held"
            )
        _end(ctx, store, nodes, as_json, lambda: show_leases(name, nodes))


def _lease_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_ID_DIGITS and 0 < int(text) < 1 << 64):
        raise InvalidRequest(f"ID: wanted an id from `kvstore inspect lease`, got {clip(text)}")
    return int(text)


def _handoff_command(connect: Connect, group: click.Group) -> None:
    @group.command("handoff", short_help="Hand-offs under way, and what they wait for.")
    @NAME
    @ADDRESS
    @JSON
    @_LIMIT
    @_TIMEOUT
    @click.pass_context
    def handoff(
        ctx: click.Context, name: str, address: str | None, as_json: bool, limit: int, timeout_s: float
    ) -> None:
        """Show hand-offs under way: tickets with their age and bytes, fetches, and what each waits for.

        A ticket is named by the first digits of a digest of its key, because the key itself gives the right to its
        blocks.

        Example: kvstore inspect handoff --json
        """
        store = connect(name, address)
        nodes = _ask(store, "handoffs", timeout_s, limit=limit)
        _end(ctx, store, nodes, as_json, lambda: show_handoffs(name, nodes))


def _tenant_command(connect: Connect, group: click.Group) -> None:
    @group.command("tenant", short_help="What each tenant has of its quotas.")
    @click.argument("tenant", required=False, metavar="[TENANT]")
    @NAME
    @ADDRESS
    @JSON
    @click.pass_context
    def tenant(ctx: click.Context, tenant: str | None, name: str, address: str | None, as_json: bool) -> None:
        """Show what each tenant has of its quotas on each node, what was evicted, and what the quotas refused.

        Example: kvstore inspect tenant batch
        """
        store = connect(name, address)
        if tenant is not None and tenant not in (known := [quota.name for quota in store.config.tenants]):
            raise InvalidRequest(
                f"TENANT: wanted a tenant of this store, got {clip(tenant)}; it has {', '.join(known) or 'none'}"
            )
        stats = store.stats()["nodes"]
        absent_stores = {node: {"error": "this node has no store that can be found"} for node in store.node_ids()}
        nodes = absent_stores | {node: each if is_error(each) else _only(each, tenant) for node, each in stats.items()}
        _end(ctx, store, nodes, as_json, lambda: show_tenants(name, nodes))


def _only(stats: dict[str, Any], tenant: str | None) -> dict[str, Any]:
    found = stats["tenants"].items()
    return {"tenants": {name: counts for name, counts in found if tenant in (None, name)}}


def _prefix(text: str) -> str:
    wanted = text.lower()
    if text and (len(text) > _HASH_DIGITS or not _HEX.fullmatch(wanted)):
        raise InvalidRequest(
            f"namespace: wanted the first digits of a digest in hexadecimal, got {text[:80]!r}; "
            "`kvstore inspect namespace` lists them"
        )
    return wanted
