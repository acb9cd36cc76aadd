"""`kvstore top`: rates between two statistics, as rows, as JSON and as a table; and how it ends."""

from __future__ import annotations

import copy
import json

import pytest
from rich.console import Console

from kvstore.tools.top import rows_of, table_of, watch

NODE = {
    "epoch": "e", "now_s": 100.0, "draining": False, "num_handoffs": 2,
    "pool": {"num_slots": 100, "num_free": 25, "num_pinned": 10, "num_evicted": 7}, "disk": {"num_unwritten": 6},
    "pins": {
        "lease": {"num": 3, "oldest_s": 1.0}, "hard": {"num": 1, "oldest_s": 60.0}, "soft": {"num": 0, "oldest_s": 0.0},
    },
    "queues": {"loads": 4, "threads": 5},
    "traffic": {
        "hit_blocks": {"memory": 10, "disk": 0, "peer": 0}, "miss_blocks": {"load": {"timeout": 1}, "handoff": {}},
        "in_bytes": {"save": 10**9, "peer": 0, "disk": 0, "handoff": 0},
        "out_bytes": {"load": 10**9, "peer": 0, "disk": 0, "handoff": 0},
    },
}  # fmt: skip


def stats(**nodes):
    return {"name": "s", "nodes": nodes}


@pytest.fixture
def later():
    """The node two seconds later."""
    node = copy.deepcopy(NODE)
    node["now_s"] += 2.0
    return node


def test_shares_and_rates_are_those_of_the_interval(later):
    traffic = later["traffic"]
    traffic["hit_blocks"] = {"memory": 15, "disk": 2, "peer": 1}
    traffic["miss_blocks"]["load"] = {"timeout": 1, "not_found": 2}
    traffic["miss_blocks"]["handoff"] = {"used": 50}
    traffic["in_bytes"]["peer"], traffic["out_bytes"]["disk"] = 4 * 10**9, 10**9
    later["pool"]["num_evicted"] = 27
    assert rows_of(stats(n=NODE), stats(n=later)) == [
        {
            "node": "n", "seconds": 2.0, "draining": False, "num_slots": 100, "num_used": 75, "num_pinned": 10,
            "hit_share": {"memory": 0.5, "disk": 0.2, "peer": 0.1},
            "in_gb_per_s": {"save": 0.0, "peer": 2.0, "disk": 0.0, "handoff": 0.0},
            "out_gb_per_s": {"load": 0.0, "peer": 0.0, "disk": 0.5, "handoff": 0.0},
            "pins": {"lease": 3, "hard": 1, "soft": 0}, "oldest_pin_s": 60.0,
            "queues": {"loads": 4, "threads": 5, "disk": 6}, "num_handoffs": 2, "evicted_per_s": 10.0,
            "tenants": {},
        }
    ]  # fmt: skip


def test_without_loads_there_is_no_share(later):
    (row,) = rows_of(stats(n=NODE), stats(n=later))
    assert row["hit_share"] is None
    assert row["evicted_per_s"] == 0.0


@pytest.mark.parametrize("before", [{}, {"n": {"error": "gone"}}, {"n": {**NODE, "epoch": "another"}}])
def test_a_store_that_has_just_begun_has_shares_and_no_rates(before):
    (row,) = rows_of(stats(**before), stats(n=NODE))
    assert row["seconds"] is None
    assert row["evicted_per_s"] is None
    assert set(row["in_gb_per_s"].values()) == {None}
    assert row["hit_share"]["memory"] == pytest.approx(10 / 11)


def test_a_store_without_clients_disk_and_watermarks_has_a_row(later):
    bare = {**later, "pool": None, "disk": None}
    (row,) = rows_of(stats(n=bare), stats(n=bare))
    assert (row["num_slots"], row["num_used"], row["queues"]["disk"]) == (0, 0, 0)


def shown(rows, width=160):
    console = Console(width=width, color_system=None)
    with console.capture() as got:
        console.print(table_of("s", rows, console))
    return got.get()


def test_the_table_has_what_the_rows_have(later):
    later["traffic"]["hit_blocks"]["disk"] = 4
    later["traffic"]["in_bytes"]["save"] = 3 * 10**9
    text = shown(rows_of(stats(a=NODE, b={"error": "x"}), stats(a=later, b={"error": "[no] answer\x1b[2J"})))
    for part in (
        "store s",
        "75%, 10%",
        "0% 100% 0%",
        "1.00 0.00 0.00 0.00",
        "3/1/0, 60 s",
        "4 5 6",
        "[no] answer\\x1b[2J",
    ):
        assert part in text
    assert "none yet" in shown(rows_of(stats(a=NODE), stats(a={**NODE, "pool": None, "draining": True})))


def test_tenants_have_a_table_with_their_quotas_and_what_went_because_of_them(later):
    tenant = {
        "num_bytes": 992 << 10, "max_bytes": 1 << 20, "num_pinned_bytes": 4096, "max_pinned_bytes": None,
        "num_handoffs": 1, "max_handoffs": 2, "num_evicted": 10, "num_evicted_by_quota": 4,
        "num_disk_bytes": 0, "max_disk_bytes": None,
    }  # fmt: skip
    now = tenant | {"num_evicted": 90, "num_evicted_by_quota": 64}
    rows = rows_of(stats(n={**NODE, "tenants": {"batch": tenant}}), stats(n={**later, "tenants": {"batch": now}}))
    assert rows[0]["tenants"] == {"batch": {**now, "evicted_per_s": 40.0, "by_quota_per_s": 30.0}}
    for width in (80, 160):
        assert all(words in shown(rows, width) for words in (" by ", "quota/s"))
        lines = shown([*rows, {"node": "x", "error": "no answer"}], width).splitlines()
        (line,) = (line for line in lines if "batch" in line)
        assert [cell.strip() for cell in line.strip("│").split("│")] == [
            "n", "batch", "992 KiB of 1 MiB", "4 KiB", "1 of 2", "40", "30",
        ]  # fmt: skip
    with_disk = {"num_disk_bytes": 3 << 20, "max_disk_bytes": 4 << 20}
    assert "3 MiB of 4 MiB" in shown(rows_of(stats(), stats(n={**NODE, "tenants": {"batch": tenant | with_disk}})))
    (row,) = rows_of(stats(), stats(n={**NODE, "tenants": {"batch": tenant}}))
    assert row["tenants"]["batch"]["evicted_per_s"] is None, "the store has just begun"
    assert "batch" in shown([row])


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_tenants_have_their_whole_names_also_in_a_narrow_terminal(later, num_nodes):
    tenant = dict.fromkeys(("num_bytes", "num_pinned_bytes", "num_disk_bytes"), (8 << 30) - (1 << 28))
    tenant |= {f"max_{what}": 1 << 34 for what in ("bytes", "pinned_bytes", "disk_bytes", "handoffs")}
    tenant |= {"num_handoffs": 12, "num_evicted": 0, "num_evicted_by_quota": 0}
    names = ["search-frontend-a", "search-frontend-b"]
    node = {**later, "tenants": dict.fromkeys(names, tenant)}
    now = {f"{number}c41f0a9b7e2d": node for number in range(num_nodes)}
    lines = shown(rows_of(stats(), stats(**now)), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line for line in lines if "tenant " in line]
    assert ["node" in line for line in heads] == [num_nodes == 2]
    for name in names:
        assert sum(name in line for line in lines) == num_nodes


def test_a_narrow_terminal_has_all_of_it_on_more_lines(later):
    later["traffic"]["hit_blocks"]["disk"] = 4
    rows = rows_of(stats(a=NODE), stats(a=later, b={"error": "no answer"}))
    text = shown(rows, width=80)
    assert max(map(len, text.splitlines())) <= 80
    for part in ("75%, 10%", "0% 100% 0%", "memory disk peer", "3/1/0, 60 s", "evicted/s", "no answer"):
        assert part in text
    assert "…" not in text
    assert len(shown(rows, width=160).splitlines()) < len(text.splitlines())


class Answers:
    """Statistics a second apart, until Ctrl-C at the last question."""

    def __init__(self, num_answers):
        self.left, self.at_s, self.waited = num_answers, 100.0, []

    def stats(self):
        if not self.left:
            raise KeyboardInterrupt
        self.left, self.at_s = self.left - 1, self.at_s + 1
        return stats(n={**NODE, "now_s": self.at_s})

    def watch(self, **how):
        watch(lambda: self, 0.5, wait=self.waited.append, **{"is_once": False, "as_json": True, **how})


def test_json_is_one_object_an_interval_until_ctrl_c(capsys):
    answers = Answers(3)
    answers.watch()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["name"], line["nodes"][0]["seconds"]) for line in lines] == [("s", 1.0)] * 2
    assert answers.waited == [0.5] * 3


def test_once_shows_one_interval(capsys):
    answers = Answers(9)
    answers.watch(is_once=True)
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert answers.left == 7
    answers.watch(is_once=True, as_json=False)
    assert "store s" in capsys.readouterr().out


def interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize("find", [interrupted, lambda: Answers(0)])
def test_ctrl_c_before_anything_is_shown_is_quiet(capsys, find):
    watch(find, 0.5, is_once=False, as_json=False)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_one_table_that_changes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    Answers(3).watch(as_json=False)
    assert "store s" in capsys.readouterr().out
