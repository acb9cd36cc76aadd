"""Publishers and subscribers of a test, ended after it."""

from __future__ import annotations

import pytest


@pytest.fixture
def subscribe():
    """Subscribe to a node's events."""
    from event_subscriber import Subscriber

    made = []

    def subscribe(core, **settings):
        made.append(Subscriber(core.stats()["events"] if hasattr(core, "pool") else core.stats(), **settings))
        return made[-1]

    yield subscribe
    for each in made:
        each.close()


@pytest.fixture
def publish():
    """Make a publisher with limits."""
    from kvstore.node.events.outlet import Limits
    from kvstore.node.events.publisher import EventPublisher

    made = []

    def publish(**limits):
        made.append(EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "n", "s", Limits(**limits)))
        return made[-1]

    yield publish
    for each in made:
        each.stop()


@pytest.fixture
def publisher(publish):
    return publish()
