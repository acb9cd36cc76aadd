"""The benchmark of hand-offs where there is no GPU: through host memory, with real stores, movers and NIXL."""

import pytest

from kvstore.actors.bench.handoff import run_handoff
from kvstore.errors import ConfigError


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_rows_of_hand_offs_through_host_memory():
    said = []
    rows = run_handoff(["70B/TP8"], [16], [4, 2], 2, "cpu", said.append)
    ways = ("limit", "ours", "ours_begun", "ours_early")
    assert [(row["way"], row["num_blocks"]) for row in rows] == [(way, count) for way in ways for count in (2, 4)]
    for row in rows:
        assert (row["shape"], row["block_size"], row["direction"]) == ("70B/TP8", 16, "cpu_to_cpu")
        num_bytes = row["num_blocks"] * 80 * 2 * 16 * 128 * 2
        most, least = (num_bytes / (row["ms"] + rounded) / 1e6 for rounded in (-5e-4, 5e-4))
        assert least - 1e-3 < row["gb_per_s"] < most + 1e-3
    assert all(row["route"] == "host" for row in rows[2:])
    assert any("ours" in text for text in said)


@pytest.mark.parametrize(("names", "device", "match"), [(["9B"], "cpu", "9B"), (["8B"], "cuda", "two GPUs")])
def test_what_cannot_be_measured_is_refused(names, device, match, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=match):
        run_handoff(names, [16], [2], 1, device, lambda text: None)
