from __future__ import annotations

import pickle
import re

import pytest

from kvstore import errors

ALL = errors.all_error_types()


def defined_classes() -> set[str]:
    return {name for name, value in vars(errors).items() if isinstance(value, type)}


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_pickling(name, protocol):
    error = ALL[name]("wanted 4 slots, got 3; release leases or add capacity")
    back = pickle.loads(pickle.dumps(error, protocol=protocol))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.args == error.args


def test_all_error_types_is_complete():
    assert set(ALL) == defined_classes()


def test_the_drawn_tree_is_the_real_one():
    """Parents are read from the indentation of the drawing in the module's docstring."""
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^((?:[│ ]   )*)(?:├── |└── )?([A-Z]\w+)(?:\s{2,}|$)", line)
        if match is None:
            continue
        is_root = line.startswith(match[2])
        depth = 0 if is_root else len(match[1]) // 4 + 1
        path[depth:] = [match[2]]
        if depth:
            drawn[match[2]] = path[depth - 1]
    real = {name: cls.__base__.__name__ for name, cls in ALL.items() if cls is not errors.KVStoreError}
    assert drawn == real


def test_every_error_says_what_it_means():
    assert all((cls.__doc__ or "").endswith(".") for cls in ALL.values())
