from __future__ import annotations

from swarmnode.rates import Rates


def test_rates_between_two_readings() -> None:
    rates = Rates()
    assert rates.of("a") == (0.0, 0.0)
    rates.update("a", 10.0, 1000, 500)
    rates.update("a", 12.0, 3000, 500)
    assert rates.of("a") == (1000.0, 0.0)
    assert rates.silent_s("a", 15.0) == 5.0
    rates.update("a", 13.0, 3000, 800)
    assert rates.of("a") == (0.0, 300.0)
    assert rates.silent_s("a", 15.0) == 2.0


def test_a_new_connections_counters_start_over() -> None:
    rates = Rates()
    rates.update("a", 1.0, 1000, 1000)
    rates.update("a", 2.0, 10, 10)
    assert rates.of("a") == (0.0, 0.0)
    rates.update("a", 3.0, 20, 30)
    assert rates.of("a") == (10.0, 20.0)
