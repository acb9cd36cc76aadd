"""What is asked and shown of an address before Ray is joined there, without a Ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures

import grpc
import pytest
from ray.core.generated import gcs_pb2, gcs_service_pb2
from ray.exceptions import AuthenticationError

from kvstore.actors.session import joining, leftovers, probing, rays
from kvstore.actors.session.joining import check_named, find_ray, join_ray
from kvstore.actors.session.probing import check_answers
from kvstore.actors.session.rays import LocalRay
from kvstore.errors import ConfigError, StoreBusy, StoreNotRunning, StoreUnavailable

TOKEN = "Bearer secret"
CLUSTER = gcs_service_pb2.GetClusterIdReply(cluster_id=b"x" * 28).SerializeToString()


class Tokens:
    """Ray's loader of the user's token."""

    @staticmethod
    def instance():
        return Tokens()

    def has_token(self, ignore_auth_mode=False):
        return True

    def get_token_for_http_header(self):
        return {"authorization": TOKEN}


class Config:
    """Ray's settings of this process, which other tests want as they are."""

    @staticmethod
    def initialize(text):
        pass


class Gcs(grpc.GenericRpcHandler):
    """A GCS, or what greets like one; notes the tokens that it was shown."""

    def __init__(self, says):
        self.says, self.shown, self.over = says, [], threading.Event()
        self.replies = []  # Of the next questions.
        self.server = grpc.server(futures.ThreadPoolExecutor(4), handlers=(self,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def service(self, details):
        self.shown.append(dict(details.invocation_metadata).get("authorization"))
        return grpc.unary_unary_rpc_method_handler(self.answer) if self.says != "unknown" else None

    def answer(self, request, context):
        if self.says == "nothing":
            self.over.wait(20)
        if self.says == "token" and self.shown[-1] != TOKEN:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return self.replies.pop(0) if self.replies else CLUSTER


@pytest.fixture
def gcs(monkeypatch):
    monkeypatch.setattr(probing, "_CONNECT_S", 0.5)
    monkeypatch.setattr(joining.ray, "is_initialized", lambda: False)  # Other tests may have left their cluster open.
    for module in (joining, probing):
        monkeypatch.setattr(module, "AuthenticationTokenLoader", Tokens)
    monkeypatch.setattr(joining, "Config", Config)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    made = []

    def make(says):
        made.append(Gcs(says))
        return made[-1]

    yield make
    for one in made:
        one.over.set()
        one.server.stop(0).wait(10)


def with_token(monkeypatch, shows):
    mode = probing.AuthenticationMode.TOKEN if shows else probing.AuthenticationMode.DISABLED
    monkeypatch.setattr(probing, "get_authentication_mode", lambda: mode)


@pytest.mark.parametrize(("says", "match"), [("nothing", "DEADLINE_EXCEEDED"), ("unknown", "UNIMPLEMENTED")])
def test_what_greets_and_answers_no_question_of_ray_is_found_out_and_shown_no_token(gcs, monkeypatch, says, match):
    with_token(monkeypatch, True)
    one, began_s = gcs(says), time.monotonic()
    with pytest.raises(StoreNotRunning, match=f"no answer of a GCS .*{match}"):
        check_answers(one.address)
    assert time.monotonic() - began_s < 5
    assert one.shown == [None]


def test_a_gcs_is_shown_the_token_only_when_it_wants_one_and_ray_is_to_show_it(gcs, monkeypatch):
    open_, closed = gcs("hello"), gcs("token")
    with_token(monkeypatch, True)
    check_answers(open_.address)
    check_answers(closed.address)
    assert (open_.shown, closed.shown) == ([None], [None, TOKEN])
    with_token(monkeypatch, False)
    check_answers(closed.address)  # It is one; Ray says what it wants.
    assert closed.shown == [None, TOKEN, None]


def test_the_time_of_the_caller_bounds_the_question(gcs, monkeypatch):
    monkeypatch.setattr(probing, "_CONNECT_S", 10.0)
    began_s = time.monotonic()
    with pytest.raises(StoreNotRunning):
        check_answers(gcs("nothing").address, began_s + 0.3)
    assert time.monotonic() - began_s < 5


def test_tls_is_on_as_ray_takes_it_and_a_silent_listener_is_found_out(gcs, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_USE_TLS", "false")
    check_answers(gcs("hello").address)
    monkeypatch.setenv("RAY_USE_TLS", "True")
    for name in ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match="RAY_USE_TLS"):
            check_answers(address)
        monkeypatch.setattr(probing, "load_certs_from_env", lambda: (None, None, None))
        with pytest.raises(StoreNotRunning, match="no answer of a GCS"):
            check_answers(address)


def test_a_join_that_fails_leaves_the_mode_of_tokens_as_it_was(gcs, monkeypatch):
    with_token(monkeypatch, True)
    with pytest.raises(StoreNotRunning):
        join_ray(gcs("unknown").address, may_start=False)
    assert "RAY_AUTH_MODE" not in os.environ


class OtherTokens(Tokens):
    """A loader with the token of another cluster."""

    @staticmethod
    def instance():
        return OtherTokens()

    def get_token_for_http_header(self):
        return {"authorization": "Bearer other"}


class NoTokens(Tokens):
    """A loader that finds no token where there should be one."""

    @staticmethod
    def instance():
        return NoTokens()

    def has_token(self, ignore_auth_mode=False):
        return False

    def get_token_for_http_header(self):
        raise AuthenticationError("no token")


@pytest.mark.parametrize(
    ("mode", "tokens", "error", "said"),
    [
        ("token", OtherTokens, StoreNotRunning, "show its token, got that of RAY_AUTH_TOKEN; copy the file"),
        ("disabled", Tokens, StoreNotRunning, "show its token, got none; RAY_AUTH_MODE is 'disabled' here, so set it"),
        (None, NoTokens, StoreNotRunning, "show its token, got none; copy the file ~/.ray/auth_token of its head"),
        ("token", NoTokens, ConfigError, "RAY_AUTH_MODE: wanted a token .*, got none in RAY_AUTH_TOKEN; copy the file"),
    ],
)
def test_a_ray_that_wants_another_token_is_not_joined_and_the_error_says_which_was_shown(
    gcs, monkeypatch, mode, tokens, error, said
):
    one, inits = gcs("token"), []
    for module in (joining, probing):
        monkeypatch.setattr(module, "AuthenticationTokenLoader", tokens)
    monkeypatch.setattr(joining, "_init_ray", lambda *_, **options: inits.append(options))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "other")
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with_token(monkeypatch, mode == "token")
    began_s = time.monotonic()
    with pytest.raises(error, match=said) as caught:
        join_ray(one.address, may_start=False)
    assert time.monotonic() - began_s < 5
    assert inits == []
    assert "Bearer" not in str(caught.value)
    assert os.environ.get("RAY_AUTH_MODE") == mode


def test_a_file_of_the_token_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(joining.ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere/token")
    with pytest.raises(ConfigError, match=r"RAY_AUTH_TOKEN_PATH: wanted a file .*, got '/nowhere/token'"):
        join_ray("127.0.0.1:1", may_start=False)


@pytest.mark.parametrize("by", ["address", "RAY_ADDRESS"])
def test_an_address_of_no_use_is_called_what_the_caller_called_it(monkeypatch, by):
    monkeypatch.setattr(joining.ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for address in ("nowhere", "http://nowhere:1"):
        if by == "RAY_ADDRESS":
            monkeypatch.setenv(by, address)
        with pytest.raises(ConfigError, match=f"^{by}: wanted the host:port of a Ray cluster.*, got '{address}'"):
            joining.join_ray(address if by == "address" else None, may_start=True)


def test_a_local_ray_that_is_late_is_a_typed_error_and_leaves_no_process(monkeypatch):
    """Ray raises a plain Exception then, and forgets what it has begun."""
    package = os.path.join(os.path.dirname(joining.ray.__file__), "core", "late")
    waits = "import signal, time; signal.signal(signal.SIGTERM, signal.{}); print(flush=True); time.sleep(60)"
    began = []

    def begin(how, *words):
        child = subprocess.Popen([sys.executable, "-c", waits.format(how), *words], stdout=subprocess.PIPE)
        child.stdout.readline()
        began.append(child)
        return child

    def init(**_):
        begin("SIG_DFL", package)
        begin("SIG_IGN", package)
        begin("SIG_DFL", "of the program itself, which begins it at the same time")
        raise Exception("The current node timed out during startup.")

    before = begin("SIG_DFL", package)
    monkeypatch.setattr(leftovers, "_END_S", 0.3)
    monkeypatch.setattr(joining, "ensure_token", lambda: None)
    monkeypatch.setattr(joining.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(joining.ray, "init", init)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(StoreUnavailable, match=r"got Exception: The current node timed out .*; .*try again"):
            joining.join_ray("local", may_start=True, deadline_s=time.monotonic() + 30)
        _, late, stubborn, own = began
        assert late.wait(5) is not None
        assert stubborn.wait(5) is not None
        assert own.poll() is before.poll() is None, "they are others'"
    finally:
        signal.signal(signal.SIGTERM, handler)
        for child in began:
            child.kill()
            child.wait(5)
            child.stdout.close()


def test_a_recorded_address_counts_only_while_a_ray_of_this_user_is_there(gcs, monkeypatch, tmp_path):
    one, file = gcs("hello"), tmp_path / "ray_current_cluster"
    monkeypatch.setattr(rays, "get_ray_address_file", lambda folder: str(file))
    file.write_text(one.address)
    monkeypatch.setattr(joining, "rays_here", list)
    with pytest.raises(StoreNotRunning, match="another user's"):
        find_ray()
    assert one.shown == [], "nothing of this user goes there"
    others = [LocalRay(f"127.0.0.1:{port}", "/tmp/ray", True) for port in (2, 1, 2)]
    monkeypatch.setattr(joining, "rays_here", lambda: others)
    with pytest.raises(StoreNotRunning, match=r"address= \(running here: 127\.0\.0\.1:1, 127\.0\.0\.1:2\), or"):
        find_ray()
    monkeypatch.setattr(joining, "rays_here", lambda: [LocalRay(one.address, str(tmp_path), True)])
    assert find_ray()[0] == one.address
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert find_ray()[0] is None


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_record_that_is_no_file_is_none(monkeypatch, tmp_path, kind):
    file = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(rays, "get_ray_address_file", lambda folder: str(file))
    if kind == "link":
        (tmp_path / "real").write_text("127.0.0.1:1")
        file.symlink_to(tmp_path / "real")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    assert rays.recorded_address() is None


def test_of_several_rays_none_is_taken_for_the_one_that_is_meant(monkeypatch):
    rays = [LocalRay(f"127.0.0.1:{port}", "/tmp/ray", port == 1) for port in (1, 2)]
    monkeypatch.setattr(joining, "rays_here", lambda: rays)
    monkeypatch.setattr(joining.ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    several = r"got 2: 127\.0\.0\.1:1, 127\.0\.0\.1:2; say which"
    for address in (None, "auto"):
        with pytest.raises(ConfigError, match=several):
            check_named(address)
    check_named("127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match=several):
        check_named(None)
    check_named("127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    check_named(None)
    monkeypatch.delenv("RAY_ADDRESS")
    del rays[0]
    check_named(None)


def with_raylet(gcs, monkeypatch, says):
    """Make a GCS that answers, and a raylet of this machine; returns both, and what joined the GCS."""
    one, raylet, inits = gcs("hello"), gcs(says), []
    host, _, port = raylet.address.rpartition(":")
    node = gcs_pb2.GcsNodeInfo(node_id=b"n" * 28, node_manager_address=host, node_manager_port=int(port))
    nodes = gcs_service_pb2.GetAllNodeInfoReply(node_info_list=[node])
    one.replies, raylet.replies = [CLUSTER, nodes.SerializeToString()], [b""]
    monkeypatch.setattr(probing, "find_node_ids", lambda: {(b"n" * 28).hex()})
    monkeypatch.setattr(joining, "_init_ray", lambda namespace, address: inits.append(address))
    monkeypatch.setattr(joining, "current_session", lambda: None)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with_token(monkeypatch, True)
    return one, raylet, inits


def test_a_raylet_that_does_not_answer_is_found_out_before_ray_is_joined(gcs, monkeypatch):
    one, _, inits = with_raylet(gcs, monkeypatch, "nothing")
    began_s = time.monotonic()
    with pytest.raises(StoreNotRunning, match=r"not its node on this machine: no answer of its raylet at .*DEADLINE"):
        join_ray(one.address, may_start=False)
    assert time.monotonic() - began_s < 5
    assert inits == []


@pytest.mark.parametrize("says", ["hello", "token"])
def test_a_raylet_that_answers_is_joined_and_shown_no_token(gcs, monkeypatch, says):
    one, raylet, inits = with_raylet(gcs, monkeypatch, says)
    join_ray(one.address, may_start=False)
    assert (inits, raylet.shown) == ([one.address], [None])


def test_a_ray_whose_gcs_hangs_while_it_is_joined_is_given_up_at_the_deadline_and_left_later(gcs, monkeypatch):
    one, _, _ = with_raylet(gcs, monkeypatch, "hello")
    goes_on, left = threading.Event(), []
    monkeypatch.setattr(joining, "_init_ray", lambda namespace, address: goes_on.wait(60))
    monkeypatch.setattr(joining.ray, "shutdown", lambda: left.append(1))
    for error in (StoreUnavailable, StoreBusy):
        began_s = time.monotonic()
        with pytest.raises(error):
            join_ray(one.address, may_start=False, deadline_s=began_s + 2.0)
        assert time.monotonic() - began_s < 20
    assert left == []
    goes_on.set()
    joining.KEEPER.settle(time.monotonic() + 30)
    assert left == [1]


def test_a_ray_without_a_node_here_is_not_joined(gcs, monkeypatch):
    one, _, inits = with_raylet(gcs, monkeypatch, "hello")
    monkeypatch.setattr(probing, "find_node_ids", set)
    with pytest.raises(StoreNotRunning, match="no raylet of it runs here"):
        join_ray(one.address, may_start=False)
    assert inits == []


class Now:
    """A clock that goes on when something is waited for."""

    now_s = 0.0

    def monotonic(self):
        return self.now_s


def test_all_steps_of_a_question_share_one_time(monkeypatch):
    waits, now = [], Now()

    class Slow:
        """Greets a byte at a time, each after a second."""

        def __init__(self):
            self.bytes_left = [b"\x00", b"\x00", b"\x00", b"\x04"]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def settimeout(self, timeout_s):
            waits.append(timeout_s)

        def sendall(self, data):
            pass

        def recv(self, size):
            now.now_s += 1.0
            return self.bytes_left.pop(0)

    monkeypatch.setattr(probing, "time", now)
    monkeypatch.setattr(probing.socket, "create_connection", lambda where, timeout: Slow())
    monkeypatch.setattr(probing, "_ask_gcs", lambda address, request, end_s: waits.append(end_s - now.now_s))
    probing._reach("h", 1, 6.0)
    assert waits == [6.0, 6.0, 5.0, 4.0, 3.0, 2.0]


def test_the_time_of_the_caller_bounds_the_question_to_a_ray_that_was_found(gcs, monkeypatch, tmp_path):
    monkeypatch.setattr(probing, "_CONNECT_S", 20.0)
    one = gcs("nothing")
    monkeypatch.setattr(joining, "recorded_address", lambda: (one.address, tmp_path / "record"))
    monkeypatch.setattr(joining, "rays_here", lambda: [LocalRay(one.address, str(tmp_path), True)])
    began_s = time.monotonic()
    with pytest.raises(StoreNotRunning, match="does not answer"):
        join_ray(None, may_start=False, deadline_s=began_s + 0.3)
    assert time.monotonic() - began_s < 10
