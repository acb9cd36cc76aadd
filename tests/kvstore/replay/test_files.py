"""A file is written as a whole, or what was there stays and nothing else is left."""

from __future__ import annotations

import errno
import os

import pytest

from kvstore.errors import ConfigError
from kvstore.replay import files
from kvstore.replay.files import write_whole


def test_it_writes_text_and_bytes(tmp_path):
    write_whole(tmp_path / "text", "é\n")
    write_whole(tmp_path / "bytes", b"\xff")
    assert (tmp_path / "text").read_bytes() == b"\xc3\xa9\n"
    assert (tmp_path / "bytes").read_bytes() == b"\xff"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "text"]


def test_others_may_read_it_as_any_new_file(tmp_path):
    write_whole(tmp_path / "ours", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "trace.jsonl"
    path.write_text("before")
    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(ConfigError, match=r"trace.jsonl: wanted to write 3 bytes there, got No space left on device"):
        write_whole(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["trace.jsonl"]


def test_an_interrupt_leaves_nothing_either(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "new", "x")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        write_whole(tmp_path / "no" / "file", "x")


def test_what_is_no_file_is_written_to_in_place():
    write_whole(files.Path("/dev/null"), "x")
    assert not files.Path("/dev/null").is_file()
    with pytest.raises(ConfigError, match="No space left on device"):
        write_whole(files.Path("/dev/full"), "x")
