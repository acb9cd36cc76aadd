"""How fast bytes come, as measured lately."""

from kvstore.runtime.rates import MeasuredRate


def test_the_first_measurement_counts_whole_and_later_ones_a_fifth():
    rate = MeasuredRate()
    assert rate.bytes_per_s == 0.0
    rate.note(100, 1.0)
    assert rate.bytes_per_s == 100.0
    rate.note(100, 0.5)
    assert rate.bytes_per_s == 120.0


def test_what_measures_nothing_changes_nothing():
    rate = MeasuredRate()
    rate.note(100, 1.0)
    rate.note(0, 1.0)
    rate.note(100, 0.0)
    assert rate.bytes_per_s == 100.0
