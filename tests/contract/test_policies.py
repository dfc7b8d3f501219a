"""The RateLimit headers, as the draft writes them."""

from contract.policies import RatePolicy, render_policies


def test_policies_are_rendered_as_lists_of_items() -> None:
    """Quoted names, whole numbers, seconds rounded up; never less than nothing remains."""
    rate = RatePolicy("requests", 100, 7, 0.2, window_s=10)
    amount = RatePolicy("queued-jobs", 5, -1, 12)

    assert render_policies([]) == {}
    assert render_policies([rate, amount]) == {
        "RateLimit-Policy": '"requests";q=100;w=10, "queued-jobs";q=5',
        "RateLimit": '"requests";r=7;t=1, "queued-jobs";r=0;t=12',
    }
