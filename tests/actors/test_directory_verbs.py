"""The directory's verbs, as any Ray caller may call them; without a cluster."""

from __future__ import annotations

import pytest

from kvstore.actors.directory import Directory
from kvstore.errors import InvalidRequest
from kvstore.remote.directory import DirectoryServer

SPACE = b"n" * 32


@pytest.fixture(scope="module")
def directory():
    made = Directory.__new__(Directory)
    made._server = DirectoryServer("127.0.0.1", settle_s=0.0)
    return made


@pytest.mark.parametrize("version", [None, "1", 1.0, True, -1, 1 << 64])
def test_a_clearing_that_no_store_counted_is_refused(directory, version):
    with pytest.raises(InvalidRequest, match="version: wanted an int"):
        directory.hear_clearing(SPACE, version)
    assert directory.version(SPACE) == 0


@pytest.mark.parametrize("namespace", [None, "n" * 32, b"short", 7])
def test_what_is_no_namespace_is_refused(directory, namespace):
    for ask in (lambda: directory.version(namespace), lambda: directory.hear_clearing(namespace, 1)):
        with pytest.raises(InvalidRequest, match="namespace: wanted 32 bytes"):
            ask()


@pytest.mark.parametrize("hashes", [None, 7, b"x" * 32, {"x"}, [None], ["x" * 32], [b"short"], [b"x" * 32] * 131073])
def test_what_are_no_hashes_are_refused(directory, hashes):
    with pytest.raises(InvalidRequest, match=r"hash(es)?: wanted"):
        directory.locate(hashes)


def test_what_is_right_is_answered(directory):
    assert directory.locate([b"x" * 32]) == []
    assert directory.hear_clearing(b"o" * 32, 3) is True
    assert directory.version(b"o" * 32) == 3
    assert directory.ping(5.0) is True
