"""A short storm with every run of the suite; `make storm` has the long ones."""

from tests.storm import storm


def test_processes_killed_at_random_cost_nothing_but_their_unfinished_work() -> None:
    figures = storm(5.0, seed=24)
    assert figures["remote_hits"] > 0
    assert figures["encoded"] > 0
    assert figures["KILL"] > 0
