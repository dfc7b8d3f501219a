"""What a key looks like, and what is kept of it."""

import pytest

from contract.errors import InvalidRequestError
from contract.keys import Scope, create_key, hash_key, is_same_hash, parse_prefix, parse_scopes


def test_a_key_carries_its_prefix_and_32_random_bytes() -> None:
    """No two are alike; the prefix is part of the key and can be read from it."""
    made = {create_key() for _ in range(100)}

    assert len({key for key, _ in made}) == len({prefix for _, prefix in made}) == 100
    for key, prefix in made:
        assert key.startswith(f"{prefix}_")
        assert len(key.removeprefix(f"{prefix}_")) == 43  # 32 bytes in base64
        assert parse_prefix(key) == prefix


@pytest.mark.parametrize("text", ["", "sk_", "EMPTY", "sk_0123456789abcdef_", "sk_" + "x" * 100])
def test_what_is_no_key_has_no_prefix(text: str) -> None:
    """It is refused without a look into the database."""
    assert parse_prefix(text) is None


def test_hashes_tell_keys_apart() -> None:
    """The same key has the same hash, another has another, and neither holds the key."""
    (one, _), (other, _) = create_key(), create_key()

    assert is_same_hash(hash_key(one), hash_key(one))
    assert not is_same_hash(hash_key(one), hash_key(other))
    assert one not in hash_key(one)


def test_scopes_are_words_with_commas() -> None:
    """In any order, with spaces; what is unknown, and nothing at all, is refused by name."""
    assert parse_scopes("read, submit") == [Scope.SUBMIT, Scope.READ]
    with pytest.raises(InvalidRequestError, match="root"):
        parse_scopes("read,root")
    with pytest.raises(InvalidRequestError, match="nothing"):
        parse_scopes(" , ")
