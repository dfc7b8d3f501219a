"""The service that requires keys, for the fuzzed requests."""

from tests.api.conftest import guarded

__all__ = ["guarded"]
