"""A store that is started by an actor in a placement group, as a trainer of Ray Train or Tune does it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvstore

NAME = "grouped"
PACKAGE = Path(kvstore.__file__).parent
ROOMS = (PACKAGE, PACKAGE.parent / "actors")


class Trainer:
    def begin(self):
        kvstore.start("4MiB", name=NAME, timeout_s=60).close()
        return self.actors()

    def actors(self):
        """Return state and number of restarts of each actor of the store, and of all movers, by name or id."""
        from ray._private import state

        known = state.actors().values()
        own = [each for each in known if each["Name"].startswith(f"raykv/{NAME}/") or each["ActorClassName"] == "Mover"]
        return {each["ActorID"]: (each["State"], int(each["NumRestarts"]), each["Name"]) for each in own}


@pytest.mark.ray
def test_a_placement_group_that_captures_what_its_actors_make_never_holds_a_store(ray_cluster, eventually, get):
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 0.1}])
    get(group.ready())
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    trainer = ray.remote(num_cpus=0.1, scheduling_strategy=inside)(Trainer).remote()
    try:
        # Ray knows the movers of other tests' stores, too, which have ended.
        begun = {key: each for key, each in get(trainer.begin.remote(), 90).items() if each[0] != "DEAD"}
        names = {name.split("/")[2] for _, _, name in begun.values() if name}
        assert {"supervisor", "directory", "node"} <= names
        assert {state for state, *_ in begun.values()} == {"ALIVE"}
        remove_placement_group(group)

        def is_gone():
            try:
                return not get(trainer.actors.remote(), 5)
            except ray.exceptions.RayActorError:
                return True

        eventually(is_gone, 30)
        now = Trainer().actors()
        assert {key: now.get(key) for key in begun} == begun
        assert kvstore.connect(NAME).stats()["problems"] == {}
    finally:
        kvstore.connect(NAME).destroy()


def test_all_actors_are_made_by_the_one_function_that_says_where_they_run():
    places = []
    for path in (path for room in ROOMS for path in sorted(room.rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "ray.remote":
                places.append(path.name)
    assert places == ["calls.py"]
