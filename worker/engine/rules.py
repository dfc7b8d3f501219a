"""What a tokenizer's parts prove about its ids: the only place that reasons about pieces of text.

Two things are proved where the parts allow it: that a text holds at least so many tokens, and that
a text may be tokenised in two halves. Where nothing can be proved, nothing is claimed.
"""

import json
import re
import string
from typing import Any

from worker.engine.foreign import Tokenizer

__all__ = ["TokenizerRules"]

_ALNUM = string.ascii_letters + string.digits
_NOT_ALNUM = bytes(set(range(256)) - set(_ALNUM.encode()))
#: a word that begins behind white space is a token of its own, or several, to all that split there
_WORD = re.compile(r"[ \t\r\n][A-Za-z0-9]")
_JOINED = re.compile(r"[A-Za-z][0-9]|[0-9][A-Za-z]")
#: how many characters NFC may make one of
_NFC_SHRINK = 4
#: these change neither the number of ASCII letters and digits nor their order
_NORMALIZERS = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt",
    "Precompiled", "Prepend", "Strip", "StripAccents",
}  # fmt: skip
#: these drop no character but white space
_SPLITTERS = {
    "BertPreTokenizer", "ByteLevel", "Digits", "Metaspace", "Punctuation",
    "UnicodeScripts", "Whitespace", "WhitespaceSplit",
}  # fmt: skip
_AT_SPACES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
#: Llama 3 and Qwen 2: as GPT-2's own, no match holds a letter or digit before a space, or a
#: letter beside a digit, and none looks behind itself
_PATTERNS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+"
    r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
}


class TokenizerRules:
    """The proofs about one tokenizer. Thread-safe: nothing changes after the start."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = tokenizer.backend_tokenizer
        parts = json.loads(backend.to_str())
        vocabulary = backend.get_vocab(with_added_tokens=True)
        added = [entry["content"] for entry in parts["added_tokens"]]
        greedy = any(
            entry["lstrip"] or entry["rstrip"] or entry["single_word"]
            for entry in parts["added_tokens"]
        )
        model = parts["model"]
        normalizers = _flatten(parts["normalizer"], "normalizers")
        splitters = _flatten(parts["pre_tokenizer"], "pretokenizers")
        kinds = {one["type"] for one in normalizers}
        byte_level = _is_byte_level(model, splitters) and kinds <= {"NFC"}
        self._longest = max(map(len, vocabulary), default=1)
        self._words = 1 + max((token.count(" ") for token in vocabulary), default=0)
        self._counts_letters = _keeps_letters(model, normalizers, splitters, vocabulary)
        self._counts_words = (
            model["type"] == "WordPiece"
            and kinds <= _NORMALIZERS
            and any(one["type"] in _AT_SPACES for one in splitters)
        )
        #: how many characters a token may stand for, whatever they are; 0 where nobody knows
        self._any_longest = 0
        if byte_level and not greedy:
            self._any_longest = self._longest * (_NFC_SHRINK if kinds else 1)
        self.splits = byte_level and not greedy and not any(" " in content for content in added)
        self._splits_digits = self.splits and not any(map(_JOINED.search, added))

    def count_least(self, text: str) -> int:
        """Return how many tokens ``text`` has at least, also as a part of a longer one."""
        least = len(text) // self._any_longest if self._any_longest else 0
        if self._counts_letters:
            letters = text.encode("ascii", "ignore").translate(None, _NOT_ALNUM)
            least = max(least, len(letters) // self._longest)
        if self._counts_words:
            least = max(least, sum(1 for _ in _WORD.finditer(text)) // self._words)
        return least

    def find_cut(self, text: str, begin: int, end: int) -> int:
        """Return the last place between ``begin`` and ``end`` where ``text`` may be cut, or 0.

        The ids of both halves, one behind the other, are those of the whole.
        """
        if not self.splits:
            return 0
        place = end
        while (place := text.rfind(" ", begin + 1, place)) > 0:
            if text[place - 1] in _ALNUM:
                return place
        return 0

    def is_edge(self, before: str, after: str) -> bool:
        """Return whether a text that ends in ``before`` may be cut from one that begins so."""
        if not self.splits or not before or not after or before[-1] not in _ALNUM:
            return False
        if after[0] == " ":
            return True
        digit = before[-1].isdigit()
        follows = string.ascii_letters if digit else string.digits
        return self._splits_digits and after[0] in follows


def _flatten(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[name] if part["type"] == "Sequence" else [part]


def _is_byte_level(model: dict[str, Any], splitters: list[dict[str, Any]]) -> bool:
    """Tell whether it merges bytes within pieces whose pattern is known."""
    if model["type"] != "BPE" or model.get("dropout") or not splitters:
        return False
    *first, last = splitters
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if not first:
        return bool(last["use_regex"])
    (split, *more) = first
    return (
        not more
        and not last["use_regex"]
        and split["type"] == "Split"
        and split["pattern"].get("Regex") in _PATTERNS
        and split["behavior"] == "Isolated"
        and not split["invert"]
    )


def _keeps_letters(
    model: dict[str, Any],
    normalizers: list[dict[str, Any]],
    splitters: list[dict[str, Any]],
    vocabulary: dict[str, int],
) -> bool:
    """Tell whether every ASCII letter and digit ends in a token, none of them as an unknown one."""
    if model["type"] not in {"BPE", "Unigram"}:
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    lower = any(one["type"] == "Lowercase" for one in normalizers)
    kept = (one for one in _ALNUM if not (lower and one.isupper()))
    return (
        all(one["type"] in _NORMALIZERS or _is_harmless(one) for one in normalizers)
        and all(
            one["type"] in _SPLITTERS
            or (one["type"] == "Split" and one["behavior"] != "Removed" and not one["invert"])
            for one in splitters
        )
        and all(one in vocabulary for one in kept)
    )


def _is_harmless(normalizer: dict[str, Any]) -> bool:
    """Tell whether a replacement is of other characters than letters and digits."""
    if normalizer["type"] != "Replace":
        return False
    given = normalizer["pattern"].get("String")
    return given is not None and not any(one in _ALNUM for one in given)
