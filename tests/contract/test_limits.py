"""Limits of a tenant: read from words, laid over one another."""

import pytest

from contract.config import Settings
from contract.errors import InvalidRequestError
from contract.limits import TenantLimits, parse_limits


def test_what_is_not_said_is_what_the_settings_say() -> None:
    """A tenant's own limit wins, zero too; the others stay."""
    own = parse_limits(["queued_jobs=0", "requests_per_s=2.5"])

    merged = own.over(Settings(tenant_queued_tokens=7).tenant_limits)

    assert (merged.queued_jobs, merged.requests_per_s, merged.queued_tokens) == (0, 2.5, 7)
    assert None not in [getattr(merged, name) for name in TenantLimits.__struct_fields__]


@pytest.mark.parametrize("word", ["queued_jobs", "jobs=3", "queued_jobs=-1", "items=x", "items=0"])
def test_a_wrong_word_is_named(word: str) -> None:
    """No equals sign, an unknown limit, a number that it cannot be."""
    with pytest.raises(InvalidRequestError):
        parse_limits([word])
