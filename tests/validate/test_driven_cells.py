"""Names of driven cells, and what they stand for."""

import pytest

from granikv.core.errors import ConfigError
from granikv.validate.driven_cells import ClosedCell, PoissonCell, named
from granikv.validate.serve_cells import cells, groups


@pytest.mark.parametrize(
    ("name", "prefixes", "rate_per_s"),
    [
        ("poisson-8192@8", (8192,), 8.0),
        ("poisson-512@0.25", (512,), 0.25),
        ("mixed@12.5", (2048, 4096, 8192, 16384), 12.5),
        ("prefixes-3x4096@6", (4096,) * 3, 6.0),
        ("ladder-5@4", (1024, 2048, 4096, 8192, 16384), 4.0),
        ("ladder-2@4", (1024, 16384), 4.0),
    ],
)
def test_a_name_says_what_is_sent(name: str, prefixes: tuple[int, ...], rate_per_s: float):
    (cell,) = cells([name])
    assert isinstance(cell, PoissonCell)
    assert (cell.name, cell.prefixes, cell.rate_per_s) == (name, prefixes, rate_per_s)
    assert (cell.requests, cell.window) == (256, None)


def test_rates_past_saturation_have_a_window():
    for name in ("poisson-8192@32", "mixed@40", "ladder-4@32"):
        (cell,) = cells([name])
        assert isinstance(cell, PoissonCell)
        assert (cell.window, cell.requests) == ((64, 512), 864)
    (old,) = cells(["poisson-8192"])
    (new,) = cells(["poisson-8192@32"])
    assert isinstance(old, PoissonCell)
    assert isinstance(new, PoissonCell)
    assert (old.prefixes, old.rate_per_s) == (new.prefixes, new.rate_per_s)
    assert (old.window, old.requests) == (new.window, new.requests)


def test_a_name_may_say_how_many_are_measured():
    below, past = cells(["mixed@4x128", "ladder-3@40.0x256"])
    assert isinstance(below, PoissonCell)
    assert isinstance(past, PoissonCell)
    assert (below.name, below.requests, below.window) == ("mixed@4x128", 128, None)
    assert (past.name, past.requests, past.window) == ("ladder-3@40x256", 608, (64, 256))


@pytest.mark.parametrize(("name", "users", "requests"), [
    ("closed-8192x64", 64, 256), ("closed-8192x256", 256, 1024), ("closed-8192x1", 1, 256),
])  # fmt: skip
def test_closed_cells(name: str, users: int, requests: int):
    assert named(name) == ClosedCell(name, 8192, users, requests)


def test_one_cell_has_one_name():
    names = [cell.name for cell in cells(["poisson-8192@8.50", "poisson-8192@8.5", "mixed@08"])]
    assert names == ["poisson-8192@8.5", "mixed@8"]


@pytest.mark.parametrize(
    "name",
    [
        "poisson-8192@0", "poisson-8192@0.00", "poisson-8192@", "poisson-0@4", "poisson-8K@4",
        "poisson-8192@4x", "poisson-8192@-4", "poisson-4096", "mixed", "mixed-8192@4", "ladder-1@4",
        "prefixes-1x8192@4", "prefixes-4@4", "closed-8192", "closed-8192x0", "closed-8192x4@2",
        "mixed@4x0", "mixed@4x8x8", "mixed@x8", "poisson-8192x8",
    ],
)  # fmt: skip
def test_other_names_are_refused(name: str):
    with pytest.raises(ConfigError, match=f"no cell {name};.*ladder-<k>@<rate>"):
        cells([name])


def test_loads_are_groups():
    for group, prefix in (("loads", "poisson-8192"), ("mixed-loads", "mixed")):
        assert [cell.name for cell in cells([group])] == [
            f"{prefix}@{rate}" for rate in (4, 8, 12, 15, 32)
        ]
    assert all(named(cell.name) == cell for cell in groups()["loads"])
