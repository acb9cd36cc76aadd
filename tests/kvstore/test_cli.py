"""The command line without a cluster: helps, errors, what is printed where, exit statuses."""

from __future__ import annotations

import json
import time

import click
import pytest
from click.testing import CliRunner

import kvstore
from kvstore import api, cli
from kvstore.actors.session import joining
from kvstore.actors.session.rays import RaySession
from kvstore.errors import ConfigError, IncompatibleStore, KVStoreError, StoreNotRunning
from kvstore.tools import terminal
from kvstore.tools.doctor import Check, Status

COMMANDS = [
    ["start"],
    ["status"],
    ["top"],
    ["inspect"],
    ["inspect", "namespace"],
    ["inspect", "chain"],
    ["inspect", "lease"],
    ["inspect", "handoff"],
    ["stop"],
    ["doctor"],
    ["bench"],
    ["bench", "transfer"],
    ["bench", "control"],
    ["bench", "disk"],
]


def run(*words: str) -> click.testing.Result:
    return CliRunner().invoke(cli.main, list(words), prog_name="kvstore")


@pytest.mark.parametrize("words", [[], *COMMANDS], ids=" ".join)
def test_help(words):
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert result.output.startswith("Usage: kvstore")
    assert "..." not in result.output.partition("Commands:")[2]  # each command's line fits


def test_every_option_is_explained():
    for words in COMMANDS:
        command = cli.main
        for word in words:
            command = command.commands[word]
        assert all(parameter.help for parameter in command.params if isinstance(parameter, click.Option))


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"kvstore, version {kvstore.__version__}\n")


def fail(*_: object, **__: object) -> None:
    raise StoreNotRunning("no store;\n  start\n  one")


@pytest.fixture
def joined(monkeypatch):
    """The Ray at h:1 is joined, whatever runs here."""
    session = RaySession("h:1", "session", False)
    found = joining.Joined(session, False, True, "the only Ray of this user on this machine")
    monkeypatch.setattr(joining, "join_ray", lambda *_, **__: found)


@pytest.mark.parametrize("words", [["status"], ["stop"]])
def test_an_error_is_one_line_on_stderr(monkeypatch, words):
    monkeypatch.setattr(api, "connect", fail)
    monkeypatch.setattr(joining, "check_named", fail)  # Which Rays run here is nothing of this test.
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "StoreNotRunning: no store; start one\n"


def test_an_error_is_one_object_with_json(monkeypatch):
    monkeypatch.setattr(api, "connect", fail)
    result = run("status", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {"error": "StoreNotRunning", "text": "no store; start one"}
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (StoreNotRunning("none was named; pass address= or set RAY_ADDRESS"), "pass --address or set RAY_ADDRESS"),
        (
            StoreNotRunning("got none; kvstore.start(name='a') starts that store, address= names another cluster"),
            "got none; `kvstore start --name 'a'` starts that store, --address names another cluster",
        ),
        (
            StoreNotRunning("pass address=, or address='local'; then"),
            "pass --address, or `kvstore start --local`; then",
        ),
        (
            IncompatibleStore("(capacity_bytes: wanted 134217728); connect() to it, stop it first, or another name="),
            "(capacity_bytes: wanted 134217728 (128 MiB)); use it as it runs, stop it first, or another --name",
        ),
        (
            IncompatibleStore("change it with Store.restart(), stop it first"),
            "change it with `kvstore restart --set`, stop it first",
        ),
        (
            ConfigError("wanted 966367641600 bytes; lower capacity= or"),
            "966367641600 (900 GiB) bytes; lower --capacity or",
        ),
        (ConfigError("block_bytes: wanted 0 (automatic), got 7"), "ConfigError: --block-bytes: wanted 0"),
        (
            ConfigError("node 5c1f: disk_path: wanted a folder; give disk_path= another"),
            "node 5c1f: --disk-path: wanted a folder; give --disk-path another",
        ),
        (
            ConfigError("give block_bytes= the size, or block_bytes=64"),
            "give --block-bytes the size, or block_bytes=64",
        ),
    ],
)
def test_errors_speak_of_options_and_readable_sizes(monkeypatch, error, says):
    def raises(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(api, "connect", raises)
    assert says in run("status").stderr
    assert says.removeprefix("ConfigError: ") in json.loads(run("status", "--json").stdout)["text"]


def test_a_capacity_without_its_option_is_told_which_it_is():
    result = run("start", "64MiB")
    assert result.exit_code == 2
    assert "--capacity 64MiB" in result.stderr
    assert "--capacity" not in run("start", "now").stderr
    assert "--capacity" not in run("stop", "64MiB").stderr


def test_a_very_long_error_is_cut(monkeypatch):
    def long_winded(*_: object, **__: object) -> None:
        raise KVStoreError("word " * 1000)

    monkeypatch.setattr(api, "connect", long_winded)
    assert len(run("status").stderr) < 700


def test_a_bad_size_is_one_line(monkeypatch):
    result = run("start", "--block-bytes", "much")
    assert result.exit_code == 2
    assert result.stderr.startswith("ConfigError: --block-bytes: wanted a size")
    assert result.stderr.count("\n") == 1


def test_without_a_ray_start_says_what_to_do(joined, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(api, "start", fail)
    result = run("start")
    assert result.exit_code == 2
    assert "ray start --head" in result.stderr
    assert "--local" in result.stderr


def test_a_named_address_that_does_not_answer_keeps_its_own_error(joined, monkeypatch):
    monkeypatch.setattr(api, "start", fail)
    result = run("start", "--address", "127.0.0.1:1")
    assert result.exit_code == 2
    assert "no store; start one" in result.stderr


@pytest.mark.parametrize(
    ("words", "variable", "says"),
    [
        ([], None, " (the only Ray of this user on this machine)"),
        ([], "auto", " (the only Ray of this user on this machine)"),
        ([], "h:1", ""),
        (["--address", "h:1"], None, ""),
    ],
)
def test_the_first_line_of_start_names_the_ray_and_why_where_nobody_named_it(
    joined, monkeypatch, words, variable, says
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setattr(api, "start", fail)
    assert run("start", *words).stderr.splitlines()[0] == f"starting store 'default' in the Ray at h:1{says}"


def test_start_passes_what_it_was_given(joined, monkeypatch):
    seen = {}

    class Store:
        config, address = kvstore.StoreConfig(name="a", capacity_bytes=1 << 30), "h:1"

        def node_ids(self):
            return ["n1", "n2"]

    def start(**settings):
        seen.update(settings)
        return Store()

    monkeypatch.setattr(api, "start", start)
    result = run(
        *["start", "--capacity", "2GiB", "--name", "a", "--address", "h:1", "--lane", "tcp", "--block-bytes", "64KiB"],
        *["--timeout", "90", "--eviction", "lru"],
    )
    assert result.exit_code == 0
    assert result.stdout == "store 'a' runs on 2 node(s) of the Ray at h:1, 1 GiB each\n"
    assert seen == {
        "capacity": 2 << 30, "name": "a", "address": "h:1", "lane": "tcp", "block_bytes": 65536, "timeout_s": 90.0,
        "eviction": "lru",
    }  # fmt: skip


def test_start_names_quotas_that_bound_nothing(joined, monkeypatch):
    class Store:
        address = "h:1"
        config = kvstore.StoreConfig(
            capacity_bytes=1 << 30,
            tenants={"a": {"max_bytes": "2GiB", "max_disk_bytes": 1 << 20}, "b": {"max_bytes": "1GiB"}},
        )

        def node_ids(self):
            return ["n1"]

    monkeypatch.setattr(api, "start", lambda **_: Store())
    assert run("start").stdout.splitlines()[1:] == [
        "tenant a: max_bytes of 2 GiB bounds nothing, a node has 1 GiB",
        "tenant a: max_disk_bytes of 1 MiB bounds nothing, a node has no disk tier",
    ]


def test_start_names_quotas_below_a_slot_and_a_disk_below_the_memory(joined, monkeypatch):
    class Store:
        address = "h:1"
        config = kvstore.StoreConfig(
            capacity_bytes=1 << 30,
            block_bytes=1 << 20,
            disk_path="/disk",
            disk_capacity_bytes=1 << 29,
            tenants={"a": {"max_bytes": "512KiB"}, "b": {"max_bytes": 1 << 20, "max_disk_bytes": "1KiB"}},
        )

        def node_ids(self):
            return ["n1"]

    monkeypatch.setattr(api, "start", lambda **_: Store())
    no_room = "has no room for a slot of 1 MiB: this tenant keeps no block"
    assert run("start").stdout.splitlines()[1:] == [
        "the disk is smaller than the memory: blocks that find no room there are gone after a stop",
        f"tenant a: max_bytes of 512 KiB {no_room}",
        f"tenant b: max_disk_bytes of 1 KiB {no_room}",
    ]


def started_with(monkeypatch, *words: str) -> dict:
    """What `kvstore start` gives to kvstore.start beside the settings that it always gives."""
    seen = {}

    class Store:
        config = kvstore.StoreConfig(capacity_bytes=1 << 30, disk_path="/disk", disk_capacity_bytes=100 << 30)
        address = "h:1"

        def node_ids(self):
            return ["n1"]

    monkeypatch.setattr(api, "start", lambda **settings: seen.update(settings) or Store())
    result = run("start", "--address", "h:1", *words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "store 'default' runs on 1 node(s) of the Ray at h:1, 1 GiB and 100 GiB of disk each\n"
    always = {"capacity", "name", "address", "lane", "block_bytes", "eviction", "timeout_s"}
    assert always <= seen.keys()
    return {name: value for name, value in seen.items() if name not in always}


def test_start_passes_the_options_of_the_disk(joined, monkeypatch):
    disk = ("--disk-path", "/disk", "--disk-capacity", "100GiB")
    assert started_with(monkeypatch, *disk) == {"disk_path": "/disk", "disk_capacity": 100 << 30}
    rest = (
        "--disk-min-uses",
        "3",
        "--disk-write",
        "back",
        "--disk-write-budget",
        "1TiB",
        "--disk-sync",
        "--disk-timeout",
        "2",
    )
    assert started_with(monkeypatch, *disk, *rest) == {
        "disk_path": "/disk", "disk_capacity": 100 << 30, "disk_min_uses": 3, "disk_write": "back",
        "disk_write_bytes_per_day": 1 << 40, "disk_sync": True, "disk_timeout_s": 2.0,
    }  # fmt: skip


def test_start_passes_the_watermarks(joined, monkeypatch):
    disk = ("--disk-path", "/disk", "--disk-capacity", "100GiB")
    assert started_with(monkeypatch, *disk, "--low-watermark", "0.1", "--high-watermark", "0.2") == {
        "disk_path": "/disk", "disk_capacity": 100 << 30, "low_watermark": 0.1, "high_watermark": 0.2,
    }  # fmt: skip


def test_start_passes_the_addresses_of_events(joined, monkeypatch):
    disk = ("--disk-path", "/disk", "--disk-capacity", "100GiB")
    addresses = ("--events-endpoint", "tcp://*:5557", "--events-replay-endpoint", "tcp://*:5558")
    assert started_with(monkeypatch, *disk, *addresses) == {
        "disk_path": "/disk", "disk_capacity": 100 << 30, "events_endpoint": "tcp://*:5557",
        "events_replay_endpoint": "tcp://*:5558",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--events-endpoint", "5557"], "--events-endpoint: wanted an address like 'tcp://*:5557'"),
        (["--low-watermark", "0.2", "--high-watermark", "0.1"], "low_watermark, high_watermark: wanted both 0, or"),
        (["--disk-path", "/d"], "--disk-path and --disk-capacity: wanted both"),
        (["--disk-capacity", "1GiB"], "--disk-path and --disk-capacity: wanted both"),
        (["--disk-sync"], "--disk-path and --disk-capacity: wanted both"),
        (["--disk-path", "d", "--disk-capacity", "1GiB"], "--disk-path: wanted an absolute path, got 'd'"),
        (["--disk-path", "/d", "--disk-capacity", "much"], "--disk-capacity: wanted a size such as '8GiB'"),
        (["--disk-path", "/d", "--disk-capacity", "1KiB"], "--disk-capacity: wanted at least 65536, got 1024"),
        (["--disk-path", "/d", "--disk-capacity", "1GiB", "--disk-write-budget", "x"], "--disk-write-budget: wanted a"),
    ],
)
def test_a_disk_that_cannot_work_is_one_line(monkeypatch, words, text):
    from kvstore.actors import starting

    monkeypatch.setattr(starting, "start", lambda *_: pytest.fail("nothing is started"))
    result = run("start", "--address", "127.0.0.1:1", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"ConfigError: {text}" in result.stderr


def test_python_may_name_the_disk_as_a_size_or_in_bytes(monkeypatch):
    from kvstore.actors import starting

    monkeypatch.setattr(starting, "start", lambda config, *_: config)
    for given in ({"disk_capacity": "1MiB"}, {"disk_capacity": 1 << 20}, {"disk_capacity_bytes": 1 << 20}):
        assert kvstore.start(disk_path="/d", **given).disk_capacity_bytes == 1 << 20
    with pytest.raises(ConfigError, match="got both"):
        kvstore.start(disk_path="/d", disk_capacity="1MiB", disk_capacity_bytes=1 << 20)


@pytest.mark.parametrize("words", [("status",), ("start",), ("stop",)])
def test_a_wrong_ray_address_is_not_called_an_option(monkeypatch, words):
    monkeypatch.setattr(joining.ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    result = run(*words)
    assert result.exit_code == 2
    assert "ConfigError: RAY_ADDRESS: wanted the host:port of a Ray cluster" in result.stderr
    assert "--address: wanted" in run(*words, "--address", "nowhere").stderr


def test_local_and_address_exclude_each_other():
    result = run("start", "--local", "--address", "127.0.0.1:1")
    assert result.exit_code == 2
    assert "leave --address out" in result.stderr


def test_stop_does_not_try_for_ever_to_join_a_ray(monkeypatch):
    seen = []

    def join(address, *, may_start, deadline_s):
        seen.append(deadline_s - time.monotonic())
        fail()

    monkeypatch.setattr(joining, "join_ray", join)
    assert run("stop", "--address", "127.0.0.1:1").exit_code == 2
    assert 0 < seen[0] <= 60


@pytest.mark.parametrize("words", [[], ["--local"]])
def test_settings_are_checked_before_a_ray_is_begun_or_joined(monkeypatch, words):
    monkeypatch.setattr(api, "start", lambda *_, **__: pytest.fail("nothing is started"))
    result = run("start", *words, "--disk-path", "d", "--disk-capacity", "1GiB")
    assert result.exit_code == 2
    assert result.stderr.startswith("ConfigError: --disk-path: wanted an absolute path")


@pytest.mark.parametrize("how", ["--address", "RAY_ADDRESS"])
def test_a_ray_that_would_end_with_the_command_is_refused(monkeypatch, how):
    monkeypatch.setattr(api, "start", lambda *_, **__: pytest.fail("nothing is started"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if how == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", "local")
    result = run("start", *(["--address", "local"] if how == "--address" else []))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("ConfigError: wanted a Ray that outlives this command, got 'local'")
    assert "leave --address and RAY_ADDRESS out, or use `kvstore start --local`" in result.stderr


POOL = {
    "num_slots": 1000, "num_free": 900, "num_writing": 1, "num_idle": 90, "num_pinned": 8,
    "num_quarantined": 1, "num_leases": 2, "num_writes": 1, "num_evicted": 7, "num_published": 99,
}  # fmt: skip
NODE = {
    "node_id": "n1", "epoch": "e1", "pid": 11, "mover_pid": 12, "host": "10.0.0.1", "capacity_bytes": 1 << 30,
    "slot_bytes": 1 << 20, "draining": False, "num_abandoned_reads": 0, "num_handoffs": 4, "calls": {},
    "pool": POOL, "nixl": {"num_reads": 3, "num_descriptors": 4, "num_bytes": 5 << 20},
}  # fmt: skip


def connected(monkeypatch, nodes: dict, problems: dict, starting: dict | None = None) -> None:
    class Store:
        config = kvstore.StoreConfig(capacity_bytes=1 << 30)

        def stats(self):
            return {"name": "default", "nodes": nodes, "problems": problems, "starting": starting or {}}

        def node_ids(self):
            return ["n1", "n2"]

    monkeypatch.setattr(api, "connect", lambda name, address: Store())


def test_status_shows_the_nodes(monkeypatch):
    connected(monkeypatch, {"n1": NODE, "n2": {**NODE, "pool": None, "nixl": None, "draining": True}}, {})
    result = run("status")
    assert result.exit_code == 0
    assert "1 of 2 nodes serve, 1 draining, 1 GiB each" in result.stdout
    for words in ("10.0.0.1", "epoch e1", "1,000 of 1 MiB", "idle 90 (9%)", "leases 2", "hand-offs 4",
                  "evicted 7", "5 MiB in 3 READs, 4 descriptors", "draining", "no client has come"):  # fmt: skip
        assert words in result.stdout
    bar = next(line.strip() for line in result.stdout.splitlines() if "·" in line)
    assert len(bar) == 50
    assert set(bar) == {"█", "▒", "x", "▓", "·"}


DISK = {
    "disk_write": "through", "path": "/disk/[a]-0", "is_off": False, "reason": "", "num_other_bytes": 3 << 30,
    "num_restored": 2, "is_direct": True,
    "num_queued": 5, "num_written": 1200, "num_written_bytes": 1 << 30, "dropped": {"queue_full": 3, "budget": 1},
    "num_read": 31, "num_bytes": 1 << 20, "num_damaged": 4, "num_failed": 0, "num_late": 0, "num_trips": 0,
    "pool": {**POOL, "num_slots": 5000, "num_free": 3800},
}  # fmt: skip


def test_status_shows_the_disk_of_each_node(monkeypatch):
    connected(monkeypatch, {"n1": {**NODE, "disk": DISK}, "n2": {**NODE, "disk": None}}, {})
    result = run("status")
    assert result.exit_code == 0
    for words in ("1,200 of 5,000 blocks at /disk/[a]-0", "queued 5", "written 1,200", "read 31", "damaged 4",
                  "restored 2", "not written budget 1, queue_full 3", "3 GiB in files of other slot"):  # fmt: skip
        assert words in result.stdout
    assert " off" not in result.stdout
    assert "written back" not in result.stdout
    assert "watermark" not in result.stdout
    assert result.stdout.count("damaged") == 1
    assert json.loads(run("status", "--json").stdout)["nodes"]["n1"]["disk"] == DISK


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"is_off": True, "reason": "the disk refused: [Errno 28]", "num_trips": 2},
            "off: the disk refused: [Errno 28]",
        ),
        ({"is_off": True}, "off: the directory was not reached yet"),
        ({"reason": "the disk hangs", "num_trips": 2}, "was off 2 times, last: the disk hangs"),
    ],
)
def test_status_says_that_a_disk_is_off_or_was(monkeypatch, changes, text):
    connected(monkeypatch, {"n1": {**NODE, "disk": {**DISK, **changes}}, "n2": NODE}, {})
    assert text in run("status").stdout


def test_status_shows_a_disk_without_slots(monkeypatch):
    bare = {name: DISK[name] for name in ("disk_write", "path", "num_other_bytes", "num_restored")} | {"is_off": True}
    connected(monkeypatch, {"n1": {**NODE, "disk": {**bare, "reason": ""}}, "n2": NODE}, {})
    assert "/disk/[a]-0, not divided yet: no client has come" in run("status").stdout
    connected(monkeypatch, {"n1": {**NODE, "disk": {**bare, "reason": "it cannot begin"}}, "n2": NODE}, {})
    assert "off: it cannot begin" in run("status").stdout


@pytest.mark.parametrize("name", ["pool", "is_direct"])
def test_status_says_that_blocks_are_written_back(monkeypatch, name):
    disk = {key: value for key, value in DISK.items() if key != name} | {"disk_write": "back"}
    connected(monkeypatch, {"n1": {**NODE, "disk": disk}, "n2": NODE}, {})
    assert run("status").stdout.count("written back at eviction") == 1


@pytest.mark.parametrize(
    ("changes", "texts", "others"),
    [
        ({}, ["low 0.05   high 0.1   evicted 1,234"], ["failures", "has ended"]),
        ({"num_failures": 2}, ["failures 2"], ["has ended"]),
        ({"is_alive": False}, ["the loop has ended"], ["failures"]),
    ],
)
def test_status_shows_the_loop_of_the_watermarks(monkeypatch, changes, texts, others):
    loop = {"is_alive": True, "num_evicted": 1234, "num_failures": 0, "low_watermark": 0.05, "high_watermark": 0.1}
    connected(monkeypatch, {"n1": {**NODE, "reclaim": {**loop, **changes}}, "n2": NODE}, {})
    result = run("status")
    assert result.exit_code == 0
    assert all(text in result.stdout for text in texts)
    assert not any(text in result.stdout for text in others)
    assert json.loads(run("status", "--json").stdout)["nodes"]["n1"]["reclaim"] == {**loop, **changes}


def test_a_node_without_a_store_is_exit_status_1(monkeypatch):
    connected(monkeypatch, {"n1": NODE}, {"n2": "wanted [more] memory"})
    result = run("status")
    assert result.exit_code == 1
    assert "1 of 2 nodes" in result.stdout
    assert "wanted [more] memory" in result.stdout
    result = run("status", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["without_store"] == ["n2"]


def test_a_store_that_does_not_answer_is_exit_status_1(monkeypatch):
    connected(monkeypatch, {"n1": NODE, "n2": {"error": "no answer within 10 s"}}, {})
    result = run("status")
    assert result.exit_code == 1
    assert "1 of 2 nodes serve, 1 GiB each" in result.stdout
    assert "no answer within 10 s" in result.stdout


def test_a_node_whose_store_is_being_made_is_no_error(monkeypatch):
    """Ray hands out an actor before it answers: until then the supervisor alone knows of it."""
    made = {"n1": "its store is still being made", "n2": "its store is still being made"}
    connected(monkeypatch, {"n1": NODE, "n2": {"error": "no answer within 10 s"}}, {}, made)
    result = run("status")
    assert result.exit_code == 1, "it does not serve yet"
    assert "starting" in result.stdout
    assert result.stdout.count("its store is still being made") == 1, "the one that answers serves"
    assert "error" not in result.stdout
    connected(monkeypatch, {"n1": NODE}, {}, made)
    assert "no store" not in run("status").stdout
    connected(monkeypatch, {"n1": NODE}, {"n2": "wanted memory"}, made)
    assert "starting" not in run("status").stdout, "it was tried before"


def test_a_supervisor_that_is_away_is_said_and_is_no_failure(monkeypatch):
    connected(monkeypatch, {"n1": NODE, "n2": NODE}, {"supervisor": "it restarts [now]"})
    result = run("status")
    assert result.exit_code == 0
    assert "supervisor: it restarts [now]" in result.stdout


def checks(monkeypatch, *found: Check) -> None:
    from kvstore.actors.doctor import diagnose

    idle = Check(name="Idle cost", status=Status.OK, found="1 %")
    monkeypatch.setattr(cli, "machine_checks", lambda: [("a look", lambda check=c: check) for c in found])
    monkeypatch.setattr(diagnose, "ray_checks", lambda address: [])
    monkeypatch.setattr(diagnose, "check_idle", lambda seconds: idle)


GOOD = Check(name="Good", status=Status.OK, found="as it should be", values={"n": 1})
BAD = Check(name="Bad", status=Status.FAIL, found="[nothing]", fix="do this")


def test_doctor_prints_rows_and_remedies(monkeypatch):
    checks(monkeypatch, GOOD, BAD)
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "ok    Good                as it should be",
        "fail  Bad                 [nothing]",
        "                          → do this",
        "ok    Idle cost           1 %",
        "",
        "2 ok, 0 warn, 1 fail",
    ]


def test_doctor_prints_one_json_list(monkeypatch):
    checks(monkeypatch, GOOD)
    result = run("doctor", "--json", "--no-idle")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == [GOOD.as_row()]


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0", "1e9"])
def test_doctor_measures_for_a_time_that_can_pass(monkeypatch, seconds):
    from kvstore.actors.doctor import diagnose

    checks(monkeypatch, GOOD)
    monkeypatch.setattr(diagnose, "check_idle", lambda seconds: pytest.fail("nothing is measured"))
    result = run("doctor", "--json", "--idle-seconds", seconds)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--idle-seconds" in result.stderr


TRANSFER = [
    {"lane": "tcp", "block_bytes": 65536, "way": way, "gb_per_s": speed}
    for way, speed in (("nixl", 3.0), ("load", 2.9))
]


def test_bench_prints_a_table_or_one_json_list_and_writes_a_file(monkeypatch, tmp_path):
    from kvstore.actors.bench import transfer

    def run_transfer(lanes, block_bytes, load_bytes, rounds, progress, measured):
        assert (lanes, block_bytes, load_bytes, rounds) == (["tcp"], [65536], 1 << 20, 2)
        progress("half")
        measured.rows.extend(TRANSFER)

    monkeypatch.setattr(transfer, "run_transfer", run_transfer)
    words = ["bench", "transfer", "--lane", "tcp", "--block-bytes", "64KiB", "--load-bytes", "1MiB", "--rounds", "2"]
    result = run(*words, "--json", "--output", str(tmp_path / "rows.json"))
    assert result.exit_code == 0
    assert json.loads(result.stdout) == TRANSFER
    assert result.stderr == "half\n"
    written = json.loads((tmp_path / "rows.json").read_text())
    assert set(written) == {"hardware", "versions", "commit", "rows"}
    assert written["rows"] == TRANSFER
    shown = run(*words).stdout
    for words_shown in ("GB/s", "64 KiB", "nixl", "load", "3.00", "2.90"):
        assert words_shown in shown


@pytest.mark.parametrize("folder", ["missing", "a file"])
def test_bench_refuses_a_file_that_it_could_not_write_before_it_measures(monkeypatch, tmp_path, folder):
    from kvstore.actors.bench import transfer

    (tmp_path / "a file").touch()
    monkeypatch.setattr(transfer, "run_transfer", lambda *_: pytest.fail("nothing is measured"))
    result = run("bench", "transfer", "--output", str(tmp_path / folder / "rows.json"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{folder} is no folder that can be written to" in " ".join(result.stderr.split())


def test_bench_transfer_prints_what_it_has_when_a_lane_fails(monkeypatch):
    from kvstore.actors.bench import transfer

    def run_transfer(lanes, block_bytes, load_bytes, rounds, progress, measured):
        assert lanes == ["default", "tcp"]
        measured.rows.extend(TRANSFER)
        measured.failures.append("lane default: RegistrationFailed: no such lane")

    monkeypatch.setattr(transfer, "run_transfer", run_transfer)
    result = run("bench", "transfer", "--json", "--lane", "all")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == TRANSFER
    assert "no such lane" in result.stderr
    assert "2.90" in run("bench", "transfer").stdout


@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit(15)])
def test_bench_transfer_prints_what_it_has_when_it_is_interrupted(monkeypatch, tmp_path, how):
    from kvstore.actors.bench import transfer

    def run_transfer(*arguments):
        arguments[-1].rows.extend(TRANSFER)
        raise how

    monkeypatch.setattr(transfer, "run_transfer", run_transfer)
    result = run("bench", "transfer", "--json", "--output", str(tmp_path / "rows.json"))
    assert result.exit_code == 1
    assert json.loads(result.stdout) == TRANSFER
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == TRANSFER
    assert "interrupted" in result.stderr


def test_bench_transfer_knows_its_block_sizes():
    result = run("bench", "transfer", "--json", "--block-bytes", "3MiB")
    assert result.exit_code == 2
    assert "65536" in json.loads(result.stdout)["text"]


def test_a_lane_that_cannot_be_measured_takes_no_other_rows_along(monkeypatch):
    import contextlib

    from kvstore.actors.bench import transfer
    from kvstore.errors import RegistrationFailed

    def measure(nodes, lane, size, load_bytes, rounds):
        if lane == "default":
            raise RegistrationFailed("no such lane")
        return {"nixl_huge_pages": [1.0, 2.0, 3.0], "load": [2.0, 2.0, 4.0]}

    monkeypatch.setattr(transfer, "two_nodes", lambda **_: contextlib.nullcontext(["a", "b"]))
    monkeypatch.setattr(transfer, "_measure", measure)
    found = transfer.Measured()
    transfer.run_transfer(["default", "tcp"], [64 << 10], 1 << 20, 3, lambda text: None, found)
    assert [(row["lane"], row["way"], row.get("of_nixl")) for row in found.rows] == [
        ("tcp", "nixl_huge_pages", None),
        ("tcp", "load", 0.75),
    ]
    assert len(found.failures) == 1
    assert "lane default" in found.failures[0]
    assert "no such lane" in found.failures[0]


def test_bench_control_shows_percentiles(monkeypatch):
    from kvstore.actors.bench import control

    row = {"op": "lookup", "way": "socket", "num_hashes": 2048, "p50_us": 1234.5, "p99_us": 2000.0}
    monkeypatch.setattr(control, "run_control", lambda counts, rounds, progress: [row])
    shown = run("bench", "control").stdout
    assert "2,048" in shown
    assert "1,234.5 / 2,000.0" in shown


def test_bench_disk_shows_speed_cost_and_share(monkeypatch, tmp_path):
    from kvstore.bench import disk

    row = {"op": "read", "block_bytes": 65536, "gb_per_s": 2.5, "cpu_s_per_gb": 0.02, "is_direct": False}
    rows = [{**row, "way": "plain"}, {**row, "way": "tier", "gb_per_s": 2.0, "of_plain": 0.8}]

    def run_disk(folder, num_bytes, block_bytes, rounds, progress):
        assert (folder, num_bytes, block_bytes, rounds) == (tmp_path, 1 << 20, [65536], 2)
        return rows

    monkeypatch.setattr(disk, "run_disk", run_disk)
    words = ["bench", "disk", "--path", str(tmp_path), "--size", "1MiB", "--block-bytes", "64KiB", "--rounds", "2"]
    shown = run(*words).stdout
    for text in ("2.50 (0.02)", "2.00 (0.02), 0.80 of plain", "64 KiB", "no O_DIRECT"):
        assert text in shown
    assert json.loads(run(*words, "--json", "--output", str(tmp_path / "rows.json")).stdout) == rows
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--size", "1MiB"], "--size: wanted 4194304 bytes or more, for two blocks of 2097152, got 1048576; raise it"),
        (["--block-bytes", "5"], "--block-bytes: wanted a multiple of 4096, at most"),
        (["--size", "4096TiB"], "--size: wanted room for"),
        (["--path", "/proc"], "ConfigError: --path: wanted a folder that can be written to, got /proc"),
    ],
)
def test_bench_disk_names_its_own_options(tmp_path, words, says):
    result = run("bench", "disk", "--path", str(tmp_path), *words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "disk-path" not in result.stderr
    assert "disk-capacity" not in result.stderr


def test_bench_disk_speaks_of_the_size_where_memory_is_short(monkeypatch, tmp_path):
    from kvstore.bench import disk

    def refuse(num_bytes):
        raise ConfigError("wanted a capacity of 5 bytes, got 3; lower capacity= or free memory")

    monkeypatch.setattr(disk, "create_arena", refuse)
    result = run("bench", "disk", "--path", str(tmp_path), "--size", "8MiB")
    assert "lower --size or free memory" in result.stderr


def test_a_port_is_no_size():
    result = run("start", "--address", "h:1", "--events-endpoint", "tcp://*:22222222")
    assert result.exit_code == 2
    assert "ConfigError: --events-endpoint: wanted a port from 0 to 65535, got 'tcp://*:22222222'" in result.stderr


def test_the_doctor_wants_an_absolute_path_before_it_looks_at_anything(monkeypatch):
    monkeypatch.setattr(cli, "machine_checks", lambda: pytest.fail("it looks"))
    result = run("doctor", "--roundtrip", "--disk-path", "rel")
    assert result.exit_code == 2
    assert "--disk-path: wanted an absolute path, got 'rel'" in result.stderr
    assert "give one that begins with /" in result.stderr


def test_bench_disk_wants_a_folder_that_is_there(tmp_path):
    result = run("bench", "disk", "--path", str(tmp_path / "missing"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "missing" in result.stderr


def test_progress_off_a_terminal_is_a_line_each(capsys):
    with terminal.progress() as say:
        say("one [thing]")
        say("two")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "one [thing]\ntwo\n")


@pytest.mark.parametrize(
    "words",
    [
        ("transfer", "--rounds", "0"),
        ("control", "--rounds", "0"),
        ("control", "--num-hashes", "0"),
        ("handoff", "--rounds", "-1"),
        ("gpu", "--num-blocks", "0"),
    ],
)
def test_a_benchmark_of_nothing_is_refused_before_anything_is_started(words):
    result = run("bench", *words)
    assert result.exit_code == 2
    assert words[1] in result.output


def test_a_load_that_is_shorter_than_a_block_is_refused_before_anything_is_started():
    result = run("bench", "transfer", "--load-bytes", "100KiB", "--block-bytes", "512KiB")
    assert result.exit_code == 2
    assert "load_bytes: wanted at least one block of 524288 bytes, got 102400" in result.output


def test_start_takes_any_setting_by_its_name(joined, monkeypatch):
    words = ("--set", "num_directory_shards=4", "--set", "lease_ttl_s=60", "--set", "metrics=false")
    disk = ("--disk-path", "/disk", "--set", "disk_capacity_bytes=100GiB")
    assert started_with(monkeypatch, *disk, *words) == {
        "disk_path": "/disk", "disk_capacity": 100 << 30, "num_directory_shards": 4, "lease_ttl_s": 60.0,
        "metrics": False,
    }  # fmt: skip


def test_every_option_of_start_that_is_a_setting_agrees_with_set(joined, monkeypatch):
    written = {
        "capacity_bytes": ("--capacity", "2GiB", "2GiB"), "block_bytes": ("--block-bytes", "64KiB", "64KiB"),
        "lane": ("--lane", "tcp", "tcp"), "name": ("--name", "a", "a"), "eviction": ("--eviction", "lru", "lru"),
        "low_watermark": ("--low-watermark", "0.1", "0.1"), "disk_sync": ("--disk-sync", None, "true"),
        "disk_write_bytes_per_day": ("--disk-write-budget", "1TiB", "1TiB"),
        "disk_timeout_s": ("--disk-timeout", "2", "2"), "disk_path": ("--disk-path", "/d", "/d"),
        "disk_capacity_bytes": ("--disk-capacity", "1GiB", "1GiB"),
        "tenants": ("--tenant", "a:max_handoffs=4", '{"a": {"max_handoffs": 4}}'),
    }  # fmt: skip
    seen = {}

    def start(**settings):
        seen.update(settings)
        raise KVStoreError("seen")

    monkeypatch.setattr(api, "start", start)
    options = [word for option, value, _ in written.values() for word in (option, value) if word is not None]
    sets = [word for name, (_, _, value) in written.items() for word in ("--set", f"{name}={value}")]
    both = run("start", "--address", "h:1", *options, *sets)
    assert "seen" in both.stderr
    first = dict(seen)
    seen.clear()
    assert "seen" in run("start", "--address", "h:1", *sets).stderr
    assert seen == first


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--lane", "default", "--set", "lane=tcp"], "--lane and --set lane: wanted one value, got 'default' and"),
        (["--capacity", "1GiB", "--set", "capacity_bytes=2GiB"], "--capacity and --set capacity_bytes: wanted one"),
        (["--disk-sync", "--set", "disk_sync=false"], "--disk-sync and --set disk_sync: wanted one value"),
        (["--set", "lease_ttl=60"], "'lease_ttl' is no setting of a store; did you mean 'lease_ttl_s'?"),
        (["--set", "lease_ttl_s=soon"], "--set lease_ttl_s: wanted a number, got 'soon'"),
        (["--set", "lease_ttl_s=-1"], "lease_ttl_s: wanted more than 0 seconds"),
        (["--set", "disk_sync=true"], "--disk-path and --disk-capacity: wanted both"),
    ],
)
def test_a_set_that_cannot_be_is_refused_before_any_store_begins(monkeypatch, words, text):
    monkeypatch.setattr(api, "start", lambda **_: pytest.fail("started"))
    result = run("start", "--address", "h:1", *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("ConfigError: ")
    assert text in result.stderr


@pytest.mark.parametrize("command", ["start", "restart"])
def test_the_help_says_where_the_settings_are_listed(command):
    text = " ".join(run(command, "--help").stdout.split())
    assert "--set NAME=VALUE" in text
    assert "docs/api.md, 'Settings of a store'" in text
