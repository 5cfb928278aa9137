"""The static policy and the choice of a policy by name."""

import pytest

from granikv.core.errors import ConfigError
from granikv.core.repartition import StaticPolicy, Window, make_policy


def test_static_stays_whatever_happens():
    window = Window(
        now_s=1.0,
        size_tokens=100,
        hot_tokens=20,
        hot_used=20,
        hot_free=0,
        largest_free_run=0,
        cold_used=10,
        cold_free=70,
        cold_waiting_tokens=0,
        hot_misses={"no_room": 50},
        hot_miss_tokens=5000,
        evictions=3,
        retractions=0,
        rows_per_slab=((20, 4),),
    )
    policy = make_policy("static")
    assert isinstance(policy, StaticPolicy)
    assert policy.observe(window) is None


@pytest.mark.parametrize(
    ("name", "message"), [("statik", "did you mean 'static'"), ("zzz", "choose one of static")]
)
def test_unknown_policy(name, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(name)
