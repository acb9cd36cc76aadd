"""`--set NAME=VALUE`: how a setting is read, and what is refused."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.quotas import TenantQuota
from kvstore.tools.settings import merged, setting_of, settings_of


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


def test_a_watermark_may_be_left_to_the_store():
    assert setting_of("low_watermark=null") == ("low_watermark", None)


def test_tenants_are_read_as_quotas():
    text = 'tenants={"b": {"max_bytes": "8GiB"}, "a": {}}'
    assert setting_of(text) == ("tenants", (TenantQuota("a"), TenantQuota("b", max_bytes=8 << 30)))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("lease_ttl=60", "did you mean 'lease_ttl_s'"),
        ("capacity=8GiB", "did you mean 'capacity_bytes'"),
        ("num_directory_shard=4", "did you mean 'num_directory_shards'"),
        ("tenants=batch", "wanted a JSON object like .* got 'batch'"),
        ("tenants=3", "wanted quotas by name"),
        ("lease_ttl_s=" + "9" * 5000, r"wanted a number, got .*5000 in all"),
    ],
)
def test_a_refusal_says_what_is_meant(text, wanted):
    with pytest.raises(ConfigError, match=wanted):
        setting_of(text)


def test_a_setting_that_is_given_twice_has_one_value():
    assert settings_of(["lease_ttl_s=60", "lane=tcp", "lease_ttl_s=60.0"]) == {"lease_ttl_s": 60.0, "lane": "tcp"}
    with pytest.raises(ConfigError, match=r"--set lease_ttl_s: wanted one value, got 60.0 and 61.0"):
        settings_of(["lease_ttl_s=60", "lease_ttl_s=61"])


def test_set_wins_over_an_option_that_was_not_written_and_must_agree_with_one_that_was():
    options = {"lane": "default", "eviction": "lru"}
    assert merged(options, {"eviction": "--eviction"}, {"lane": "tcp", "eviction": "lru"}) == {
        "lane": "tcp",
        "eviction": "lru",
    }
    with pytest.raises(ConfigError, match="--lane and --set lane: wanted one value, got 'default' and 'tcp'"):
        merged(options, {"lane": "--lane"}, {"lane": "tcp"})
