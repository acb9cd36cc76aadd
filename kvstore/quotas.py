"""Define what a tenant may have on each node, as settings of a store; docs/tenants.md has the rules."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from kvstore.bounds import clip, parse_bytes
from kvstore.errors import ConfigError

#: Each of them is a value of a tag in metrics.
MOST_TENANTS = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What a tenant may have on each node; None for no limit of its own.

    Sizes count whole slots: a quota that is no multiple of a slot is rounded down, one below a slot means nothing.

    Args:
        name: of the tenant; may be left out where a mapping gives it.
        max_bytes: memory of its blocks, with those that it is saving or fetching now, and of its hand-offs.
        max_pinned_bytes: memory that its leases, loads and hard pins hold at once, also where others saved it, and
            memory of others whose blocks its saves continue.
        max_handoffs: tickets of its own that hold blocks at once.
        max_disk_bytes: disk of its blocks.

    Raises:
        ConfigError: a value is no size or number above 0, or the name cannot be one.
    """

    name: str = ""
    max_bytes: int | None = None
    max_pinned_bytes: int | None = None
    max_handoffs: int | None = None
    max_disk_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or (self.name and not _NAME.fullmatch(self.name)):
            raise ConfigError(
                f"tenants: wanted names of 1 to 40 letters, digits, '_', '.' or '-', got {clip(self.name)}"
            )
        for limit in fields(self)[1:]:
            value = getattr(self, limit.name)
            named = f"{limit.name} of tenant {self.name!r}" if self.name else limit.name
            if isinstance(value, str) and limit.name.endswith("_bytes"):
                value = _size_of(value, named)
                object.__setattr__(self, limit.name, value)
            if value is not None and (type(value) is not int or not 0 < value <= _MOST):
                kind = "a size such as '8GiB'" if limit.name.endswith("_bytes") else "a whole number"
                raise ConfigError(f"tenants: wanted {named} as {kind} above 0, or none for no limit, got {clip(value)}")


_QUOTAS = tuple(field.name for field in fields(TenantQuota)[1:])


def read_tenants(given: object) -> tuple[TenantQuota, ...]:
    """Return the tenants of a store, by name.

    Args:
        given: quotas by name, each as `TenantQuota` or as a mapping of its fields; or quotas with names, in any order.

    Raises:
        ConfigError: it is none of these, a name is missing or there twice, there are too many, or the disk could not
            tell two names apart.
    """
    named = list[TenantQuota]()
    if isinstance(given, Mapping):
        for name, quota in given.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(
                    f"tenants: wanted names as text, got {clip(name)}; '' is the shared tenant, without limits"
                )
            named.append(_read_quota(quota, name))
    elif isinstance(given, Iterable) and not isinstance(given, str | bytes):
        named = [_read_quota(quota) for quota in given]
    else:
        raise ConfigError(f"tenants: wanted quotas by name, like {{'team-a': TenantQuota(...)}}, got {clip(given)}")
    names = [quota.name for quota in named]
    if "" in names:
        raise ConfigError("tenants: wanted a name for each, got ''; that is the shared tenant, which has no limits")
    if len(set(names)) < len(names):
        raise ConfigError(f"tenants: wanted a name of its own for each, got {clip(names)}")
    if len(named) > MOST_TENANTS:
        raise ConfigError(f"tenants: wanted at most {MOST_TENANTS}, got {len(named)}")
    tags = Counter(map(tag_of, names))
    if same := [name for name in names if tags[tag_of(name)] > 1]:
        raise ConfigError(f"tenants: wanted names that differ on disk, got {clip(same)}, with one tag; rename one")
    return tuple(sorted(named, key=lambda quota: quota.name))


def check_tenant(tenants: Sequence[TenantQuota], name: object) -> str:
    """Return the name of a tenant of a store; "" is the shared one, which every store has.

    Raises:
        ConfigError: the store has no such tenant.
    """
    if isinstance(name, str) and (not name or any(quota.name == name for quota in tenants)):
        return str.__str__(name)
    known = ", ".join(quota.name for quota in tenants) or "none"
    raise ConfigError(
        f"tenant: wanted a tenant of this store, or '' for the shared one, got {clip(name)}; it has {known}: add this "
        "one with `kvstore restart --set tenants=...`, which names all of them"
    )


def tag_of(tenant: str) -> int:
    """Return the number by which a tenant is known on disk, in every life of a store; 0 for the shared one."""
    return (zlib.crc32(tenant.encode()) or 1) if tenant else 0


def quota_of(tenants: Sequence[TenantQuota], name: str) -> TenantQuota:
    """Return the quota of a tenant; one without limits for a name that has none."""
    return next((quota for quota in tenants if quota.name == name), TenantQuota())


def quotas_by_name(tenants: Sequence[TenantQuota]) -> dict[str, dict[str, int]]:
    """Return the quotas that tenants have, by their names, as `read_tenants` takes them."""
    return {
        each.name: {quota: value for quota in _QUOTAS if (value := getattr(each, quota)) is not None}
        for each in tenants
    }


def _read_quota(given: object, name: str | None = None) -> TenantQuota:
    """Return a quota; `name`, where one is given, is its name whatever the quota says."""
    if isinstance(given, TenantQuota):
        return given if name is None else replace(given, name=name)
    known = [field.name for field in fields(TenantQuota)]
    of = "" if name is None else f" of tenant {clip(name)}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"tenants: wanted a TenantQuota{of}, or a mapping of {', '.join(known)}, got {clip(given)}")
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(f"tenants: wanted quotas{of} among {', '.join(_QUOTAS)}, got {clip(unknown[0])}")
    return TenantQuota(**given) if name is None else TenantQuota(**{**given, "name": name})


def _size_of(text: str, of: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"tenants: wanted {of} as a size such as '8GiB', got {clip(text)}") from error


def parse_tenant(text: str) -> TenantQuota:
    """Return the tenant of `NAME`, or of `NAME:QUOTA=VALUE,...`, as an option of the command line says it.

    Raises:
        ConfigError: it is none of these.
    """
    name, has_limits, limits = text.partition(":")
    values: dict[str, str | int] = {}
    for each in limits.split(",") if has_limits else ():
        field, is_given, value = each.partition("=")
        if not is_given or field in values:
            raise ConfigError(
                f"tenants: wanted NAME, or NAME:QUOTA=VALUE,... with each quota once, got {clip(text)}; the quotas are "
                f"{', '.join(_QUOTAS)}"
            )
        if field not in _QUOTAS:
            raise ConfigError(
                f"tenants: wanted quotas of tenant {clip(name)} among {', '.join(_QUOTAS)}, got {clip(field)}"
            )
        # Python refuses to read thousands of digits; what stays text is refused below.
        is_number = field == "max_handoffs" and value.isascii() and value.isdigit() and len(value) < 20
        values[field] = int(value) if is_number else value
    return _read_quota(values, name)
