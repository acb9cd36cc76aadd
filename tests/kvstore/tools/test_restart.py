"""The command `kvstore restart`: what it takes, and what it shows."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kvstore.errors import ConfigError
from kvstore.tools.restart import restart_command, setting_of

WARM = {"is_warm": True, "num_blocks": 7, "num_held_slots": 2, "why_cold": ""}
COLD = {"is_warm": False, "num_blocks": 0, "num_held_slots": 0, "why_cold": "the old store gave nothing"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("capacity_bytes=8GiB", ("capacity_bytes", 8 << 30)),
        ("disk_write_bytes_per_day=1TiB", ("disk_write_bytes_per_day", 1 << 40)),
        ("lease_ttl_s=60", ("lease_ttl_s", 60.0)),
        ("low_watermark=0.1", ("low_watermark", 0.1)),
        ("disk_min_uses=2", ("disk_min_uses", 2)),
        ("metrics=false", ("metrics", False)),
        ("disk_path=/a=b", ("disk_path", "/a=b")),
        ("events_endpoint=", ("events_endpoint", "")),
    ],
)
def test_a_setting_is_read_by_its_kind(text, wanted):
    found = setting_of(text)
    assert found == wanted
    assert type(found[1]) is type(wanted[1])


@pytest.mark.parametrize("text", ["lease_ttl_s", "colour=1", "lease_ttl_s=long", "capacity_bytes=many"])
def test_what_is_no_setting_is_refused(text):
    with pytest.raises(ConfigError):
        setting_of(text)


@pytest.mark.parametrize(
    ("text", "wanted"), [("lease_ttl_s=long", "wanted a number, got"), ("metrics=maybe", "wanted true or false, got")]
)
def test_a_refusal_names_the_kind_of_value_that_the_setting_takes(text, wanted):
    with pytest.raises(ConfigError, match=wanted):
        setting_of(text)


class Store:
    def __init__(self, calls):
        self.calls = calls

    def restart(self, node_ids, **options):
        self.calls.append((node_ids, options))
        return {"a": WARM, "b": COLD}


def run(*words):
    calls = []
    done = CliRunner().invoke(restart_command(lambda name, address: Store(calls)), list(words))
    assert done.exit_code == 0, done.output
    return calls, done.stdout


def test_it_says_for_each_node_what_was_kept_or_why_not():
    calls, shown = run("--set", "lease_ttl_s=60", "--set", "capacity_bytes=1GiB", "--wait", "3")
    assert calls == [(None, {"cold": False, "wait_s": 3.0, "lease_ttl_s": 60.0, "capacity_bytes": 1 << 30})]
    assert shown.splitlines()[-2:] == [
        "node a: warm, 7 blocks kept, 2 slots wait for workers", "node b: cold: the old store gave nothing",
    ]  # fmt: skip


def test_it_prints_json_alone_and_names_nodes():
    calls, shown = run("--json", "--node", "a", "--node", "b", "--cold")
    assert calls == [(["a", "b"], {"cold": True, "wait_s": 10.0})]
    assert json.loads(shown) == {"a": WARM, "b": COLD}
