"""The pause of a thread that polls."""

import resource

from kvstore.runtime.pauses import give_way


def test_who_gives_way_does_not_sleep():
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range(1000):
        give_way()
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 100, "as often as it gave up its core"
