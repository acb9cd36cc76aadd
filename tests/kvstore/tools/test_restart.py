"""The command `kvstore restart`: what it takes, and what it shows."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

import kvstore
from kvstore.tools.restart import restart_command

WARM = {"is_warm": True, "num_blocks": 7, "num_held_slots": 2, "why_cold": ""}
COLD = {"is_warm": False, "num_blocks": 0, "num_held_slots": 0, "why_cold": "the old store gave nothing"}


BEFORE = kvstore.StoreConfig(tenants={"chat": {}, "batch": {"max_bytes": 1 << 20, "max_handoffs": 4}})


class Store:
    def __init__(self, calls):
        self.calls, self.config = calls, BEFORE

    def restart(self, node_ids, on_step, **options):
        on_step("0123456789abcdef", "starts its next store")
        self.calls.append((node_ids, options))
        changes = {name: value for name, value in options.items() if name not in ("cold", "wait_s")}
        self.config = replace(BEFORE, **changes)
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


def test_the_capacity_has_an_option_as_for_start_and_is_given_once():
    calls, _ = run("--capacity", "512MiB")
    assert calls == [(None, {"cold": False, "wait_s": 10.0, "capacity_bytes": 512 << 20})]
    for words, says in (
        (("--capacity", "1GiB", "--set", "capacity_bytes=1GiB"), "--capacity and --set capacity_bytes: wanted one"),
        (("--capacity", "much"), "--capacity: "),
    ):
        done = CliRunner().invoke(restart_command(lambda name, address: Store([])), list(words))
        assert done.exit_code == 2
        assert says in done.stderr


def test_it_says_each_step_on_stderr():
    done = CliRunner().invoke(restart_command(lambda name, address: Store([])), ["--json"])
    assert done.stderr.splitlines()[-1] == "node 0123456789ab: starts its next store"


def test_it_prints_json_alone_and_names_nodes():
    calls, shown = run("--json", "--node", "a", "--node", "b", "--cold")
    assert calls == [(["a", "b"], {"cold": True, "wait_s": 10.0})]
    assert json.loads(shown) == {"a": WARM, "b": COLD}


def test_an_error_names_settings_as_set_takes_them():
    done = CliRunner().invoke(restart_command(lambda name, address: Refusing()), ["--set", "capacity_bytes=1KiB"])
    assert done.exit_code == 2
    assert done.stderr.endswith("ConfigError: capacity_bytes: wanted at least 65536, got 1024\n")


def test_it_says_which_settings_changed_and_which_tenants_came_left_or_changed():
    tenants = '{"batch": {"max_bytes": 524288}, "new": {}}'
    _, shown = run("--set", "lease_ttl_s=60", "--set", f"tenants={tenants}")
    assert shown.splitlines()[-6:-2] == [
        f"lease_ttl_s: {BEFORE.lease_ttl_s!r} before, 60.0 now",
        "tenant batch: max_bytes 1 MiB, max_handoffs 4 before, max_bytes 512 KiB now",
        "tenant chat: removed",
        "tenant new: new, no quotas",
    ]
    _, shown = run()
    assert not any(word in shown for word in ("before", "removed", "new", "no setting changed")), (
        "nothing was asked for"
    )
    _, shown = run("--set", f"lease_ttl_s={BEFORE.lease_ttl_s}")
    assert "no setting changed: the store had these values" in shown.splitlines()


class Refusing:
    config = BEFORE

    def restart(self, *_, capacity_bytes, **__):
        kvstore.StoreConfig(capacity_bytes=capacity_bytes)


PROGRAM = """
import sys
import kvstore
from kvstore.cli import main
from kvstore.tools.restart import restart_command
WARM = {"is_warm": True, "num_blocks": 7, "num_held_slots": 0, "why_cold": ""}
class Store:
    config = kvstore.StoreConfig()
    def restart(self, *args, **options):
        print("done", file=sys.stderr, flush=True)
        return {"a": WARM}
main.add_command(restart_command(lambda name, address: Store()))
main(["restart", *sys.argv[1:]])
"""


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["", "json"])
@pytest.mark.parametrize(
    ("redirect", "code", "error"),
    [
        ("| true", 1, "Broken pipe"),
        (">/dev/full", 1, "No space left"),
        (">&-", 0, ""),
        ("2>&- | cat", 0, None),
    ],
)
def test_a_restart_whose_result_cannot_be_written_says_that_it_is_done(redirect, code, error, words):
    line = f'"$0" -c "$1" {" ".join(words)} {redirect}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line, sys.executable, PROGRAM], capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    said = done.stderr.splitlines()
    if error is None:
        assert said == []
        assert "7" in done.stdout
        return
    assert "done" in said
    told = [line for line in said if line.startswith("the restart is done; its result could not be written")]
    assert (len(told), all(error in line for line in told)) == (1 if error else 0, True)
    assert said[-1] == (told[-1] if told else "done"), "no traceback"
