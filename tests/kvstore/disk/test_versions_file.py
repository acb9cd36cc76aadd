"""The versions of cleared namespaces on disk: durable when said so, and never read half."""

import json
import threading

import pytest
from disk_made import digest
from disk_store import SOON_S, wait_until

from kvstore.disk.versions_file import VersionsKeeper, read_versions, write_versions
from kvstore.errors import ConfigError

ONE, TWO = digest(1), digest(2)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "versions.json"


@pytest.fixture
def keep(path):
    made = []

    def keep(versions):
        keeper = VersionsKeeper(path, lambda: dict(versions), read_versions(path))
        keeper.thread.start()
        made.append(keeper)
        return keeper

    yield keep
    for keeper in made:
        assert keeper.close(SOON_S)
        assert not keeper.thread.is_alive()


def test_they_come_back(path):
    assert read_versions(path) == {}
    write_versions(path, {ONE: 3, TWO: 1 << 40})
    assert read_versions(path) == {ONE: 3, TWO: 1 << 40}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"7", b"null", b'{"aa": 1}', b'{"zz": 1}', b"\xff\xfe", b"\0" * 64]
    + [json.dumps({digest(1).hex(): value}).encode() for value in (-1, None, "x", [1], {})],
)
def test_a_damaged_file_is_said_to_be_one(path, text):
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"versions\.json"):
        read_versions(path)
    assert path.read_bytes() == text


def test_every_prefix_of_the_file_is_damaged_or_nothing(path):
    write_versions(path, {ONE: 31, TWO: 4})
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(ConfigError):
            read_versions(path)


def test_save_soon_and_wait(path, keep):
    versions = {}
    keeper = keep(versions)
    for version in range(1, 20):
        versions[ONE] = version
        assert keeper.wait(keeper.save_soon(), SOON_S)
        assert read_versions(path) == versions


def test_many_callers(path, keep):
    versions, lock = {}, threading.Lock()
    keeper, failed = keep(versions), []

    def clear(number):
        for version in range(1, 8):
            with lock:
                versions[digest(number)] = version
            if not keeper.wait(keeper.save_soon(), SOON_S) or read_versions(path).get(digest(number)) != version:
                failed.append(number)

    callers = [threading.Thread(target=clear, args=(number,)) for number in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(SOON_S)
    assert failed == []


def test_a_disk_that_refuses_is_tried_again(path, keep, monkeypatch):
    monkeypatch.setattr("kvstore.disk.versions_file._RETRY_S", 0.01)
    versions, tries = {}, []
    keeper = keep(versions)

    def refuse(*args):
        tries.append(args)
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.disk.versions_file.write_whole", refuse)
        versions[ONE] = 1
        number = keeper.save_soon()
        wait_until(lambda: len(tries) > 2)
        assert not keeper.wait(number, 0.01)
    assert keeper.wait(number, SOON_S)
    assert read_versions(path) == {ONE: 1}


def test_what_waits_is_saved_before_the_end(path):
    versions = {}
    keeper = VersionsKeeper(path, lambda: dict(versions), {})
    keeper.thread.start()
    versions[ONE] = 5
    number = keeper.save_soon()
    assert keeper.close(SOON_S)
    assert keeper.wait(number, 0.0)
    assert read_versions(path) == {ONE: 5}


def test_a_closed_keeper_does_not_say_that_it_saved(path):
    keeper = VersionsKeeper(path, dict, {})
    keeper.thread.start()
    assert keeper.close(SOON_S)
    assert not keeper.wait(keeper.save_soon(), SOON_S)


def test_nothing_is_written_without_news(path, keep):
    keeper = keep({})
    assert keeper.wait(keeper.save_soon(), SOON_S)
    keeper.save()
    assert not path.exists()
