"""docs/api.md says what there is: every verb and every setting, with the defaults of the code."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import kvstore
from kvstore.actors.cluster import Store
from kvstore.errors import PeerLost
from kvstore.node.core import NodeCore
from kvstore.remote.peers import PeerAddress

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}


def named(section: str) -> str:
    """All that stands between backquotes in one section."""
    (text,) = re.findall(rf"^## {re.escape(section)}.*?\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return " ".join(re.findall(r"`([^`]+)`", text))


@pytest.mark.parametrize(
    ("section", "cls"), [("A store", Store), ("A client", kvstore.Client), ("A client", kvstore.Job)]
)
def test_the_page_has_every_verb_and_no_other(section, cls):
    verbs = {name for name in vars(cls) if not name.startswith("_")}
    listed = set(re.findall(r"(?:^|[ .])([a-z_]+)(?=\(| |,|$)", named(section)))
    assert verbs <= listed
    called = {word.rpartition(".")[2] for word in re.findall(r"[a-z_.]+(?=\()", named(section))}
    known = {name for each in (Store, kvstore.Client, kvstore.Job) for name in dir(each)}
    assert called <= known | {"start"}


def test_what_it_says_of_arguments_is_so():
    for owner, section in ((Store, "A store"), (kvstore.Client, "A client")):
        for verb, arguments in re.findall(r"(?:^|[ ,])([a-z_]+)\(((?:[^()]|\(\))*)\)", named(section)):
            if not hasattr(owner, verb):
                continue
            parameters = inspect.signature(getattr(owner, verb)).parameters
            for argument in filter(None, arguments.replace("*", "").replace("...", "").split(", ")):
                name, _, default = argument.partition("=")
                assert name in parameters, f"{verb}({arguments})"
                assert not default or ast.literal_eval(default) == parameters[name].default, f"{verb}({arguments})"


def test_every_setting_is_listed_with_its_default():
    settings = PAGE.partition("## Settings")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", settings, re.MULTILINE))
    fields = {field.name: field.default for field in dataclasses.fields(kvstore.StoreConfig)}
    assert rows.keys() == fields.keys()
    for name, told in rows.items():
        number, _, unit = told.strip().partition(" ")
        value = ast.literal_eval(told.strip().strip("`")) if "`" in told else float(number) * _UNITS.get(unit, 1)
        assert value == fields[name], name


def test_every_setting_has_its_unit_and_a_meaning():
    settings = PAGE.partition("## Settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_]+)` \| [^|]+ \| ([^|]+) \| (.+) \|$", settings, re.MULTILINE)
    kinds = {field.name: str(field.type) for field in dataclasses.fields(kvstore.StoreConfig)}
    assert [name for name, _, _ in rows] == list(kinds)
    ends = {"_bytes": "bytes", "_per_day": "bytes a day", "_s": "seconds", "_fraction": "share of the slots",
            "_watermark": "share of the slots"}  # fmt: skip
    for name, unit, meaning in rows:
        wanted = {"bool": "true or false", "str": "text"}.get(kinds[name])
        wanted = wanted or next((unit for end, unit in ends.items() if name.endswith(end)), unit)
        assert (unit, bool(meaning.strip())) == (wanted, True), name


def test_no_other_page_lists_the_settings():
    for page in (Path(__file__).parent.parent / "docs").glob("*.md"):
        rows = re.findall(r"^\| `([a-z_]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
        fields = {field.name for field in dataclasses.fields(kvstore.StoreConfig)}
        assert page.name == "api.md" or len(fields.intersection(rows)) < len(fields) / 2, page.name


def test_the_package_has_all_that_the_page_names():
    for name in re.findall(r"kvstore\.([A-Za-z_]+)", PAGE):
        assert hasattr(kvstore, name), name


def test_it_says_what_the_statistics_are(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYKV_SOCKET_DIR", str(tmp_path / "s"))

    def nobody(*_: object) -> PeerAddress:
        raise PeerLost("no others")

    core = NodeCore("n", kvstore.StoreConfig(capacity_bytes=1 << 20), "127.0.0.1", nobody, nobody)
    try:
        core.state.pool_service.attach(bytes(32), 4096)
        stats = core.stats()
    finally:
        core.stop()
    listed = set(re.findall(r"[a-z_]+", named("What `stats")))
    inner = {"uuid", "num_bytes", "num_reads", "num_descriptors"}
    assert stats.keys() | stats["pool"].keys() | inner <= listed
    first = re.findall(r"^\| (`[^|]+) \|", PAGE.partition("## What `stats")[2], re.MULTILINE)
    assert {name for cell in first for name in re.findall(r"`([a-z_]+)`", cell)} == stats.keys()
