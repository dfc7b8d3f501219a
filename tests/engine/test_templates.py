"""Templates, chat templates and presets: the words around query and item."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from contract.errors import InvalidRequestError, ModelLoadError
from contract.models import ModelConfig
from contract.scores import Truncation
from tests.engine.helpers import assert_close, make_request, score
from tests.reference import Reference
from tests.tiny_models import make_tiny
from worker.engine.loader import load_model
from worker.engine.scorer import ModelScorer
from worker.engine.templates import PRESETS

Scorers = Callable[..., ModelScorer]
References = Callable[..., Reference]

LLAMA = "LlamaForCausalLM"
QWEN = "Qwen3ForCausalLM"
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class TestPresets:
    """Rerankers whose model card demands a template."""

    @pytest.mark.parametrize(
        ("folder", "preset"),
        [
            ("Qwen3-Reranker-0.6B", "qwen3-reranker"),
            ("mxbai-rerank-base-v2", "mxbai-rerank-v2"),
            ("bge-reranker-v2-gemma", "bge-reranker-v2-gemma"),
        ],
    )
    def test_refused_without(self, folder: str, preset: str, tmp_path: Path) -> None:
        """The refusal says what to write; template = none is accepted and shown."""
        source = str(make_tiny(tmp_path / folder, QWEN))

        with pytest.raises(ModelLoadError, match=f'template = "{preset}"'):
            load_model("reranker", ModelConfig(source=source))
        plain = load_model("reranker", ModelConfig(source=source, template="none"))
        found = score(plain, items=["a"], label_token_ids=[5])
        assert found.receipt["template"] is None

    def test_refusals(self, scorer_of: Scorers) -> None:
        """The description says what a template leaves no room for; without one it says nothing."""
        templated = scorer_of(QWEN, entry={"template": "qwen3-reranker"}).description
        plain = scorer_of(QWEN).description

        assert plain.refusals.keys() == {"activation", "instruction"}
        assert templated.refusals.keys() == {"activation", "item_first", "loglikelihood"}
        assert "template" in templated.refusals["loglikelihood"]

    @pytest.mark.parametrize("preset", PRESETS)
    def test_prompt(self, preset: str, scorer_of: Scorers, reference_of: References) -> None:
        """The model card's words, tokenised as one string; the receipt names the preset."""
        scorer, reference = scorer_of(QWEN, entry={"template": preset}), reference_of(QWEN)
        query, items = "is the film good?", ["a good film", "terrible sound"]

        found = score(scorer, query=query, items=items, label_token_ids=[5, 9])

        known = PRESETS[preset]
        texts = [
            known.text.replace("{instruction}", known.instruction)
            .replace("{query}", query)
            .replace("{item}", item)
            for item in items
        ]
        expected = [
            np.exp(reference.logprobs(reference.tokenizer(text).input_ids)[[5, 9]])
            for text in texts
        ]
        assert_close(found.tensors["scores"], expected, tolerance=1e-6)
        assert found.receipt["template"] == preset
        assert found.receipt["shared_prefix_items"] == 2

    def test_labels_of_a_preset(self, scorer_of: Scorers) -> None:
        """Without labels the preset's own are read."""
        added = ("yes", "no")
        scorer = scorer_of(QWEN, entry={"template": "qwen3-reranker"}, tokenizer={"added": added})

        found = score(scorer, query="good?", items=["film"], apply_softmax=True)

        assert found.labels == ["yes", "no"]
        assert_close(np.sum(found.tensors["scores"]), 1.0, tolerance=1e-6)

    def test_instruction(self, scorer_of: Scorers) -> None:
        """The entry's instruction replaces the preset's; mxbai's line exists only with one.

        What looks like a field in it is text.
        """
        qwen = scorer_of(QWEN, entry={"template": "qwen3-reranker", "instruction": "find films"})
        mxbai = scorer_of(QWEN, entry={"template": "mxbai-rerank-v2", "instruction": "find films"})

        request = make_request(query="good", items=["film"], label_token_ids=[5])
        assert "<Instruct>: find films\n" in qwen.prompter.render(request)[0].text
        assert (
            "user\ninstruction: find films\nquery: good\n" in mxbai.prompter.render(request)[0].text
        )
        told = msgspec.structs.replace(request, instruction="a {query}")
        assert "<Instruct>: a {query}\n<Query>: good\n" in qwen.prompter.render(told)[0].text
        none = msgspec.structs.replace(request, instruction="")
        assert "user\nquery: good\n" in mxbai.prompter.render(none)[0].text

    def test_instruction_of_a_request(self, scorer_of: Scorers, reference_of: References) -> None:
        """The prompt is the model card's with the request's task in it, written by hand here.

        Equal whether it comes from the entry, the preset or the request; the receipt tells apart.
        """
        reference = reference_of(QWEN)
        entry = {"template": "qwen3-reranker"}
        scorer = scorer_of(QWEN, entry=entry)
        asked = {"query": "good?", "items": ["a film", "bad sound"], "label_token_ids": [5, 9]}

        found = score(scorer, **asked, instruction="Find what was liked")
        own = score(scorer_of(QWEN, entry=entry | {"instruction": "Find what was liked"}), **asked)
        default = score(scorer, **asked)
        same = score(scorer, **asked, instruction=PRESETS["qwen3-reranker"].instruction)

        prompts = [
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n<Instruct>: Find what was liked\n<Query>: good?\n"
            f"<Document>: {item}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
            for item in asked["items"]
        ]
        expected = [
            np.exp(reference.logprobs(reference.tokenizer(prompt).input_ids)[[5, 9]])
            for prompt in prompts
        ]
        assert_close(found.tensors["scores"], expected, tolerance=1e-6)
        assert_close(own.tensors["scores"], expected, tolerance=1e-6)
        assert not np.allclose(np.asarray(default.tensors["scores"]), expected, atol=1e-4)
        assert found.receipt["shared_prefix_items"] == 2
        assert same.receipt == default.receipt
        assert same.receipt["instruction_hash"] != found.receipt["instruction_hash"]
        assert found.receipt["fingerprint"] != own.receipt["fingerprint"]

    @pytest.mark.parametrize(
        "entry", [{}, {"template": "bge-reranker-v2-gemma"}, {"template": "{query} {item}"}]
    )
    def test_no_place_for_an_instruction(self, entry: dict[str, str], scorer_of: Scorers) -> None:
        """A request's is refused by name, an entry's at load, and no receipt speaks of one."""
        scorer = scorer_of(QWEN, entry=entry)
        asked = {"query": "q", "items": ["a"], "label_token_ids": [5]}

        with pytest.raises(InvalidRequestError, match="takes no instruction") as caught:
            score(scorer, **asked, instruction="judge")
        assert caught.value.param == "instruction"
        with pytest.raises(ModelLoadError, match="told nowhere"):
            scorer_of(QWEN, entry=entry | {"instruction": "judge"})
        assert "instruction_hash" not in score(scorer, **asked).receipt
        assert scorer.description.instruction is None

    def test_a_long_instruction_is_never_cut(self, scorer_of: Scorers) -> None:
        """Only the document gives way; where that is not enough the item fails, with numbers."""
        scorer = scorer_of(QWEN, entry={"template": "qwen3-reranker", "max_tokens": 400})
        asked = {"query": "q", "items": ["the end " * 300], "label_token_ids": [5]}
        told = "keep this " * 5

        kept = scorer.prepare(make_request(**asked, truncation="item", instruction=told))
        failed = scorer.prepare(make_request(**asked, truncation="item", instruction=told * 12))

        assert f": {told}\n" in scorer.prompter.tokenizer.decode(kept.sequences[0].ids)
        assert failed.items[0].error is not None
        assert failed.items[0].error.code == "input_too_long"

    def test_suffix_is_kept(self, scorer_of: Scorers) -> None:
        """Of a document far over the limit only the document is cut: query and suffix stay."""
        entry = {"template": "qwen3-reranker", "max_tokens": 400}
        scorer = scorer_of(QWEN, entry=entry)
        tokenizer = scorer.prompter.tokenizer
        document = "the plot holds to the end " * 800

        prepared = scorer.prepare(
            make_request(
                query="is it good?",
                items=[document],
                label_token_ids=[5],
                truncation=Truncation.ITEM,
            )
        )

        ids = prepared.sequences[0].ids
        text = tokenizer.decode(ids)
        head, _, tail = PRESETS["qwen3-reranker"].text.partition("{item}")
        assert len(ids) == 400
        assert text.endswith(tail)
        assert "<Query>: is it good?\n" in text
        assert text.startswith(head.partition("<Instruct>")[0])
        assert prepared.items[0].tokens.cut == prepared.items[0].tokens.given - 400


class TestChatTemplates:
    """Messages rendered with the tokenizer's own template."""

    def test_one_bos(self, scorer_of: Scorers, reference_of: References) -> None:
        """A chat template that begins with BOS gets no second one."""
        options = {"tokenizer": {"chat_template": CHAT}}
        scorer = scorer_of(LLAMA, entry={"chat_template": True, "instruction": "judge"}, **options)
        reference = reference_of(LLAMA, **options)

        prepared = scorer.prepare(make_request(query="good? ", items=["yes"], label_token_ids=[5]))

        text = "[system]judge[/][user]good? yes[/][assistant]"
        expected = reference.tokenizer(text).input_ids
        assert prepared.sequences[0].ids.tolist() == expected
        assert expected.count(reference.tokenizer.bos_token_id) == 1

    def test_with_a_template_of_its_own(self, scorer_of: Scorers) -> None:
        """The entry's template becomes the user's message."""
        entry = {"chat_template": True, "template": "{instruction}: {item} for {query}"}
        scorer = scorer_of(
            LLAMA, entry=entry | {"instruction": "rate"}, tokenizer={"chat_template": CHAT}
        )

        (rendered,) = scorer.prompter.render(
            make_request(query="q", items=["i"], label_token_ids=[5])
        )

        assert rendered.text == "<s>[user]rate: i for q[/][assistant]"
        assert rendered.shared == "<s>[user]rate: "

    @pytest.mark.parametrize(
        ("chat", "taken"),
        [
            (CHAT, True),
            ("{{ messages[-1].content }}", False),
            (
                "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
                "{{ messages[0].content }}",
                False,
            ),
        ],
        ids=["system", "dropped", "refused"],
    )
    def test_instruction_of_a_request(self, chat: str, *, taken: bool, scorer_of: Scorers) -> None:
        """It is the system's message, where the tokenizer's template has one."""
        scorer = scorer_of(LLAMA, entry={"chat_template": True}, tokenizer={"chat_template": chat})

        assert (scorer.description.instruction is None) is not taken
        if taken:
            request = make_request(query="q", items=["i"], labels=["a"], instruction="rate it")
            (rendered,) = scorer.prompter.render(request)
            assert "rate it" in rendered.text
            assert rendered.shared.endswith("q")

    def test_tokenizer_without_one(self, scorer_of: Scorers) -> None:
        """chat_template = true needs one."""
        with pytest.raises(ModelLoadError, match="no chat template"):
            scorer_of(LLAMA, entry={"chat_template": True})


class TestOwnTemplates:
    """A template in the registry entry."""

    def test_no_closing_token(self, scorer_of: Scorers) -> None:
        """A classifier's template ends with its own words, without a tokenizer's closing token."""
        name = "BertForSequenceClassification"
        scorer = scorer_of(name, entry={"template": "query: {query} item: {item} end"})

        (ids,) = (
            sequence.ids.tolist()
            for sequence in scorer.prepare(make_request(query="good", items=["film"])).sequences
        )

        tokenizer = scorer.prompter.tokenizer
        assert ids == tokenizer("query: good item: film end").input_ids[:-1]
        assert not scorer.description.pair

    def test_label_behind_the_suffix(self, scorer_of: Scorers, reference_of: References) -> None:
        """A text label is resolved where it is read: behind the template's last words."""
        scorer = scorer_of(LLAMA, entry={"template": "{item}. answer:"})

        found = score(scorer, items=["good " * 60], labels=[" the"])

        reference = reference_of(LLAMA)
        ids = reference.tokenizer("good " * 60 + ". answer:").input_ids
        (label,) = reference.tokenizer(" the", add_special_tokens=False).input_ids
        expected = np.exp(reference.logprobs(ids)[label])
        assert_close(np.asarray(found.tensors["scores"])[0, 0], expected, tolerance=1e-6)

    def test_refused(self, scorer_of: Scorers) -> None:
        """A template without an item, and item_first beside a template."""
        with pytest.raises(ModelLoadError, match="neither"):
            scorer_of(LLAMA, entry={"template": "qwen3-rerank"})
        scorer = scorer_of(LLAMA, entry={"template": "{item}. answer:"})
        with pytest.raises(InvalidRequestError, match="places query and item"):
            score(scorer, items=["a"], labels=[" the"], item_first=True)

    def test_token_ids(self, scorer_of: Scorers) -> None:
        """Token ids are used as they are, with a warning."""
        scorer = scorer_of(LLAMA, entry={"template": "{item}. answer:"})

        prepared = scorer.prepare(make_request(items=[[5, 6]], label_token_ids=[5]))

        assert prepared.sequences[0].ids.tolist() == [5, 6]
        assert "template" in prepared.warnings[0]
