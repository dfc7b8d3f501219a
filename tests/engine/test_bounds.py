"""Preparation is bounded: by characters, in parts, and what is shared is tokenised once."""

import itertools
import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from contract.errors import DeadlineExceededError, InputTooLongError
from contract.scores import Truncation
from tests.engine.helpers import make_request
from worker.engine import labels as labels_module
from worker.engine import prompts
from worker.engine.labels import LabelReader
from worker.engine.rules import TokenizerRules
from worker.engine.scorer import ModelScorer
from worker.engine.seam import Budget, PreparedJob

Scorers = Callable[..., ModelScorer]

LLAMA = "LlamaForCausalLM"
QWEN = "Qwen2ForSequenceClassification"
BERT = "BertForSequenceClassification"
KINDS = [
    LLAMA, QWEN, BERT, "RobertaForSequenceClassification", "GPT2LMHeadModel",
    "DebertaV2ForSequenceClassification",
]  # fmt: skip
WORDS = [
    "good", "film", "it's", "don't", "17", "a1b2", "  ", "\n", "\n\n", "naïve", "你好", "e\u0301",
    "...", "-", "<s>", "</s>", "I'LL", "x_y", "\t", "Straße", "100%", "'s", "\u00a0", "🙂",
]  # fmt: skip
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Counter:
    """Counts the characters that a tokenizer is given."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def encode(self, text: str, **options: Any) -> Any:
        """Count, and encode."""
        self.characters += len(text)
        return self.backend.encode(text, **options)

    def encode_batch(self, texts: list[Any], **options: Any) -> Any:
        """Count, and encode."""
        self.characters += sum(len("".join(text)) for text in texts)
        return self.backend.encode_batch(texts, **options)


@pytest.fixture
def counted(
    scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ModelScorer], Counter]:
    """Count what a scorer's tokenizer is given."""

    def count(scorer: ModelScorer) -> Counter:
        counter = Counter(scorer.prompter._backend)
        monkeypatch.setattr(scorer.prompter, "_backend", counter)
        return counter

    return count


def draw(number: int) -> random.Random:
    """Numbers that are the same in every run."""
    return random.Random(number)  # noqa: S311  # not a secret


def draw_text(seed: random.Random, count: int) -> str:
    """Words of every kind, joined with and without a space."""
    return "".join(seed.choice(["", " ", " "]) + seed.choice(WORDS) for _ in range(count))


def ids_of(prepared: PreparedJob) -> list[Any]:
    """What a job puts through the model, and what becomes of the rest."""
    return [
        (item.tokens, item.error and item.error.message, item.labels)
        if item.sequence is None
        else (
            item.tokens,
            item.sequence.ids.tolist(),
            None if item.sequence.token_types is None else item.sequence.token_types.tolist(),
            None if item.sequence.labels is None else item.sequence.labels.tolist(),
            [branch.tolist() for branch in item.sequence.branches],
        )
        for item in prepared.items
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer_tokens_than_its_floor(kind: str, scorer_of: Scorers) -> None:
    """The floor is one, in every tokenizer: alone, and for both parts of a pair."""
    prompter = scorer_of(kind).prompter
    seed = draw(3)
    texts = [draw_text(seed, n % 60) for n in range(300)]
    texts += ["x" * 4000, " " * 4000, "a " * 2000, "\u0301" * 500, "１２ｱｲ" * 100, "<s>" * 50]
    for text in texts:
        found = prompter._backend.encode(text, add_special_tokens=False).ids
        assert prompter.rules.count_least(text) <= len(found), text


@pytest.mark.parametrize("kind", [LLAMA, BERT])
def test_a_long_text_is_refused_by_its_characters(
    kind: str, scorer_of: Scorers, counted: Callable[[ModelScorer], Counter]
) -> None:
    """The reviewer's query: nothing is tokenised for 100 items that are all too long."""
    scorer = scorer_of(kind)
    counter = counted(scorer)
    labels = {"label_token_ids": [1, 2]} if kind == LLAMA else {}

    prepared = scorer.prepare(make_request(query="good film " * 5000, items=["a"] * 100, **labels))

    assert {item.error.code for item in prepared.items if item.error} == {InputTooLongError.code}
    assert [item.index for item in prepared.items] == list(range(100))
    assert "at least" in prepared.items[0].error.message  # type: ignore[union-attr]
    assert counter.characters <= 60_000


@pytest.mark.parametrize("truncation", [Truncation.ITEM, Truncation.QUERY])
def test_what_may_be_cut_is_not_refused(truncation: Truncation, scorer_of: Scorers) -> None:
    """Only the part that may not be cut counts."""
    long, short = "good film " * 2000, "bad"
    query, item = (short, long) if truncation is Truncation.ITEM else (long, short)
    labels = {"label_token_ids": [1], "truncation": truncation}
    scorer = scorer_of(LLAMA)

    kept = scorer.prepare(make_request(query=query, items=[item], **labels)).items[0]
    turned = scorer.prepare(make_request(query=item, items=[query], **labels)).items[0]

    assert kept.sequence is not None
    assert len(kept.sequence.ids) == scorer.description.max_tokens
    assert turned.error is not None
    assert turned.error.code == InputTooLongError.code


@pytest.mark.parametrize("kind", [LLAMA, QWEN, "GPT2LMHeadModel", BERT])
@pytest.mark.parametrize("truncation", list(Truncation))
def test_shared_and_in_parts_is_as_one_by_one(
    kind: str, truncation: Truncation, scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every id, type, cut, error and label, with texts of every kind at the boundary."""
    monkeypatch.setattr(prompts, "_CHUNK_CHARACTERS", 400)
    monkeypatch.setattr(prompts, "_HEAD", 8)
    scorer = scorer_of(kind)
    causal = kind in {LLAMA, "GPT2LMHeadModel"}
    labels = {"label_token_ids": [1, 2]} if causal else {}
    seed = draw(7)
    shared = 0
    for length in [2, 5, 40, 90, 300, 900]:
        for _ in range(6):
            query = draw_text(seed, length)
            items = [draw_text(seed, seed.randrange(12)) for _ in range(5)]
            request = make_request(query=query, items=items, truncation=truncation, **labels)
            shared += scorer.prompter.encode_head(request) is not None
            together = scorer.prepare(request)
            for item, found in zip(items, ids_of(together), strict=True):
                one = make_request(query=query, items=[item], truncation=truncation, **labels)
                assert found == ids_of(scorer.prepare(one))[0]
    assert bool(shared) == (kind != BERT)


def test_a_shared_query_is_tokenised_once(
    scorer_of: Scorers, counted: Callable[[ModelScorer], Counter]
) -> None:
    """Also where it must be tokenised to be cut: the characters are those of one query."""
    scorer = scorer_of(LLAMA)
    query = "good film " * 1000
    counter = counted(scorer)

    scorer.prepare(
        make_request(
            query=query, items=["a", "b c"] * 50, label_token_ids=[1], truncation=Truncation.QUERY
        )
    )

    assert counter.characters < 4 * len(query)


def test_labels_are_read_once_for_each_distinct_ending(
    scorer_of: Scorers, counted: Callable[[ModelScorer], Counter]
) -> None:
    """The reviewer's 300 items and 300 labels: far fewer characters than the product."""
    scorer = scorer_of(LLAMA)
    counter = counted(scorer)
    items = [f"good film {n}" for n in range(300)]
    labels = [chr(97 + n % 26) + str(n) for n in range(300)]

    prepared = scorer.prepare(make_request(items=items, labels=labels, multi_token=True))

    assert all(item.sequence is not None for item in prepared.items)
    assert counter.characters < 30_000


@pytest.mark.parametrize("kind", [LLAMA, "GPT2LMHeadModel"])
def test_labels_are_as_read_behind_the_whole_prompt(kind: str, scorer_of: Scorers) -> None:
    """Whatever ends the prompt and begins the label, ids are those behind the whole text."""
    prompter = scorer_of(kind).prompter
    labels = ["yes", " yes", "17", " 17", "a1", ".", " 好", "\n", "'s", "e\u0301", "1a b"]
    ends = [
        "good film",
        "film 17",
        "film 1",
        "it's",
        "x\n",
        "\n\n",
        "a ",
        "you:",
        "好",
        "7.",
        "a1",
        "",
    ]
    for end, label in itertools.product(ends, labels):
        text = "good film says " * 3 + end
        request = make_request(items=[text], labels=[label], multi_token=True)
        prompt, whole = prompter.encode_alone([text, text + label])
        reader = LabelReader(request, prompter, Budget(math.inf))
        if whole[: len(prompt)] == prompt and len(whole) > len(prompt):
            ((found,),) = reader.read_long(1, prompter.render(request))
            assert found.tolist() == whole[len(prompt) :]
        else:
            with pytest.raises(Exception, match="label"):
                reader.read_long(1, prompter.render(request))


def test_labels_come_in_parts(scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of one ending gives what all at once give."""
    request = make_request(items=["x:", "y:", "z"], labels=["yes", " 1"], multi_token=True)
    scorer = scorer_of(LLAMA)
    whole = ids_of(scorer.prepare(request))
    monkeypatch.setattr(labels_module, "_CHUNK_LABELS", 1)
    assert ids_of(scorer.prepare(request)) == whole


def test_a_job_beyond_its_time_ends_alone(scorer_of: Scorers) -> None:
    """It says that its texts took too long, soon after the time has passed."""
    request = make_request(
        query="é" * 20_000, items=["a"] * 2000, label_token_ids=[1], truncation=Truncation.QUERY
    )
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"within 0\.05 s"):
        scorer_of(LLAMA).prepare(request, within_s=0.05)
    assert time.monotonic() - begin < 15


class Wrapped:
    """A tokenizer as transformers wraps it."""

    def __init__(self, model: Any, normalizer: Any = None, splitter: Any = None) -> None:
        self.backend_tokenizer = Tokenizer(model)
        if normalizer is not None:
            self.backend_tokenizer.normalizer = normalizer
        if splitter is not None:
            self.backend_tokenizer.pre_tokenizer = splitter


def rules_of(*, vocabulary: dict[str, int] | None = None, **parts: Any) -> TokenizerRules:
    """The rules of a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = vocabulary or {one: place for place, one in enumerate(alphabet)}
    return TokenizerRules(Wrapped(models.BPE(vocab=known, merges=[]), **parts))


def test_only_what_is_known_is_split() -> None:
    """The patterns of GPT-2, Llama 3 and Qwen 2; no other, and no prefix space."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def splits(pattern: str, behavior: str = "isolated") -> bool:
        split = pre_tokenizers.Split(Regex(pattern), behavior)
        return rules_of(splitter=pre_tokenizers.Sequence([split, level])).splits

    assert rules_of(splitter=pre_tokenizers.ByteLevel(add_prefix_space=False)).splits
    assert splits(LLAMA_3)
    assert splits(LLAMA_3.replace("{1,3}", ""))
    assert not splits(LLAMA_3, "removed")
    assert not splits(r"\w+ \w+")
    assert not rules_of(splitter=level).splits
    assert not rules_of(splitter=pre_tokenizers.ByteLevel(add_prefix_space=True)).splits
    assert not rules_of(splitter=pre_tokenizers.Metaspace()).splits
    assert not rules_of().splits


@pytest.mark.parametrize("pattern", [None, LLAMA_3, LLAMA_3.replace("{1,3}", "")])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_halves_have_the_ids_of_the_whole(pattern: str | None, normalizer: Any) -> None:
    """Wherever a text is cut, and wherever an edge is claimed; with merges over every pair."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    splitter: Any = level
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        splitter = pre_tokenizers.Sequence([split, level])
    made = Wrapped(models.BPE(), normalizer, splitter)
    backend = made.backend_tokenizer
    seed = draw(11)
    texts = [draw_text(seed, 40) for _ in range(200)]
    trainer: Any = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    rules = TokenizerRules(made)
    assert rules.splits
    for text in texts:
        whole = backend.encode(text).ids
        assert rules.count_least(text) <= len(whole)
        edges = [n for n in range(1, len(text)) if rules.is_edge(text[:n], text[n:])]
        cut = rules.find_cut(text, 0, len(text))
        assert edges
        for place in [cut or 1, *edges] if cut else edges:
            halves = backend.encode(text[:place]).ids + backend.encode(text[place:]).ids
            assert halves == whole, (text[:place], text[place:])


def test_nothing_is_claimed_of_letters_that_may_vanish() -> None:
    """An alphabet with holes, and replacements of letters: no floor."""
    text = "a" * 100
    assert rules_of().count_least(text) == 100
    assert rules_of(vocabulary={"b": 0}).count_least(text) == 0
    assert rules_of(normalizer=normalizers.Replace("a", "")).count_least(text) == 0
    assert rules_of(normalizer=normalizers.Replace(" ", "_")).count_least(text) == 100
    assert rules_of(normalizer=normalizers.Replace(Regex("a+"), "a")).count_least(text) == 0
    suffixed = models.BPE(vocab={"a": 0}, merges=[], end_of_word_suffix="</w>")
    assert TokenizerRules(Wrapped(suffixed)).count_least(text) == 0
    assert TokenizerRules(Wrapped(models.WordLevel({"a": 0}, "a"))).count_least(text) == 0


def test_long_ids_are_parts_as_well(scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids and their own label lists, in parts."""
    monkeypatch.setattr(prompts, "_CHUNK_ITEMS", 2)
    request = make_request(query=[4, 5], items=[[6], [7, 8], [9]], label_token_ids=[[1], [2], [3]])
    found = scorer_of(LLAMA).prepare(request).sequences
    assert [one.ids.tolist() for one in found] == [[4, 5, 6], [4, 5, 7, 8], [4, 5, 9]]
    assert [one.labels.tolist() for one in found if one.labels is not None] == [[1], [2], [3]]
    assert np.array_equal(found[0].ids[:2], found[1].ids[:2])
