"""What a look at an installation finds: the form in which child processes tell it."""

import msgspec

__all__ = ["Finding"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One part of an installation. ``advice`` says what to do where it is not ``ok``."""

    part: str
    ok: bool
    detail: str
    advice: str = ""
