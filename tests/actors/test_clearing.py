"""Which version a clearing of all nodes has: no clock, one after the highest, and never silently too old."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from kvstore.actors import calls
from kvstore.actors.clearing import clear_everywhere
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.errors import InvalidRequest, PeerLost, StaleVersion, StoreUnavailable
from kvstore.remote.versions import NamespaceVersions

_PATH = Path(__file__).parent.parent / "kvstore" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("kvstore_cluster_of_clearing", _PATH)
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
socket_folder, cluster = _MODULE.socket_folder, _MODULE.cluster

SPACE = Namespace(model="m", shape=KVShape(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4))


class Handle:
    """An actor's handle, as far as a clearing needs it: each verb is called at once, on the real object."""

    def __init__(self, **verbs):
        for name, verb in verbs.items():
            setattr(self, name, type("Verb", (), {"remote": staticmethod(lambda *args, verb=verb: (verb, args))}))


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch):
    monkeypatch.setattr(calls, "begin", lambda what, method, *args: method.remote(*args))
    monkeypatch.setattr(calls, "answer", lambda what, asked, timeout_s: asked[0](*asked[1]))


def store_of(core):
    return Handle(clear=core.state.pool_service.clear, version=core.state.versions.get)


def directory_of(server):
    return directory_of_versions(server.versions)


def directory_of_versions(versions):
    return Handle(version=versions.get, hear_clearing=versions.hear)


def lost(*_):
    raise PeerLost("wanted an answer, got none")


LOST = Handle(clear=lost, version=lost, hear_clearing=lost)


@pytest.mark.parametrize("steps_s", [(2.0, 0.0), (-10.0, 0.0, -5.0)])
def test_every_clearing_takes_effect_whatever_clocks_say(cluster, monkeypatch, steps_s):
    """Two drivers whose clocks are seconds apart."""
    core = cluster.add("a", mover=False)
    writer, reader = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    hashes, stores, directory = cluster.hashes(10), {"a": store_of(core)}, directory_of(cluster.directory)
    now = time.time_ns()
    for step_s in steps_s:
        monkeypatch.setattr("time.time_ns", lambda step_s=step_s: now + int(step_s * 1e9))
        assert writer.save(hashes, range(10)).num_written == 10
        assert clear_everywhere(SPACE.digest, stores, directory) == 10
        assert reader.client.lookup(hashes).num_blocks == 0
        assert reader.load(hashes, range(10)).num_blocks == 0


def test_a_store_that_hears_of_a_clearing_before_it_is_asked_counts(cluster):
    """The directory, or a peer, may be faster than the caller."""
    core, hashes = cluster.add("a", mover=False), cluster.hashes(10)
    assert cluster.worker("a", seed=1).save(hashes, range(10)).num_written == 10
    known, service = NamespaceVersions(), core.state.pool_service

    def clear(namespace, version):
        service.hear_clearing(namespace, version)
        return service.clear(namespace, version)

    stores = {"a": Handle(clear=clear, version=core.state.versions.get)}
    assert clear_everywhere(SPACE.digest, stores, directory_of_versions(known)) == 10
    assert clear_everywhere(SPACE.digest, stores, directory_of_versions(known)) == 0


def test_a_clearing_is_later_than_all_that_any_node_or_the_directory_knows(cluster):
    cores = [cluster.add(node, mover=False) for node in "ab"]
    stores, directory = {core.state.node_id: store_of(core) for core in cores}, directory_of(cluster.directory)
    cores[0].state.versions.advance(SPACE.digest, 4)
    cluster.directory.versions.hear(SPACE.digest, 9)
    assert clear_everywhere(SPACE.digest, stores, directory) == 0
    assert [core.state.versions.get(SPACE.digest) for core in cores] == [10, 10]
    assert cluster.directory.versions.get(SPACE.digest) == 10
    # Without a directory the stores know; a store that is lost meanwhile hears of it later.
    clear_everywhere(SPACE.digest, stores, None)
    clear_everywhere(SPACE.digest, stores | {"c": LOST}, directory)
    assert [core.state.versions.get(SPACE.digest) for core in cores] == [12, 12]


def test_every_shard_hears_of_a_clearing_and_one_that_answers_is_enough():
    known, shards = NamespaceVersions(), [NamespaceVersions() for _ in range(2)]
    stores, handles = {"a": Handle(version=known.get, clear=known.advance)}, list(map(directory_of_versions, shards))
    shards[1].advance(SPACE.digest, 6)
    clear_everywhere(SPACE.digest, stores, *handles)
    assert [versions.get(SPACE.digest) for versions in (known, *shards)] == [7, 7, 7]
    # One shard and one store are away: the other shard knows the last clearing.
    clear_everywhere(SPACE.digest, stores | {"c": LOST}, handles[0], LOST)
    assert [versions.get(SPACE.digest) for versions in (known, *shards)] == [8, 8, 7]
    with pytest.raises(StoreUnavailable, match="wanted the last clearing"):
        clear_everywhere(SPACE.digest, stores | {"c": LOST}, LOST, LOST)


def test_a_clearing_that_may_be_too_old_clears_nothing(cluster):
    core = cluster.add("a", mover=False)
    for stores, directory in (({"a": store_of(core), "c": LOST}, LOST), ({"c": LOST}, LOST), ({}, None)):
        with pytest.raises(StoreUnavailable, match="wanted the last clearing"):
            clear_everywhere(SPACE.digest, stores, directory)
    assert core.state.versions.get(SPACE.digest) == 0


def test_a_node_that_was_cleared_since_it_was_asked_is_cleared():
    """By another caller under the same version, or because the directory was quicker."""
    versions = NamespaceVersions()

    def known(namespace):
        found = versions.get(namespace)
        versions.advance(namespace)
        return found

    store = Handle(version=known, clear=lambda namespace, version: versions.advance(namespace, version) and 1)
    assert clear_everywhere(SPACE.digest, {"a": store}, None) == 0
    assert versions.get(SPACE.digest) == 1


def test_a_node_that_could_not_be_asked_is_cleared_under_a_higher_version():
    known, other = NamespaceVersions(), NamespaceVersions()
    other.advance(SPACE.digest, 5)
    answers = iter([lost, other.get])
    back = Handle(version=lambda namespace: next(answers)(namespace), clear=other.advance)
    directory = Handle(version=known.get, hear_clearing=known.hear)
    clear_everywhere(SPACE.digest, {"a": Handle(version=known.get, clear=known.advance), "b": back}, directory)
    assert (known.get(SPACE.digest), other.get(SPACE.digest)) == (6, 6)


def test_a_store_that_refuses_is_an_error_and_the_others_are_cleared():
    known = NamespaceVersions()

    def refuses(namespace, version):
        raise InvalidRequest("wanted something else")

    stores = {"a": Handle(version=known.get, clear=refuses), "b": Handle(version=known.get, clear=known.advance)}
    with pytest.raises(InvalidRequest, match="something else"):
        clear_everywhere(SPACE.digest, stores, None)
    assert known.get(SPACE.digest) == 1


def test_a_clearing_that_cannot_be_sent_to_one_node_reaches_the_others():
    cleared = []

    class Unsendable:
        def remote(self, *_):
            raise PeerLost("wanted to send, cannot")

    def clear(namespace, version):
        cleared.append(version)
        return 3

    gone, here = Handle(version=lambda _: 4), Handle(version=lambda _: 6, clear=clear)
    gone.clear = Unsendable()
    directory = Handle(version=lambda _: 5, hear_clearing=lambda *_: cleared.append("directory"))
    assert clear_everywhere(SPACE.digest, {"a": gone, "b": here}, directory) == 3
    assert cleared == [7, "directory"]


def test_a_clearing_that_others_outrun_again_and_again_is_an_error():
    known, other = NamespaceVersions(), NamespaceVersions()

    def ahead(namespace, version):
        other.advance(namespace, version + 1)
        return other.advance(namespace, version)

    away = Handle(version=lost, clear=ahead)
    directory = Handle(version=known.get, hear_clearing=known.hear)
    with pytest.raises(StaleVersion, match=r"nodes \['b'\]"):
        clear_everywhere(SPACE.digest, {"a": Handle(version=known.get, clear=known.advance), "b": away}, directory)


def test_a_store_that_begins_while_others_are_asked_is_cleared_though_it_asked_the_directory_before():
    old, known, later = NamespaceVersions(), NamespaceVersions(), NamespaceVersions()
    b = Handle(version=old.get, clear=lambda namespace, version: 4 * (old.advance(namespace, version) == version))
    first = Handle(version=lost, clear=lost)  # Of node a, whose next store takes its blocks over.
    following = Handle(clear=lambda namespace, version: 16 * (later.advance(namespace, version) == version))
    here = [{"a": first, "b": b}, {"a": following, "b": b}]
    directory = directory_of_versions(known)
    assert clear_everywhere(SPACE.digest, here[0], directory, stores_now=lambda: here[-1]) == 20
    assert [versions.get(SPACE.digest) for versions in (old, known, later)] == [1, 1, 1]


def test_stores_that_begin_meanwhile_are_looked_for_until_none_is_new():
    known, asked = NamespaceVersions(), []

    def store(number):
        def clear(namespace, version):
            asked.append(number)
            if number == 1:
                lost()  # It ended, too.
            if number == 3:
                raise StaleVersion("knows it")
            return 1

        return Handle(version=lambda namespace: 0, clear=clear)

    stores = [{"a": store(number)} for number in range(4)]
    now = iter([*stores[1:], stores[3], stores[3]])
    directory = directory_of_versions(known)
    assert clear_everywhere(SPACE.digest, stores[0], directory, stores_now=lambda: next(now)) == 2
    assert asked == [0, 1, 2, 3]
