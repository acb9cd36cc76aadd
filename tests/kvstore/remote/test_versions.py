"""Which clearing a process has heard of, and what it has not told yet."""

from __future__ import annotations

import pytest

from kvstore.blocks.codec import encode
from kvstore.errors import InvalidRequest, ProtocolError, StaleVersion
from kvstore.remote.versions import NamespaceVersions, News, decode_news

ONE, TWO = b"1" * 32, b"2" * 32


def test_only_later_clearings_are_news():
    versions = NamespaceVersions()
    assert versions.get(ONE) == 0
    assert [versions.hear(ONE, version) for version in (5, 5, 4, 6)] == [True, False, False, True]
    assert (versions.get(ONE), versions.get(TWO)) == (6, 0)
    for namespace, version in ((ONE, 6), (ONE, 5), (TWO, 0)):
        with pytest.raises(StaleVersion, match="nothing was cleared"):
            versions.advance(namespace, version)
    assert [versions.advance(ONE), versions.advance(TWO)] == [7, 1]


@pytest.mark.parametrize("version", [2**64 - 1, 2**32 + 6, -1, 6.0, "6", True])
def test_what_is_no_next_version_is_refused_and_clearing_goes_on(version):
    """One message of a peer or a Ray caller must not use up the versions that are left."""
    versions = NamespaceVersions()
    versions.advance(ONE, 5)
    for door in (versions.advance, versions.hear):
        with pytest.raises(InvalidRequest, match=r"wanted an int from 0 to 4294967301"):
            door(ONE, version)
    versions.hear_all({ONE: version, TWO: 3})
    assert (versions.get(ONE), versions.get(TWO)) == (5, 3)
    assert versions.advance(ONE) == 6


def test_what_was_heard_since():
    versions = NamespaceVersions()
    assert versions.since(0) == (0, {})
    versions.advance(ONE, 5)
    versions.advance(TWO, 1)
    first, news = versions.since(0)
    assert news == {ONE: 5, TWO: 1}
    versions.advance(ONE, 9)
    second, news = versions.since(first)
    assert news == {ONE: 9}
    assert versions.since(second) == (second, {})
    assert versions.since(0)[1] == {ONE: 9, TWO: 1}


def test_versions_on_the_wire():
    found = News({ONE: 2**64 - 1, TWO: 1}, True)
    assert decode_news(encode(found)) == found
    assert decode_news(encode(News({}, False))) == News({}, False)
    for wrong in (
        b"",
        encode(found)[:-1],
        encode(News({ONE[:-1]: 1}, True)),
        encode(News({ONE: -1}, True)),
        encode(News({ONE: None}, True)),
        encode(News({}, None)),
        encode([ONE]),
        encode({}),
    ):
        with pytest.raises(ProtocolError, match="of this version"):
            decode_news(wrong)


@pytest.mark.parametrize("namespace", [b"", b"n" * 31, b"n" * 33, "n" * 32, None], ids=repr)
def test_what_is_no_namespace_is_refused(namespace):
    """One that cannot be packed would keep a store from publishing for ever."""
    versions = NamespaceVersions()
    with pytest.raises(InvalidRequest, match="wanted 32 bytes"):
        versions.advance(namespace)
    assert versions.since(0) == (0, {})


def test_namespaces_of_a_group_have_one_version_and_what_is_kept_is_bounded():
    versions = NamespaceVersions()
    mate, other = ONE[:2] + bytes(30), ONE[:1] + b"x" + ONE[2:]
    assert [versions.advance(ONE), versions.advance(mate), versions.get(ONE), versions.get(other)] == [1, 2, 2, 0]
    assert versions.since(0)[1] == {mate: 2}, "any of them stands for all"
    for number in range(1000):
        versions.advance(ONE[:2] + number.to_bytes(30, "little"))
    assert len(versions.since(0)[1]) == 1
    assert versions.get(ONE) == 1002


def test_of_many_clearings_that_cannot_be_taken_over_few_are_logged(caplog):
    versions = NamespaceVersions()
    for _ in range(3):
        versions.hear_all({bytes([i]) * 32: 1 << 60 for i in range(50)})
    assert len(caplog.records) == 1
    assert versions.since(0) == (0, {})
