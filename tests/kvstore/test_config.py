import os
import stat
from dataclasses import asdict

import pytest

from kvstore import config
from kvstore.bounds import parse_bytes
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.quotas import TenantQuota

DISK = {"disk_path": "/disk", "disk_capacity_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("2 kib", 2048),
        ("1tib", 1 << 40),
        ("10 B", 10),
        (" 77 ", 77),
        ("1.5KiB", 1536),
        ("1.3GiB", 1395864371),
        (2.0**30, 1 << 30),
        (123, 123),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(text, wanted):
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 GiB 2", "1e9", "8 gibi", "0x10", True, None, 1.5j, "1" * 5000])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="wanted a size"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [1.5, "1.5", "0.5 B"])
def test_a_fraction_of_a_byte_is_no_size(size):
    with pytest.raises(ConfigError, match="wanted a whole number of bytes"):
        parse_bytes(size)


def test_a_size_too_large_is_named():
    with pytest.raises(ConfigError, match=f"wanted at most {1 << 62}, got {9999999 << 40}"):
        StoreConfig(capacity_bytes=parse_bytes("9999999TiB"))


@pytest.mark.parametrize("setting", ["capacity_bytes", "lease_ttl_s", "chunk_bytes"])
def test_a_number_that_python_would_not_even_write_is_refused(setting):
    with pytest.raises(ConfigError, match=rf"{setting}: wanted at most \d+, got a number of 16610 bits"):
        StoreConfig(**{setting: 10**5000})


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "x" * 41},
        {"name": "../up"},
        {"capacity_bytes": 65535},
        {"block_bytes": -1},
        {"block_bytes": 511},
        {"block_bytes": (1 << 30) + 1},
        {"lease_ttl_s": 0.0},
        {"lease_ttl_s": float("nan")},
        {"lease_ttl_s": 1.0},
        {"lease_margin_s": 0.0},
        {"lease_margin_s": 15.0},
        {"transfer_timeout_s": -1.0},
        {"call_timeout_s": 0.0},
        {"save_wait_s": -0.01},
        {"save_wait_s": 3601.0},
        {"max_pinned_fraction": 0.0},
        {"max_pinned_fraction": 1.1},
        {"max_hard_pinned_fraction": 0.0},
        {"max_quarantined_fraction": 0.0},
        {"max_quarantine_s": 0.0},
        {"chunk_bytes": 4095},
        {"lane": "rdma"},
        {"eviction": "fifo"},
        {"eviction": "x" * 10_000},
        {"eviction": None},
        {"name": 5},
        {"block_bytes": 4096.5},
        {"capacity_bytes": True},
        {"lease_ttl_s": float("inf")},
        {"lease_ttl_s": 100_000.0},
        {"lease_margin_s": "x"},
        {"transfer_timeout_s": 1e6},
        {"call_timeout_s": 1e300},
        {"disk_path": "/disk"},
        {"disk_capacity_bytes": 1 << 20},
        {"disk_path": "disk", "disk_capacity_bytes": 1 << 20},
        {"disk_path": "/a\0b", "disk_capacity_bytes": 1 << 20},
        {"disk_path": "/disk", "disk_capacity_bytes": 65535},
        {"disk_path": "/disk", "disk_capacity_bytes": -1},
        {"disk_min_uses": 0},
        {"disk_min_uses": 256},
        {"disk_min_uses": 1.0},
        {"num_directory_shards": 0},
        {"num_directory_shards": 65},
        {"num_directory_shards": 2.0},
        {"disk_write": "never"},
        {"disk_write": "back"},
        {"disk_write": "back", "low_watermark": 0.0, **DISK},
        {"disk_write": "back", "low_watermark": 0, "high_watermark": 0.1, **DISK},
        {"low_watermark": -0.1},
        {"low_watermark": 0.51},
        {"low_watermark": 0.2, "high_watermark": 0.1},
        {"low_watermark": 0.2, "high_watermark": 0.51},
        {"low_watermark": 0.0, "high_watermark": 0.1},
        {"low_watermark": float("nan")},
        {"high_watermark": float("nan")},
        {"low_watermark": "0.1"},
        {"high_watermark": "0.1"},
        {"low_watermark": True},
        {"disk_write_bytes_per_day": -1, **DISK},
        {"disk_write_bytes_per_day": -1},
        {"disk_sync": 1},
        {"disk_timeout_s": 0.0},
        {"events_endpoint": 5557},
        {"events_endpoint": "*:5557"},
        {"events_endpoint": "tcp://*:65536"},
        {"events_endpoint": "tcp://*"},
        {"events_endpoint": "tcp://a b:5557"},
        {"events_endpoint": "ipc://here"},
        {"events_endpoint": "inproc://here"},
        {"events_endpoint": "tcp://*:5557\n"},
        {"events_replay_endpoint": "tcp://*:5558"},
        {"events_endpoint": "tcp://*:5557", "events_replay_endpoint": "5558"},
        {"events_endpoint": "tcp://*:5557", "events_replay_endpoint": "tcp://*:5557"},
    ],
)
def test_settings_that_cannot_work_are_refused(changes):
    with pytest.raises(ConfigError) as caught:
        StoreConfig(**changes)
    assert "wanted" in str(caught.value)
    assert "got" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, (0.0, 0.0)),
        ({"low_watermark": 0.0}, (0.0, 0.0)),
        ({"low_watermark": 0.1}, (0.1, 0.2)),
        ({"low_watermark": 0.4}, (0.4, 0.5)),
        ({"high_watermark": 0.3}, (0.15, 0.3)),
        ({"low_watermark": 0.5, "high_watermark": 0.5}, (0.5, 0.5)),
        ({"disk_write": "back", **DISK}, (0.05, 0.1)),
        ({"disk_write": "back", "high_watermark": 0.4, **DISK}, (0.2, 0.4)),
    ],
)
def test_watermarks_that_are_not_given_are_chosen(given, chosen):
    made = StoreConfig(**given)
    assert made.watermarks == chosen
    assert StoreConfig.from_json(made.to_json()) == made


def test_writing_back_without_the_loop_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match="give neither watermark, or one above 0, or use disk_write='through'"):
        StoreConfig(disk_write="back", low_watermark=0.0, **DISK)


@pytest.mark.parametrize(
    "given",
    [
        {"disk_min_uses": 2}, {"disk_write": "back"}, {"disk_write_bytes_per_day": 1}, {"disk_sync": True},
        {"disk_timeout_s": 6.0},
    ],
)  # fmt: skip
def test_settings_of_the_disk_without_one_are_refused_with_a_remedy(given):
    (name,) = given
    with pytest.raises(
        ConfigError, match=f"{name}: wanted it with a disk tier.*give disk_path and disk_capacity_bytes"
    ):
        StoreConfig(**given)
    StoreConfig(**given, **DISK)
    StoreConfig(**{name: StoreConfig.__dataclass_fields__[name].default})


def test_json_round_trip():
    made = StoreConfig(name="a.b-c_1", capacity_bytes=1 << 20, block_bytes=4096, lane="tcp", lease_ttl_s=2.5)
    assert StoreConfig.from_json(made.to_json()) == made
    assert made.to_json() == StoreConfig.from_json(made.to_json()).to_json()


def test_a_log_has_the_settings_that_are_not_the_default():
    config = StoreConfig(name="n", capacity_bytes=1 << 20, disk_path="/some where", disk_capacity_bytes=1 << 30)
    assert config.chosen() == "capacity_bytes=1048576 disk_path='/some where' disk_capacity_bytes=1073741824"
    assert StoreConfig(name="n").chosen() == ""
    config = StoreConfig(tenants={"b": {}, "a": {"max_bytes": "1MiB"}}, private_tenants=True)
    assert config.chosen() == """tenants='{"a": {"max_bytes": 1048576}, "b": {}}' private_tenants=true"""


def test_unknown_settings_are_refused_by_name():
    with pytest.raises(ConfigError, match="capacity_byte'"):
        StoreConfig.from_json('{"capacity_byte": 1}')


OTHERS = {
    "name": "b",
    "capacity_bytes": 1 << 20,
    "block_bytes": 1024,
    "lease_ttl_s": 31.0,
    "lease_margin_s": 0.6,
    "transfer_timeout_s": 11.0,
    "call_timeout_s": 6.0,
    "save_wait_s": 0.0,
    "max_pinned_fraction": 0.8,
    "max_hard_pinned_fraction": 0.4,
    "max_handoff_fraction": 0.1,
    "max_quarantined_fraction": 0.3,
    "max_quarantine_s": 20.0,
    "chunk_bytes": 1 << 20,
    "stage_chunk_bytes": 1 << 21,
    "lane": "tcp",
    "disk_path": "/other",
    "disk_capacity_bytes": 1 << 21,
    "disk_min_uses": 2,
    "disk_write": "back",
    "disk_write_bytes_per_day": 1 << 40,
    "disk_sync": True,
    "disk_timeout_s": 6.0,
    "eviction": "lru",
    "low_watermark": 0.25,
    "high_watermark": 0.4,
    "metrics": False,
    "events_endpoint": "tcp://*:5559",
    "events_replay_endpoint": "tcp://*:5560",
    "num_directory_shards": 4,
    "tenants": (asdict(TenantQuota("a", max_bytes=1 << 20)),),
    "private_tenants": True,
}
TENANTS = {"tenants": {"a": {}}}
WATERMARKS = {"low_watermark": 0.2, "high_watermark": 0.3}
EVENTS = {"events_endpoint": "tcp://*:5557"}


@pytest.mark.parametrize("field", StoreConfig.__dataclass_fields__)
def test_every_setting_is_compared(field):
    rest = (DISK if field.startswith("disk") else {}) | WATERMARKS | EVENTS
    rest |= TENANTS if field == "private_tenants" else {}
    one, other = StoreConfig(**rest), StoreConfig(**{**rest, field: OTHERS[field]})
    assert one.fingerprint != other.fingerprint
    wanted, runs_with = getattr(one, field), OTHERS[field]
    if field == "tenants":
        wanted, runs_with = "{}", '{"a": {"max_bytes": 1048576}}'  # as `--set` takes them
    assert one.differences(other) == f"{field}: wanted {wanted!r}, runs with {runs_with!r}"
    assert one.differences(StoreConfig(**rest)) == ""


def test_the_protocol_version_is_in_the_fingerprint(monkeypatch):
    before = StoreConfig().fingerprint
    monkeypatch.setattr(config, "PROTOCOL_VERSION", config.PROTOCOL_VERSION + 1)
    assert StoreConfig().fingerprint != before


def test_the_socket_folder_is_private(monkeypatch, tmp_path):
    folder = tmp_path / "sockets"
    monkeypatch.setenv("RAYKV_SOCKET_DIR", str(folder))
    assert config.socket_dir() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert config.socket_dir() == folder
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 755"):
        config.socket_dir()


def test_ucx_settings_of_the_user_win(monkeypatch):
    for key in (*config.UCX_DEFAULTS, "UCX_TLS", "NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "8k")
    config.set_ucx_defaults()
    config.set_ucx_lane("default")
    assert os.environ["UCX_TCP_TX_SEG_SIZE"] == "8k"
    assert os.environ["UCX_TCP_RX_SEG_SIZE"] == "256k"
    assert "UCX_TLS" not in os.environ
    config.set_ucx_lane("tcp")
    # Beside an NVIDIA GPU NIXL refuses to start without support of CUDA memory, whatever is moved.
    assert os.environ["UCX_TLS"].split(",") == ["tcp", "cuda_copy"]
    for key in (*config.UCX_DEFAULTS, "UCX_TLS", "NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):
        monkeypatch.delenv(key, raising=False)


def test_a_link_is_no_folder_for_sockets(tmp_path, monkeypatch):
    """Another user can make one in a folder where all may write, and turn it elsewhere later."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for name, target in (("link", private), ("dangling", tmp_path / "nothing")):
        (tmp_path / name).symlink_to(target)
        monkeypatch.setenv("RAYKV_SOCKET_DIR", str(tmp_path / name))
        with pytest.raises(ConfigError, match="got a link"):
            config.socket_dir()
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "file").touch(mode=0o600)
    monkeypatch.setenv("RAYKV_SOCKET_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="got a file"):
        config.socket_dir()
