"""Define the settings of a store and check them; the only module that reads the environment."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import shlex
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kvstore.bounds import MIN_BLOCK_BYTES, check_apart, check_endpoint, clip
from kvstore.errors import ConfigError
from kvstore.quotas import TenantQuota, quotas_by_name, read_tenants

#: Version of the control messages and of the meaning of their fields; both sides must agree exactly.
PROTOCOL_VERSION = 21

#: Names of eviction policies, the default first; kvstore.pool.eviction.make has the policies.
EVICTION_POLICIES = ("learned", "lru")

#: Of `disk_min_uses`.
MAX_MIN_USES = 255
#: Every store has two connections to each shard, and a thread for it.
MAX_SHARDS = 64
#: Of both watermarks.
MAX_WATERMARK = 0.5
#: The low one with `disk_write="back"`; the high one is twice that.
_BACK_WATERMARK = 0.05

_MAX_INT = 1 << 62
#: Upper bounds of the times in settings: of a lease, and of all others (a load adds several of these).
_MAX_LEASE_S, _MAX_S = 86400.0, 3600.0
_TIMES = ("lease_ttl_s", "lease_margin_s", "transfer_timeout_s", "call_timeout_s", "max_quarantine_s", "disk_timeout_s")
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}

#: What UCX needs for full speed over TCP (measured, see docs/adr/0004); a user's own value wins.
UCX_DEFAULTS = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}


def check_name(name: object) -> str:
    """Return the name of a store.

    Raises:
        ConfigError: no store can have it.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name):
        raise ConfigError(f"name: wanted 1 to 40 letters, digits, '_', '.' or '-', got {clip(name)}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings of one store, the same on every node; two processes with different settings refuse each other.

    Args:
        name: distinguishes several stores of one Ray cluster.
        capacity_bytes: size of the arena of each node, exact.
        block_bytes: smallest size of a slot; slots are larger if the first namespace that attaches has larger
            blocks. 0 takes the block size of that namespace.
        lease_ttl_s: how long the leases of loads and the claims of fetches hold, how long published blocks are kept
            unless the publisher names a time, and how long the part of a block that one rank has saved waits for
            the other ranks. A lease of `Client.lease` has a time of its own.
        lease_margin_s: a reader treats a lease as expired this long before its deadline.
        transfer_timeout_s: after this long, a transfer that is not terminal is abandoned.
        call_timeout_s: how long one control call may take.
        save_wait_s: how long a lookup, or a load, waits for blocks that are being saved on its node; 0 for not at all.
        max_pinned_fraction: share of the slots that leases may hold at once.
        max_hard_pinned_fraction: share of the slots that hard pins may hold at once.
        max_handoff_fraction: share of the slots that published hand-offs may hold at once.
        max_quarantined_fraction: share of the slots that may wait for abandoned transfers; beyond it the mover
            that posted them is killed and replaced, which ends the transfers.
        max_quarantine_s: how long an abandoned transfer may keep slots waiting before its mover is killed, too.
        chunk_bytes: bytes that one READ moves, so that copying out overlaps with reading.
        stage_chunk_bytes: bytes that one READ moves between two stages of a hand-off.
        lane: "default" lets UCX choose (RDMA, then shared memory on one host, then TCP) or obeys UCX_TLS;
            "tcp" uses TCP only.
        disk_path: an absolute path on every node below which its store keeps blocks on disk; "" for no disk tier.
        disk_capacity_bytes: of the disk tier of each node.
        disk_min_uses: a block is written to disk when it was stored or used so many times. 1 writes each block that is
            stored; more wears an SSD less.
        disk_write: "through" writes blocks behind the saves that bring them; "back" when they are about to be evicted.
        disk_write_bytes_per_day: a budget; blocks beyond it are not written. 0 for none.
        disk_sync: have the disk keep a block, also without power, before it can be found there. It costs speed, and no
            block is ever wrong without it: fewer may be there after a loss of power.
        disk_timeout_s: after this long without an answer of the disk, the tier is off, until the disk answers again.
        eviction: what goes when a node's pool is full: "learned", the blocks that are least likely to be used again, or
            "lru", the least recently used.
        low_watermark: when a smaller share of a node's slots is free, a loop evicts blocks. 0 for no such loop. None:
            half of the high one if that is given; else 0, or 0.05 when `disk_write` is "back".
        high_watermark: the loop ends when this share is free. None: twice the low one, but at most 0.5.
        metrics: each node store hands its counts to Ray's metrics once a second.
        events_endpoint: where each node publishes which blocks it has, like "tcp://*:5557"; "" for nowhere.
        events_replay_endpoint: where subscribers that missed some ask for them again; "" for nowhere.
        num_directory_shards: actors of the directory, each for the chains of some first blocks (docs/directory.md).
        tenants: what each tenant may have on a node, by name (docs/tenants.md); other names are refused.
        private_tenants: no tenant finds what another has saved; its name is part of its namespaces.
    """

    name: str = "default"
    capacity_bytes: int = 1 << 30
    block_bytes: int = 0
    lease_ttl_s: float = 30.0
    lease_margin_s: float = 0.5
    transfer_timeout_s: float = 10.0
    call_timeout_s: float = 5.0
    save_wait_s: float = 0.05
    max_pinned_fraction: float = 0.9
    max_hard_pinned_fraction: float = 0.5
    max_handoff_fraction: float = 0.5
    max_quarantined_fraction: float = 0.25
    max_quarantine_s: float = 30.0
    chunk_bytes: int = 16 << 20
    stage_chunk_bytes: int = 256 << 20
    lane: str = "default"
    disk_path: str = ""
    disk_capacity_bytes: int = 0
    disk_min_uses: int = 1
    disk_write: str = "through"
    disk_write_bytes_per_day: int = 0
    disk_sync: bool = False
    disk_timeout_s: float = 5.0
    eviction: str = "learned"
    low_watermark: float | None = None
    high_watermark: float | None = None
    metrics: bool = True
    events_endpoint: str = ""
    events_replay_endpoint: str = ""
    num_directory_shards: int = 1
    tenants: tuple[TenantQuota, ...] = ()
    private_tenants: bool = False

    def __post_init__(self) -> None:
        # Before the checks: None is never seen outside.
        object.__setattr__(self, "low_watermark", self._low())
        object.__setattr__(self, "high_watermark", self._high())
        object.__setattr__(self, "tenants", read_tenants(self.tenants))
        for setting in fields(self):
            value, kind = getattr(self, setting.name), float if setting.default is None else type(setting.default)
            is_right = isinstance(value, (int, float) if kind is float else kind)
            if isinstance(value, bool) != (kind is bool) or not is_right:
                raise ConfigError(f"{setting.name}: wanted {_KINDS[kind]}, got {value!r}")
            if isinstance(value, int) and abs(value) > _MAX_INT:  # Python refuses to print thousands of digits.
                raise ConfigError(f"{setting.name}: wanted at most {_MAX_INT}, got {clip(value)}")
        check_name(self.name)
        if self.capacity_bytes < 1 << 16:
            raise ConfigError(f"capacity_bytes: wanted at least 65536, got {self.capacity_bytes}")
        if self.block_bytes and not MIN_BLOCK_BYTES <= self.block_bytes <= self.capacity_bytes:
            wanted = f"0 (automatic), or {MIN_BLOCK_BYTES} to capacity_bytes={self.capacity_bytes}"
            raise ConfigError(f"block_bytes: wanted {wanted}, got {self.block_bytes}")
        for field in _TIMES:
            most_s = _MAX_LEASE_S if field == "lease_ttl_s" else _MAX_S
            if not 0 < getattr(self, field) <= most_s:
                raise ConfigError(f"{field}: wanted more than 0 seconds, up to {most_s:g}, got {getattr(self, field)}")
        if not 0 <= self.save_wait_s <= _MAX_S:
            raise ConfigError(f"save_wait_s: wanted 0 to {_MAX_S:g} seconds, got {self.save_wait_s}")
        if self.lease_ttl_s <= 2 * self.lease_margin_s:
            raise ConfigError(
                f"lease_ttl_s: wanted more than twice lease_margin_s={self.lease_margin_s}, got {self.lease_ttl_s}"
            )
        for field in [setting.name for setting in fields(self) if setting.name.endswith("_fraction")]:
            if not 0 < getattr(self, field) <= 1:
                raise ConfigError(f"{field}: wanted a share in (0, 1], got {getattr(self, field)}")
        for field in ("chunk_bytes", "stage_chunk_bytes"):
            if getattr(self, field) < 1 << 12:
                raise ConfigError(f"{field}: wanted at least 4096, got {getattr(self, field)}")
        if self.lane not in ("default", "tcp"):
            raise ConfigError(f"lane: wanted 'default' or 'tcp', got {self.lane!r}")
        if self.eviction not in EVICTION_POLICIES:
            raise ConfigError(f"eviction: wanted 'learned' or 'lru', got {clip(self.eviction)}")
        if not 1 <= self.num_directory_shards <= MAX_SHARDS:
            raise ConfigError(f"num_directory_shards: wanted 1 to {MAX_SHARDS}, got {self.num_directory_shards}")
        if self.private_tenants and not self.tenants:
            raise ConfigError("private_tenants: wanted it with tenants, got it alone; name them in tenants")
        self._check_disk()
        self._check_watermarks()
        self._check_events()

    def _low(self) -> float | None:
        if self.low_watermark is not None:
            return self.low_watermark
        if isinstance(self.high_watermark, int | float):
            return self.high_watermark / 2
        return _BACK_WATERMARK if self.disk_write == "back" else 0.0

    def _high(self) -> float | None:
        if self.high_watermark is not None or not isinstance(self.low_watermark, int | float):
            return self.high_watermark
        return max(min(2 * self.low_watermark, MAX_WATERMARK), self.low_watermark)

    @property
    def watermarks(self) -> tuple[float, float]:
        """The low and the high watermark, as shares of the slots."""
        low, high = self.low_watermark, self.high_watermark
        assert low is not None, "chosen when this was made"
        assert high is not None, "chosen when this was made"
        return low, high

    def _check_watermarks(self) -> None:
        low, high = self.watermarks
        if not 0 <= low <= high <= MAX_WATERMARK or (high and not low):
            raise ConfigError(
                f"low_watermark, high_watermark: wanted both 0, or 0 < low <= high <= {MAX_WATERMARK}, got {low} and "
                f"{high}; they are shares of the slots that are free"
            )
        if self.disk_write == "back" and not low:
            raise ConfigError(
                f"low_watermark: wanted more than 0 for disk_write='back', got {low}; blocks are written when the loop "
                "evicts them, so give neither watermark, or one above 0, or use disk_write='through'"
            )

    def _check_events(self) -> None:
        for field in ("events_endpoint", "events_replay_endpoint"):
            if value := getattr(self, field):
                check_endpoint(field, value)
        check_apart("events_endpoint", self.events_endpoint, "events_replay_endpoint", self.events_replay_endpoint)
        if self.events_replay_endpoint and not self.events_endpoint:
            raise ConfigError(
                f"events_replay_endpoint: wanted it with events_endpoint, got {self.events_replay_endpoint!r} alone; "
                "give both, or neither"
            )

    def _check_disk(self) -> None:
        if not 1 <= self.disk_min_uses <= MAX_MIN_USES:
            raise ConfigError(f"disk_min_uses: wanted 1 to {MAX_MIN_USES}, got {self.disk_min_uses}")
        if self.disk_write not in ("through", "back"):
            raise ConfigError(f"disk_write: wanted 'through' or 'back', got {clip(self.disk_write)}")
        if self.disk_write_bytes_per_day < 0:
            raise ConfigError(f"disk_write_bytes_per_day: wanted at least 0, got {self.disk_write_bytes_per_day}")
        if bool(self.disk_path) != bool(self.disk_capacity_bytes):
            raise ConfigError(
                f"disk_capacity_bytes: wanted disk_path and disk_capacity_bytes together, got {clip(self.disk_path)} "
                f"and {self.disk_capacity_bytes}; give both, or neither for a store without a disk tier"
            )
        if not self.disk_path:
            self._check_no_disk()
        if self.disk_path and (not os.path.isabs(self.disk_path) or "\0" in self.disk_path):
            raise ConfigError(f"disk_path: wanted an absolute path, got {clip(self.disk_path)}")
        if self.disk_capacity_bytes and self.disk_capacity_bytes < 1 << 16:
            raise ConfigError(f"disk_capacity_bytes: wanted at least 65536, got {self.disk_capacity_bytes}")

    def _check_no_disk(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name.startswith("disk_") and value != setting.default:
                raise ConfigError(
                    f"{setting.name}: wanted it with a disk tier, got {clip(value)} without one; give disk_path and "
                    f"disk_capacity_bytes, too, or leave {setting.name} out"
                )

    def to_json(self) -> str:
        """Return the settings as canonical JSON: sorted keys, no spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def check_names(names: Iterable[str]) -> None:
        """Refuse names that are no settings, and suggest a similar one.

        Raises:
            ConfigError: one of the names is no setting.
        """
        known = sorted(StoreConfig.__dataclass_fields__)
        for name in names:
            if name not in known:
                meant = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {meant[0]!r}?" if meant else ";"
                raise ConfigError(f"{name!r} is no setting of a store{hint} known: {', '.join(known)}")

    @staticmethod
    def from_json(text: str) -> StoreConfig:
        """Return the settings that `to_json` wrote.

        Raises:
            ConfigError: a key is unknown, a value cannot work, or the text is not settings at all.
        """
        values, wanted = None, "what StoreConfig.to_json wrote"
        with contextlib.suppress(ValueError):
            values, wanted = json.loads(text), "the JSON object that StoreConfig.to_json wrote"
        if not isinstance(values, dict):
            raise ConfigError(f"settings: wanted {wanted}, got {clip(text)}; run one version of raykv everywhere")
        # Written by a process, of another version then: a list of all names, as for a user, helps nobody.
        if unknown := sorted(set(values) - set(StoreConfig.__dataclass_fields__)):
            known = f"those of protocol {PROTOCOL_VERSION}, got {clip(unknown[0])}, which is no setting there"
            raise ConfigError(f"settings: wanted {known}; run one version of raykv everywhere")
        return StoreConfig(**values)

    @property
    def fingerprint(self) -> str:
        """16 hex digits; they differ when any setting or the protocol version differs."""
        return hashlib.sha256(f"{PROTOCOL_VERSION}:{self.to_json()}".encode()).hexdigest()[:16]

    def differences(self, running: StoreConfig) -> str:
        """Return the settings in which a running store differs, each with both values, for an error."""
        mine, theirs = self._by_name(), running._by_name()
        both = {key: (mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]}
        return ", ".join(f"{key}: wanted {one!r}, runs with {other!r}" for key, (one, other) in both.items())

    def chosen(self) -> str:
        """Return the settings that are not those of `StoreConfig()`, each as NAME=VALUE, as `--set` takes it."""
        plain, mine = StoreConfig(name=self.name)._by_name(), self._by_name()
        changes = {key: value for key, value in mine.items() if value != plain[key]}
        words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changes.items()}
        return " ".join(f"{key}={shlex.quote(word)}" for key, word in words.items())

    def _by_name(self) -> dict[str, object]:
        return {**asdict(self), "tenants": json.dumps(quotas_by_name(self.tenants))}  # as `--set` takes it


def socket_dir() -> Path:
    """Return this user's private folder for control sockets, made on first use.

    Raises:
        ConfigError: the folder belongs to another user, is open to other users, or is a link or no folder.
    """
    path = Path(os.environ.get("RAYKV_SOCKET_DIR") or f"{tempfile.gettempdir()}/raykv-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    # Not stat(): in a folder where all may write, any user can make a link and later point it elsewhere.
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        kind = "folder" if stat.S_ISDIR(info.st_mode) else "link" if stat.S_ISLNK(info.st_mode) else "file"
        raise ConfigError(
            f"{path}: wanted a folder of user {os.getuid()} with mode 0700, got a {kind} of user {info.st_uid} with "
            f"mode {info.st_mode & 0o777:o}; remove it or set RAYKV_SOCKET_DIR"
        )
    return path


def set_ucx_lane(lane: str) -> None:
    """Restrict this process's NIXL to a lane; must run before NIXL is loaded.

    With "tcp", bytes travel over TCP only: `cuda_copy` connects no processes. It is listed because NIXL's UCX backend
    refuses to start on a machine with an NVIDIA GPU if UCX_TLS names no support for CUDA memory. On other machines UCX
    ignores it.
    """
    if lane == "tcp":
        os.environ["UCX_TLS"] = "tcp,cuda_copy"


def set_ucx_defaults() -> None:
    """Set UCX's TCP segment sizes, unless the user has, before NIXL is loaded: 4 to 8 times faster on loopback TCP."""
    for key, value in {**UCX_DEFAULTS, "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}.items():
        os.environ.setdefault(key, value)
