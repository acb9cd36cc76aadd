"""Quotas as a user writes them: what is read, and what is refused with a word of what was wanted."""

from __future__ import annotations

import pytest

from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.quotas import MOST_TENANTS, TenantQuota, check_tenant, parse_tenant, quota_of, read_tenants


def test_quotas_are_given_by_name_as_objects_mappings_or_both():
    wanted = (TenantQuota("a", max_bytes=1 << 30), TenantQuota("b", max_handoffs=3))
    assert read_tenants({"b": {"max_handoffs": 3}, "a": TenantQuota(max_bytes="1GiB")}) == wanted
    assert read_tenants(reversed(wanted)) == wanted
    assert read_tenants([{"name": "b", "max_handoffs": 3}, {"name": "a", "max_bytes": 1 << 30}]) == wanted
    assert read_tenants({}) == ()


def test_settings_with_tenants_come_back_from_text_and_are_one_whatever_their_order():
    one = StoreConfig(tenants={"a": {"max_bytes": "8GiB"}, "b": {}}, private_tenants=True)
    other = StoreConfig(tenants={"b": {}, "a": {"max_bytes": 8 << 30}}, private_tenants=True)
    assert StoreConfig.from_json(one.to_json()) == one == other
    assert one.fingerprint == other.fingerprint != StoreConfig(tenants={"a": {}, "b": {}}).fingerprint


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"": {}}, "'' is the shared tenant"),
        ({7: {}}, "names as text"),
        ({"a b": {}}, "1 to 40 letters"),
        ({"a" * 41: {}}, "1 to 40 letters"),
        ({"a": 5}, "a TenantQuota of tenant 'a', or a mapping of name, max_bytes"),
        ({"a": {"max_byte": 5}}, "quotas of tenant 'a' among max_bytes, .*, got 'max_byte'"),
        ({"a": {"max_bytes": 0}}, "max_bytes of tenant 'a' as a size"),
        ({"a": {"max_bytes": "much"}}, "wanted max_bytes of tenant 'a' as a size such as '8GiB', got 'much'"),
        ({"a": {"max_bytes": 1.5}}, "above 0"),
        ({"a": {"max_handoffs": True}}, "a whole number above 0"),
        ({"a": {"max_handoffs": "3"}}, "a whole number above 0"),
        ({"a": {"max_pinned_bytes": 1 << 63}}, "max_pinned_bytes"),
        ([{"max_bytes": 5}], "a name for each"),
        ([TenantQuota("a"), TenantQuota("a")], "a name of its own"),
        # On disk a tenant is known by the CRC-32 of its name.
        ({"team-cf2842a5703": {}, "team-1450c189212f": {}}, "names that differ on disk.*team-1450c189212f.*rename"),
        ({f"t{number}": {} for number in range(MOST_TENANTS + 1)}, f"at most {MOST_TENANTS}"),
        ("a", "quotas by name"),
        (5, "quotas by name"),
    ],
)
def test_what_is_no_tenant_is_refused(given, text):
    with pytest.raises(ConfigError, match=text):
        StoreConfig(tenants=given)


def test_private_tenants_need_tenants():
    with pytest.raises(ConfigError, match="private_tenants: wanted it with tenants"):
        StoreConfig(private_tenants=True)


def test_a_tenant_of_the_command_line():
    assert parse_tenant("chat") == TenantQuota("chat")
    text = "batch:max_bytes=16GiB,max_pinned_bytes=4096,max_handoffs=64,max_disk_bytes=1TiB"
    wanted = TenantQuota("batch", max_bytes=16 << 30, max_pinned_bytes=4096, max_handoffs=64, max_disk_bytes=1 << 40)
    assert parse_tenant(text) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:max_bytes", "NAME:QUOTA=VALUE"),
        ("a:max_bytes=1,max_bytes=2", "each quota once"),
        ("a:", "NAME:QUOTA=VALUE,.* got 'a:'"),
        ("a:max_bytes=1,", "NAME:QUOTA=VALUE"),
        ("a:max_byte=3", "quotas of tenant 'a' among max_bytes, .*, got 'max_byte'"),
        ("a:name=b", "quotas of tenant 'a' among max_bytes, .*, got 'name'"),
        ("a:=1", "got ''"),
        ("a:max_handoffs=x", "max_handoffs of tenant 'a' as a whole number"),
        ("a:max_handoffs=1.5", "max_handoffs of tenant 'a' as a whole number above 0, .*got '1.5'"),
        ("a:max_handoffs=" + 30 * "9", "max_handoffs of tenant 'a'"),
        ("a:max_bytes=-1", "max_bytes of tenant 'a' as a size such as '8GiB', got '-1'"),
        ("a:max_pinned_bytes=lots", "max_pinned_bytes of tenant 'a' as a size such as '8GiB', got 'lots'"),
        ("a b", "1 to 40 letters"),
    ],
)
def test_a_text_that_is_no_tenant_is_refused_with_the_tenant_and_the_quota(text, said):
    with pytest.raises(ConfigError, match=f"^tenants: wanted .*{said}"):
        parse_tenant(text)


def test_a_name_is_one_of_the_stores_or_the_shared_one():
    tenants = read_tenants({"a": {}, "b": {"max_handoffs": 2}})
    assert (check_tenant(tenants, "a"), check_tenant(tenants, ""), check_tenant((), "")) == ("a", "", "")
    assert quota_of(tenants, "b").max_handoffs == 2
    assert quota_of(tenants, "").max_handoffs is None
    for name in ("c", None, 5, "a" * 1000):
        with pytest.raises(ConfigError, match="it has a, b"):
            check_tenant(tenants, name)
    with pytest.raises(ConfigError, match="it has none"):
        check_tenant((), "a")
