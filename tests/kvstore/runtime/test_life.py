"""Life events: one line each, that a program reads back as text or JSON, bounded where it has to be."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from pathlib import Path

import pytest

from kvstore.config import StoreConfig
from kvstore.runtime.guard import LogLimit
from kvstore.runtime.life import Whole, log_life, tell_whose
from kvstore.tools.settings import settings_of

WORD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^" ]\S*)(?: |$)')


def parsed(line):
    """What a line of text says; words in quotes are JSON."""
    assert "".join(match.group() for match in WORD.finditer(line)) == line
    return {name: json.loads(word) if word[0] == '"' else word for name, word in WORD.findall(line)}


@pytest.fixture
def lines(caplog):
    with caplog.at_level(logging.INFO, "kvstore.life"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "kvstore.life"]


AWKWARD = {"path": Path("/a b"), "reason": 'it said "no"\n = twice', "empty": "", "number": 3, "share": 0.5}
READ = AWKWARD | {"path": "/a b", "reason": 'it said "no" = twice'}


def test_a_line_of_text_is_read_back_word_by_word(lines):
    log_life("disk_off", level=logging.ERROR, left_out=None, **AWKWARD)
    (line,) = lines()
    found = parsed(line)
    assert list(found)[:4] == ["event", "time", "level", "pid"]
    assert (found["event"], found["level"], found["pid"]) == ("disk_off", "error", str(os.getpid()))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["time"])
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in READ.items()}
    assert {name: found[name] for name in READ} == shown
    assert "left_out" not in found


def test_a_line_of_json_has_the_same(lines, monkeypatch):
    monkeypatch.setenv("RAYKV_LOG_FORMAT", "JSON")
    log_life("disk_off", level=logging.ERROR, left_out=None, **AWKWARD)
    (line,) = lines()
    found = json.loads(line)
    assert {name: found[name] for name in READ} == READ
    assert (found["event"], found["level"], found["pid"]) == ("disk_off", "error", os.getpid())


@pytest.mark.parametrize("form", ["", "json"])
def test_the_lines_of_a_process_say_whose_they_are_unless_they_do_so_themselves(lines, monkeypatch, form):
    monkeypatch.setenv("RAYKV_LOG_FORMAT", form)
    log_life("disk_on", path="/d")
    tell_whose(store="s", node="n1")
    log_life("disk_on", path="/d")
    log_life("node_joined", node="n2")
    before, mine, other = map(json.loads if form else parsed, lines())
    assert list(before) == ["event", "time", "level", "pid", "path"]
    assert list(mine) == ["event", "time", "level", "pid", "store", "node", "path"]
    assert (mine["store"], mine["node"], other["store"], other["node"]) == ("s", "n1", "s", "n2")


def test_a_long_text_is_cut_and_stays_on_one_line(lines):
    log_life("client_refused", reason="x y\n" * 10_000)
    (line,) = lines()
    assert len(line) < 500
    assert "\n" not in line


@pytest.mark.parametrize("form", ["", "json"])
def test_settings_are_kept_whole_so_that_a_store_can_be_started_with_them(lines, monkeypatch, form):
    monkeypatch.setenv("RAYKV_LOG_FORMAT", form)
    quotas = {f"team-{number}": {"max_bytes": 8 << 30, "max_handoffs": 64} for number in range(9)}
    settings = {"disk_path": '/mnt/a  b\n"c', "disk_capacity_bytes": 1 << 30, "tenants": quotas}
    config = StoreConfig(**settings)
    log_life("supervisor_started", settings=Whole(config.chosen()))
    (line,) = lines()
    assert "\n" not in line
    said = (json.loads if form else parsed)(line)["settings"]
    assert said == config.chosen()
    assert StoreConfig(**settings_of(shlex.split(said))) == config


def test_what_could_be_caused_without_end_is_held_back_and_counted(lines):
    limit = LogLimit(every_s=1e-9, at_once=2)
    for _ in range(3):
        log_life("worker_gone", limit=limit)
    assert len(lines()) >= 2
    strict = LogLimit(every_s=3600.0, at_once=3)
    before = len(lines())
    for number in range(10):
        log_life("worker_gone", limit=strict, number=number)
    assert [parsed(line)["number"] for line in lines()[before:]] == ["0", "1", "2"]
    assert strict.num_held_back == 7


def test_the_next_line_says_how_many_were_held_back(lines):
    limit = LogLimit(every_s=3600.0)
    for _ in range(5):
        log_life("disk_off", limit=limit)
    limit.at_once = 2
    log_life("disk_off", limit=limit)
    assert [parsed(line).get("num_held_back") for line in lines()] == [None, "4"]


def test_a_level_that_nobody_wants_costs_nothing_of_the_limit():
    limit = LogLimit(every_s=3600.0)
    logging.getLogger("kvstore.life").setLevel(logging.ERROR)
    try:
        log_life("worker_gone", limit=limit)
        assert limit.passes()
    finally:
        logging.getLogger("kvstore.life").setLevel(logging.NOTSET)
