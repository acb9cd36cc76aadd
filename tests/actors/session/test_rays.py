"""Which Rays count as those of this machine, without a Ray."""

from __future__ import annotations

import pytest

from kvstore.actors.session.rays import LocalRay, _of_raylet

WORDS = ["/x/raylet", "--gcs-address=127.0.0.1:6379", "--temp-dir=/tmp/ray", "--session-name=session_1_0"]


def raylet(folder):
    """Make what /proc shows of a raylet, without its network."""
    (folder / "ns").mkdir()
    (folder / "cmdline").write_text("\0".join(WORDS))
    return folder


def test_a_raylet_of_this_network_counts(tmp_path):
    (raylet(tmp_path) / "ns" / "net").symlink_to("/proc/self/ns/net")
    assert _of_raylet(tmp_path) == LocalRay("127.0.0.1:6379", "/tmp/ray", True)


@pytest.mark.parametrize("network", ["another", "unreadable"])
def test_a_raylet_of_another_network_is_none_of_here(tmp_path, network):
    net = raylet(tmp_path) / "ns" / "net"
    if network == "another":
        net.touch()
    assert _of_raylet(tmp_path) is None
