"""`kvstore inspect`: what it asks the nodes, what it prints, its errors, and how it ends where a node is silent."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.tools.inspection.commands import inspect_group
from kvstore.tools.inspection.finding import absent
from kvstore.tools.inspection.tables import age
from kvstore.tools.inspection.tokens import chain_of, read_tokens

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
SPACE = Namespace(model="m", shape=SHAPE)
TOKENS = list(range(70_000, 70_018))
CHAIN = SPACE.block_hashes(TOKENS)
SILENT = {"error": "no answer in time"}


def tier(num_blocks=0, **more):
    counts = {"num_blocks": num_blocks, "num_writing": 0, "num_pinned": 0, "num_bytes": num_blocks * 1024}
    return counts | more


def spaces(*digests, **more):
    rows = [
        {
            "namespace": digest.hex(),
            "block_bytes": 1024,
            "version": 3,
            "tiers": {"memory": tier(7, **more), "disk": tier()},
        }
        for digest in digests
    ]
    return {"namespaces": rows, "num_all": len(rows), "num_cleared": {"memory": 2, "disk": 0}}


def run_of(start, num_blocks, tier="memory", **more):
    return {
        "tier": tier, "start": start, "num_blocks": num_blocks, "is_written": True, "num_readers": 1, "num_hard": 0,
        "num_soft": 0, "priority": "high", "last_use_age_s": 125.0, "first_use_age_s": None,
    } | more  # fmt: skip


LEASE = {
    "id": 77, "kind": "lease", "owner": "client-[ab]", "pid": 4321, "host": "", "tenant": "batch",
    "namespace": SPACE.digest.hex(), "num_blocks": 3, "num_bytes": 3 << 20, "age_s": 4.5, "left_s": None,
    "ends_with": ["release", "end of its process"],
}  # fmt: skip
TICKET = {
    "ticket": "aabbccddeeff", "owner": "client-1", "pid": 5, "tenant": "chat",
    "namespace": SPACE.digest.hex(), "num_blocks": 9, "num_bytes": 9216,
    "place": "gpu", "age_s": 700.0, "left_s": 30.0, "waits_for": "a fetch", "void": "",
    "num_readers": 2,
}  # fmt: skip
FETCH = {
    "owner": "client-2", "pid": 6, "tenant": "", "ticket": "001122334455", "from_node": "b" * 20, "num_blocks": 4,
    "num_bytes": 4096, "age_s": 1.0, "left_s": 2.0, "waits_for": "its READ",
}  # fmt: skip


class Store:
    """A store whose nodes answer what a test says."""

    def __init__(self, **answers):
        self.config, self.answers, self.asked = SimpleNamespace(name="s"), answers, []

    def node_ids(self):
        return sorted({node for by_node in self.answers.values() for node in by_node})

    def inspect(self, what, *, timeout_s, **options):
        self.asked.append((what, timeout_s, options))
        return {node: answer for node, answer in self.answers[what].items() if answer is not None}

    def run(self, *words, wants=0, **more):
        done = CliRunner().invoke(inspect_group(lambda name, address: self), list(words), **more)
        assert done.exit_code == wants, done.output
        return done


def test_namespaces_are_shown_by_node_and_tier_with_what_readers_still_hold():
    store = Store(namespaces={"a": spaces(SPACE.digest), "b": spaces(SPACE.digest)})
    done = store.run("namespace", "--limit", "5", "--timeout", "2")
    assert store.asked == [("namespaces", 2.0, {"prefix": "", "limit": 5})]
    lines = [line for line in done.stdout.splitlines() if SPACE.digest.hex()[:12] in line]
    assert len(lines) == 2, "a tier with nothing has no line"
    assert all(word in lines[0] for word in ("memory", " 7 ", "7 KiB", " 3 "))
    assert "cleared blocks that readers still hold: 2 in memory" in done.stdout


def test_one_namespace_has_details():
    details = {"num_chains": 2, "num_low": 1, "num_high": 0, "last_use_age_s": 5.0}
    done = Store(namespaces={"a": spaces(SPACE.digest, **details)}).run("namespace", SPACE.digest.hex()[:6].upper())
    assert "chains" in done.stdout
    assert "5.0 s ago" in done.stdout


def test_json_has_all_of_every_answer_and_nothing_else():
    store = Store(namespaces={"a": spaces(SPACE.digest), "b": SILENT, "c": None})
    said = json.loads(store.run("namespace", "--json", wants=1).stdout)
    assert said["name"] == "s"
    assert said["nodes"]["a"] == spaces(SPACE.digest)
    assert said["nodes"]["b"] == SILENT
    assert "no store" in said["nodes"]["c"]["error"]


def test_a_node_that_does_not_answer_is_named_and_the_others_are_shown():
    done = Store(leases={"a": {"leases": [LEASE], "num_all": 1}, "bbb": SILENT}).run("lease", wants=1)
    assert "77" in done.stdout
    assert "node bbb: no answer in time" in done.stdout


@pytest.mark.parametrize(
    ("answers", "prefix", "parts"),
    [
        ({"a": spaces(), "b": SILENT}, "ab", ("wanted the beginning", "1 more did not answer", "inspect namespace")),
        ({"a": spaces(b"\xab" * 32, b"\xab\xac" * 16)}, "ab", ("abababab", "abacabac", "give more digits")),
        ({"a": spaces()}, "no-hex", ("hexadecimal", "lists them")),
    ],
)
def test_a_prefix_that_names_no_single_namespace_says_what_to_do(answers, prefix, parts):
    done = Store(namespaces=answers).run("namespace", prefix, wants=2)
    assert done.stderr.startswith("InvalidRequest: namespace: wanted ")
    assert all(part in done.stderr for part in parts)
    said = json.loads(Store(namespaces=answers).run("namespace", prefix, "--json", wants=2).stdout)
    assert said["error"] == "InvalidRequest"


def test_a_chain_by_its_tokens_is_the_one_that_a_client_would_ask_for(tmp_path):
    (tmp_path / "prompt").write_text(json.dumps(TOKENS))
    answers = {
        "a": {"runs": [run_of(0, 2), run_of(0, 1, "disk")], "num_all": 2},
        "b": {"runs": [run_of(2, 1)], "num_all": 1},
    }
    store = Store(namespaces={"a": spaces(SPACE.digest)}, chain=answers)
    words = ("chain", "--tokens", str(tmp_path / "prompt"), "--namespace", SPACE.digest.hex()[:8], "--block-size", "4")
    done = store.run(*words)
    assert store.asked[-1] == ("chain", 10.0, {"chain": CHAIN, "limit": 100})
    for part in ("0-1", "memory", "disk", "high", "2 min ago", "blocks 3"):
        assert part in done.stdout
    assert "70" not in done.stdout.replace("700", ""), "no token is shown"
    said = json.loads(store.run(*words, "--json").stdout)
    assert (said["namespace"], said["num_blocks"], said["absent"]) == (SPACE.digest.hex(), 4, [[3, 4]])


def test_a_chain_by_one_hash_is_followed_to_its_root_and_later_hashes_come_after_it():
    answers = {"a": None, "b": CHAIN[:2], "c": CHAIN[:3]}
    store = Store(path=answers, chain={"b": {"runs": [run_of(0, 2)], "num_all": 1}, "a": SILENT})
    store.run("chain", "--hash", CHAIN[2].hex(), "--hash", CHAIN[3].hex(), wants=1)
    assert store.asked[0] == ("path", 10.0, {"hashes": [CHAIN[2], CHAIN[3]]})
    assert store.asked[1][2]["chain"] == CHAIN


OTHER = SPACE.block_hashes(range(8))


@pytest.mark.parametrize(
    ("hashes", "answers"),
    [
        ((CHAIN[0], CHAIN[0]), {"a": CHAIN[:1]}),
        ((CHAIN[1], CHAIN[0]), {"a": CHAIN[:1], "b": CHAIN[:2]}),
        ((OTHER[0], CHAIN[1]), {"a": CHAIN[:2]}),
        ((CHAIN[1], OTHER[0]), {"a": OTHER[:1]}),
        ((CHAIN[1], OTHER[0]), {"a": OTHER[:1], "b": CHAIN[:2]}),
        ((CHAIN[1], CHAIN[2], CHAIN[1]), {"a": CHAIN[:2]}),
    ],
)
def test_hashes_that_are_not_of_one_chain_in_its_order_are_refused(hashes, answers):
    store = Store(path=answers)
    words = [word for each in hashes for word in ("--hash", each.hex())]
    assert store.run("chain", *words, wants=2).stderr.startswith("InvalidRequest: --hash: wanted blocks of one chain")
    assert [what for what, *_ in store.asked] == ["path"]


@pytest.mark.parametrize("start", [0, 1])
def test_hashes_of_one_chain_are_taken_with_gaps_between_them_and_without_its_root(start):
    found = {"a": CHAIN[start:3], "b": CHAIN[start:2]}
    runs = {node: {"runs": [run_of(start, len(run))], "num_all": 1} for node, run in found.items()}
    store = Store(path=found, chain=runs)
    store.run("chain", *(word for at in (0, 2, 3) for word in ("--hash", CHAIN[at].hex())))
    assert store.asked[1][2]["chain"].data == CHAIN[start:].data


def test_tokens_of_which_nothing_is_found_have_a_word_on_the_block_size(tmp_path):
    (tmp_path / "prompt").write_text(json.dumps(TOKENS))
    words = ("chain", "--tokens", str(tmp_path / "prompt"), "--namespace", SPACE.digest.hex()[:8], "--block-size", "3")
    nowhere, here = ({"a": {"runs": runs, "num_all": len(runs)}} for runs in ([], [run_of(0, 1)]))
    space = {"a": spaces(SPACE.digest)}
    assert "only with the --block-size of the namespace" in Store(namespaces=space, chain=nowhere).run(*words).stdout
    assert "--block-size" not in Store(namespaces=space, chain=here).run(*words).stdout


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("namespace", spaces()),
        ("lease", {"leases": [], "num_all": 0}),
        ("handoff", {each: [] for each in ("tickets", "fetches", "early")}
            | dict.fromkeys(("num_tickets", "num_fetches", "num_early"), 0)),
    ],
)  # fmt: skip
def test_a_table_without_a_line_says_none(what, answer):
    key = {"namespace": "namespaces", "lease": "leases", "handoff": "handoffs"}[what]
    done = Store(**{key: {"a": answer}}).run(what)
    assert done.stdout.splitlines()[0].endswith(": none")


def test_a_hash_that_no_node_has_is_said_to_be_unknown():
    done = Store(path={"a": BlockHashes(SPACE.digest, SPACE.digest, 0, b""), "b": SILENT}).run(
        "chain", "--hash", CHAIN[0].hex(), wants=2
    )
    assert done.stderr.startswith("BlockNotFound: --hash: wanted ")
    assert "1 more did not answer" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--hash", "00" * 32, "--tokens", "-"),
        ("--tokens", "-"),
        ("--tokens", "-", "--namespace", "ab"),
        ("--hash", "00" * 32, "--block-size", "4"),
        ("--hash", "abcd"),
    ],
)
def test_options_that_name_no_chain_are_refused_before_a_node_is_asked(words):
    store = Store(namespaces={})
    store.run("chain", *words, wants=2, input="1 2 3")
    assert store.asked == []


@pytest.mark.parametrize("text", ["[1, 2, 3]", "1 2 3", "1,2\n3 ", "  [1,2,3]\n"])
def test_token_files_are_lists_in_json_or_numbers(tmp_path, text):
    (tmp_path / "f").write_text(text)
    with (tmp_path / "f").open("rb") as file:
        assert read_tokens(file) == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "[1, -2]", "[1.5]", "hello 77777", "[true]", '{"a": 1}', "[4294967296]", "\xff"])
def test_another_file_is_refused_and_its_text_not_repeated(tmp_path, text):
    (tmp_path / "f").write_text(text, encoding="latin-1")
    done = Store(namespaces={"a": spaces(SPACE.digest)}).run(
        "chain", "--tokens", str(tmp_path / "f"), "--namespace", "ab", "--block-size", "4", wants=2
    )
    assert done.stderr.startswith("InvalidRequest: --tokens: wanted ")
    assert "77777" not in done.stderr


def test_tokens_that_fill_no_block_are_refused(tmp_path):
    (tmp_path / "f").write_text("1 2 3")
    store = Store(namespaces={"a": spaces(SPACE.digest)})
    words = ("chain", "--tokens", str(tmp_path / "f"), "--namespace", SPACE.digest.hex(), "--block-size", "4")
    assert "only full blocks are stored" in store.run(*words, wants=2).stderr


def test_hashes_of_tokens_are_those_of_the_namespace():
    assert chain_of(TOKENS, SPACE.digest, 4) == CHAIN


def test_a_lease_is_shown_with_what_ends_it_and_one_with_what_it_holds():
    runs = [
        {"namespace": SPACE.digest.hex(), "start": 4, "num_blocks": 2, "priority": "low"},
        {"namespace": None, "start": 0, "num_blocks": 1, "priority": "-"},
    ]
    store = Store(leases={"a": {"leases": [LEASE], "num_all": 12, "runs": runs, "num_all_runs": 2}})
    done = store.run("lease", "77")
    assert store.asked == [("leases", 10.0, {"lease_id": 77, "limit": 100})]
    for part in ("client-[ab]", "pid 4321", "3 MiB", "4.5 s", "release, end of its process", "4-5", "low", "1 gone"):
        assert part in done.stdout
    assert "11 more leases and pins" in done.stdout


def test_a_lease_that_has_ended_is_said_to_have():
    done = Store(leases={"a": {"leases": [], "num_all": 0}}).run("lease", "78", wants=2)
    assert done.stderr.startswith("InvalidRequest: ID: wanted ")


@pytest.mark.parametrize("text", ["abc", "0", "1.5", "18446744073709551616", "9" * 5000, "\u0663"])
def test_what_is_no_id_of_a_lease_is_refused_before_a_node_is_asked(text):
    store = Store(leases={})
    assert store.run("lease", text, wants=2).stderr.startswith("InvalidRequest: ID: wanted an id from `kvstore inspect")
    assert store.asked == []


def test_hand_offs_are_shown_with_what_they_wait_for():
    early = [{"ticket": "ffee00112233", "num_readers": 1}]
    answer = {
        "tickets": [TICKET, {**TICKET, "void": "withdrawn", "num_readers": 0, "left_s": None}], "num_tickets": 2,
        "fetches": [FETCH], "num_fetches": 3, "early": early, "num_early": 1,
    }  # fmt: skip
    done = Store(handoffs={"a": answer}).run("handoff")
    for part in ("aabbccddeeff", "12 min", "a fetch; 2 reader(s) wait", "then gone (withdrawn)", "from bbbbbbbbbbbb"):
        assert part in done.stdout
    for part in ("its READ", "ffee00112233", "its publisher; 1 reader(s) wait", "2 more hand-offs"):
        assert part in done.stdout
    assert json.loads(Store(handoffs={"a": answer}).run("handoff", "--json").stdout)["nodes"]["a"] == answer


@pytest.mark.parametrize(
    ("what", "key", "answer", "tenant"),
    [
        ("lease", "leases", lambda tenant: {"leases": [{**LEASE, "tenant": tenant}], "num_all": 1}, "batch"),
        (
            "handoff",
            "handoffs",
            lambda tenant: {
                "tickets": [{**TICKET, "tenant": tenant}], "num_tickets": 1, "fetches": [FETCH], "num_fetches": 1,
                "early": [{"ticket": "ffee00112233", "num_readers": 1}], "num_early": 1,
            },
            "chat",
        ),
    ],
)  # fmt: skip
def test_tenants_have_a_column_where_there_are_some(what, key, answer, tenant):
    with_one, without = (Store(**{key: {"a": answer(name)}}).run(what).stdout for name in (tenant, ""))
    assert tenant in with_one
    assert ("tenant" in with_one, "tenant" in without) == (True, False)
    assert all(len(set(map(len, text.splitlines()[1:]))) == 1 for text in (with_one, without)), "whole rows"


BATCH = {
    "num_bytes": 992 << 10, "max_bytes": 1 << 20, "num_pinned_bytes": 0, "max_pinned_bytes": None, "num_disk_bytes": 0,
    "max_disk_bytes": None, "num_handoffs": 1, "max_handoffs": 4, "num_evicted": 578, "num_evicted_by_quota": 570,
    "num_refused_bytes": 12, "num_refused_pins": 0, "num_refused_handoffs": 3, "num_refused_disk": 0,
}  # fmt: skip


class StoreOfTenants(Store):
    def __init__(self):
        chat = BATCH | {"num_evicted": 4}
        super().__init__(stats={"a": {"tenants": {"batch": BATCH, "chat": chat}, "pool": None}, "b": SILENT, "c": None})
        self.config = SimpleNamespace(name="s", tenants=[SimpleNamespace(name="batch"), SimpleNamespace(name="chat")])

    def stats(self):
        return {"nodes": {node: each for node, each in self.answers["stats"].items() if each}}


def test_tenants_are_shown_with_their_quotas_and_silent_nodes_are_named():
    done = StoreOfTenants().run("tenant", wants=1)
    (line,) = (line for line in done.stdout.splitlines() if "batch" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "batch", "a", "992 KiB of 1 MiB", "0 B", "0 B", "1 of 4", "578", "570", "12 blocks by max_bytes, 3 hand-offs",
    ]  # fmt: skip
    assert "node b: no answer in time" in done.stdout
    assert "node c: this node has no store" in done.stdout


def test_one_tenant_is_shown_alone_and_an_unknown_one_is_refused():
    said = json.loads(StoreOfTenants().run("tenant", "batch", "--json", wants=1).stdout)
    assert said["nodes"]["a"] == {"tenants": {"batch": BATCH}}
    refused = StoreOfTenants().run("tenant", "other", wants=2).stderr
    assert refused.startswith("InvalidRequest: TENANT: wanted a tenant of this store, got 'other'; it has batch, chat")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.04, "0.0 s"), (9.94, "9.9 s"), (60, "60 s"), (600, "10 min"), (10_800, "3 h"), (400_000, "5 d")],
)
def test_an_age_is_in_the_unit_that_people_use(seconds, text):
    assert age(seconds) == text


def test_what_no_node_has_is_told_in_the_numbers_of_the_chain():
    nodes = {"a": {"runs": [run_of(3, 1)]}, "b": SILENT}
    assert absent(nodes, CHAIN[2:]) == [(2, 3)]
    assert absent({"a": {"runs": [run_of(0, 4)]}}, CHAIN) == []


EVIL = "x\x1b[2J\x1b]0;own\x07\r\x9b1m\u202e"


def evil(row, *keys):
    return row | dict.fromkeys(keys, EVIL)


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (("lease",), {"leases": {"leases": [evil(LEASE | {"pid": 0}, "owner", "host", "tenant")], "num_all": 1}}),
        (("handoff",), {"handoffs": {
            "tickets": [evil(TICKET, "owner", "tenant", "place", "waits_for", "void")], "num_tickets": 1,
            "fetches": [evil(FETCH | {"pid": 0}, "owner", "host", "tenant", "waits_for")], "num_fetches": 1,
            "early": [], "num_early": 0,
        }}),
    ],
)  # fmt: skip
def test_control_characters_that_others_chose_are_shown_and_not_sent(words, answers):
    store = Store(**{what: {"a": answer, "b": {"error": EVIL}} for what, answer in answers.items()})
    text = store.run(*words, wants=1).stdout
    assert EVIL.encode("unicode_escape").decode()[:12] in text
    assert [sign for sign in set(text) - {"\n"} if not sign.isprintable()] == []
    written = store.run(*words, "--json", wants=1).stdout
    assert [sign for sign in set(written) - {"\n"} if not sign.isprintable()] == []
    assert json.loads(written)["nodes"]["b"] == {"error": EVIL}
