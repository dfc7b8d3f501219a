"""Histograms: what falls where, and that what is stored gives back what was counted."""

from contract.histograms import BOUNDS, Histogram, accumulate


def test_a_bound_holds_what_is_up_to_it() -> None:
    """A value that equals a bound is below it; one beyond all of them is in the last bucket."""
    sizes = Histogram("batch_sequences")
    for value in (1, 2, 3, 512, 513):
        sizes.observe(value)

    buckets, total = accumulate("batch_sequences", sizes.totals())
    found = dict(buckets)

    assert total == 1031
    assert [found[bound] for bound in ("1", "2", "4", "512", "+Inf")] == [1, 2, 3, 4, 5]
    assert len(buckets) == len(BOUNDS["batch_sequences"]) + 1


def test_nothing_counted_is_a_histogram_too() -> None:
    """As long as no worker added anything, all buckets are there and empty."""
    buckets, total = accumulate("batch_tokens", {})

    assert total == 0
    assert {count for _, count in buckets} == {0}
