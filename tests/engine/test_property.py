"""Whatever is asked, in whatever company: the engine equals the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.scores import Activation, ScoreRequest
from tests.engine.helpers import assert_close, draw_ids, logits_of, make_request
from tests.reference import Reference
from worker.engine.forward import Backbone
from worker.engine.scorer import ModelScorer

Scorers = Callable[..., ModelScorer]
References = Callable[..., Reference]

CLASSIFIERS = [
    "LlamaForSequenceClassification",
    "Gemma2ForSequenceClassification",
    "GPT2ForSequenceClassification",
    "BertForSequenceClassification",
    "XLMRobertaForSequenceClassification",
    "DebertaV2ForSequenceClassification",
    "ModernBertForSequenceClassification",
]
CAUSALS = ["MistralForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"]
TOKENIZERS = [
    {"pad": pad, "padding_side": side} for pad in ("own", "eos", None) for side in ("left", "right")
]
LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=7)

#: one example is a whole batch; the fixtures are of the session
SETTINGS = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def run(scorer: ModelScorer, requests: list[ScoreRequest], *, packed: bool) -> list[Any]:
    """Score several jobs in one batch, packed where the model can and ``packed`` says so."""
    backbone: Backbone = scorer.network.backbone
    before = backbone.packed, scorer.network.sharing
    if before[0] and not packed:
        backbone.packed = scorer.network.sharing = False
        backbone.set_attention("eager")
    prepared = [scorer.prepare(request) for request in requests]
    sequences = [sequence for job in prepared for sequence in job.sequences]
    readings = iter(scorer.forward(sequences))
    found = [scorer.finish(job, [next(readings) for _ in job.sequences]) for job in prepared]
    if before[0] and not packed:
        backbone.packed, scorer.network.sharing = before
        backbone.set_attention("scorekeep_packed")
    return found


@given(
    architecture=st.sampled_from(CLASSIFIERS),
    tokenizer=st.sampled_from(TOKENIZERS),
    query=st.integers(0, 40),
    lengths=LENGTHS,
    neighbours=LENGTHS,
    activation=st.sampled_from(["none", "softmax", "sigmoid"]),
    item_first=st.booleans(),
    packed=st.booleans(),
    seed=st.integers(0, 5),
)
@SETTINGS
@pytest.mark.timeout(300)
def test_classification(  # noqa: PLR0917
    scorer_of: Scorers,
    reference_of: References,
    architecture: str,
    tokenizer: dict[str, Any],
    query: int,
    lengths: list[int],
    neighbours: list[int],
    activation: str,
    item_first: bool,
    packed: bool,
    seed: int,
) -> None:
    """Logits within 1e-4 and scores within 1e-5 of one sequence at a time in plain transformers."""
    decoder = architecture.startswith(("Llama", "Gemma2", "GPT2"))
    options = {"tokenizer": tokenizer} if decoder else {}
    scorer, reference = scorer_of(architecture, **options), reference_of(architecture, **options)
    (prefix,) = draw_ids(query, seed=seed)
    items = draw_ids(*lengths, seed=seed + 1)
    request = make_request(
        query=prefix, items=items, activation=Activation(activation), item_first=item_first
    )
    other = make_request(query=prefix, items=draw_ids(*neighbours, seed=seed + 2))

    found = run(scorer, [request, other], packed=packed)[0]

    for index, item in enumerate(items):
        ids = item + prefix if item_first else prefix + item
        if not ids:
            assert index in {error.index for error in found.errors}
            continue
        expected = reference.logits(ids)
        assert_close(logits_of(found)[index], expected, tolerance=1e-4)
        assert_close(found.tensors["scores"][index], apply(expected, activation), tolerance=1e-5)


@given(
    architecture=st.sampled_from(CAUSALS),
    query=st.integers(0, 40),
    lengths=LENGTHS,
    labels=st.lists(st.integers(0, 383), min_size=1, max_size=5, unique=True),
    softmax=st.booleans(),
    mass=st.booleans(),
    packed=st.booleans(),
    seed=st.integers(0, 5),
)
@SETTINGS
@pytest.mark.timeout(300)
def test_causal(  # noqa: PLR0917
    scorer_of: Scorers,
    reference_of: References,
    architecture: str,
    query: int,
    lengths: list[int],
    labels: list[int],
    softmax: bool,
    mass: bool,
    packed: bool,
    seed: int,
) -> None:
    """Probabilities within 1e-5, over the labels or over the vocabulary."""
    scorer, reference = scorer_of(architecture), reference_of(architecture)
    (prefix,) = draw_ids(query, seed=seed)
    items = draw_ids(*lengths, seed=seed + 1)
    request = make_request(
        query=prefix,
        items=items,
        label_token_ids=[*labels],
        apply_softmax=softmax,
        temperature=1.7 if softmax else 1.0,
        return_label_mass=mass,
    )

    (found,) = run(scorer, [request], packed=packed)

    for index, item in enumerate(items):
        if not prefix + item:
            continue
        expected = reference.logprobs(prefix + item)[labels]
        scores = apply(expected / 1.7, "softmax") if softmax else np.exp(expected)
        assert_close(found.tensors["scores"][index], scores, tolerance=1e-5)


def apply(logits: Any, activation: str) -> Any:
    """The activations, written once more."""
    if activation == "softmax":
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()
    return 1 / (1 + np.exp(-logits)) if activation == "sigmoid" else logits
