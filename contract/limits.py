"""What one tenant may have and do. Zero means without a limit, for all but bodies and items."""

from typing import Annotated

import msgspec

from contract.errors import InvalidRequestError

__all__ = ["TenantLimits", "parse_limits"]

_Amount = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Rate = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Size = Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]


class TenantLimits(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Limits by name, as ``scorekeep keys limits`` sets them; None: what the settings say."""

    requests_per_s: _Rate | None = None
    queued_jobs: _Amount | None = None
    queued_tokens: _Amount | None = None
    running_tokens: _Amount | None = None
    stored_bytes: _Amount | None = None
    open_bulks: _Amount | None = None
    webhook_endpoints: _Amount | None = None
    body_bytes: _Size | None = None
    items: _Size | None = None

    def over(self, other: "TenantLimits") -> "TenantLimits":
        """Return these limits, and those of ``other`` where these say nothing."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        given = {name: value for name, value in values.items() if value is not None}
        return msgspec.structs.replace(other, **given)


def parse_limits(pairs: list[str]) -> TenantLimits:
    """Read ``queued_jobs=100`` and its like. Raises ``InvalidRequestError`` that names the word."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in TenantLimits.__struct_fields__:
            known = ", ".join(TenantLimits.__struct_fields__)
            message = f"write LIMIT=NUMBER, not {pair[:100]!r}; limits are {known}"
            raise InvalidRequestError(message, param="set")
        values[name] = value
    try:
        return msgspec.convert(values, TenantLimits, strict=False)
    except msgspec.ValidationError as error:
        message = f"a limit is wrong: {error}"
        raise InvalidRequestError(message, param="set") from error
