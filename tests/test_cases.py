"""Every failure that others have had (cases.jsonl) is a test here, or is named as somebody's work.

``cases.jsonl`` is a copy of the project's list: id, source, what is given, what is expected.
"""

import ast
import functools
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

_ENGINE = "tests/engine"
#: case -> the tests of its kind
COVERED: dict[str, list[str]] = {
    "softmax-one-label": [
        f"{_ENGINE}/test_classification.py::TestActivations::test_softmax_of_one_label_is_refused",
        f"{_ENGINE}/test_classification.py::TestActivations::test_raw_logits_are_rows",
        "tests/contract/test_models.py::test_what_a_model_cannot_do_is_refused",
        "tests/e2e/test_cases.py::test_softmax_of_one_label",
    ],
    "multi-label": [
        f"{_ENGINE}/test_classification.py::TestActivations::test_multi_label_follows_the_checkpoint"
    ],
    "half-precision-ties": [
        f"{_ENGINE}/test_classification.py::test_sigmoid_keeps_the_order_of_close_logits",
        f"{_ENGINE}/test_classification.py::TestActivations::test_half_precision_does_not_tie",
    ],
    "softmax-shift": [f"{_ENGINE}/test_classification.py::test_softmax_is_centred"],
    "non-finite": [
        f"{_ENGINE}/test_classification.py::TestIsolation::test_non_finite_head",
        "tests/e2e/test_cases.py::test_a_head_that_yields_nan",
    ],
    "pad-equals-eos": [
        f"{_ENGINE}/test_classification.py::TestPooling::test_pad_token_inside_and_at_the_end",
        f"{_ENGINE}/test_classification.py::TestPooling::test_eos_in_text",
        f"{_ENGINE}/test_mutations.py::test_pooling_by_id_is_caught",
    ],
    "no-pad-token": [f"{_ENGINE}/test_classification.py::TestPooling::test_without_pad_token"],
    "left-padding-tokenizer": [
        f"{_ENGINE}/test_classification.py::TestPooling::test_left_padding_tokenizer",
        f"{_ENGINE}/test_property.py::test_classification",
    ],
    "double-bos": [
        f"{_ENGINE}/test_templates.py::TestChatTemplates::test_one_bos",
        f"{_ENGINE}/test_causal.py::TestPrompts::test_one_bos",
    ],
    "template-required": [f"{_ENGINE}/test_templates.py::TestPresets::test_refused_without"],
    "suffix-kept": [f"{_ENGINE}/test_templates.py::TestPresets::test_suffix_is_kept"],
    "too-long-default": [f"{_ENGINE}/test_truncation.py::test_too_long_by_default"],
    "batch-invariance": [f"{_ENGINE}/test_parity.py::test_batch_invariance"],
    "position-ids": [f"{_ENGINE}/test_parity.py::test_positions_do_not_depend_on_the_batch"],
    "item-empty": [
        f"{_ENGINE}/test_packing.py::TestMultiItem::test_empty_items",
        "tests/e2e/test_cases.py::test_empty_text_items",
    ],
    "query-empty": [f"{_ENGINE}/test_packing.py::TestMultiItem::test_empty_query"],
    "item-holds-delimiter": [f"{_ENGINE}/test_packing.py::TestMultiItem::test_any_token_may_occur"],
    "sliding-window": [
        f"{_ENGINE}/test_packing.py::TestMultiItem::test_sliding_window",
        f"{_ENGINE}/test_mutations.py::test_a_window_by_index_is_caught",
    ],
    "packing-leak": [f"{_ENGINE}/test_packing.py::TestMultiItem::test_no_leak"],
    "single-label-rows": [
        f"{_ENGINE}/test_classification.py::TestActivations::test_raw_logits_are_rows",
        "tests/e2e/test_canary.py::test_readiness_follows_the_canaries",
        "tests/e2e/test_cases.py::test_softmax_of_one_label",
    ],
    "added-token-label": [f"{_ENGINE}/test_causal.py::TestLabels::test_added_token"],
    "label-not-in-top": [f"{_ENGINE}/test_causal.py::TestLabels::test_improbable_label"],
    "repr-in-prompt": [
        "tests/contract/test_scores.py::test_bad_requests_name_the_field",
        "tests/e2e/test_cases.py::test_text_and_tokens_mixed",
    ],
    "reward-vector": [f"{_ENGINE}/test_rewards.py::test_qwen"],
    "missing-head": [
        f"{_ENGINE}/test_loader.py::TestWeights::test_base_model_as_classifier",
        f"{_ENGINE}/test_rewards.py::test_reward_without_head",
    ],
    "one-bad-item": ["tests/worker/test_isolation.py::test_one_of_64_jobs_raises"],
    "huge-document": [
        "tests/worker/test_isolation.py::test_a_huge_document_among_300",
        f"{_ENGINE}/test_truncation.py::test_huge_document",
    ],
    "empty-items": [
        f"{_ENGINE}/test_classification.py::TestIsolation::test_no_items",
        "tests/api/test_score.py::test_no_items_is_an_empty_answer",
    ],
    "handler-raises": [
        "tests/worker/test_main.py::test_an_exception_in_finishing_ends_the_job",
        "tests/worker/test_main.py::test_an_exception_in_encoding_ends_the_batch",
    ],
    "cancel-race": [
        "tests/worker/test_tasks.py::test_cancelled_while_being_written_stays_cancelled",
        "tests/storage/test_outcomes.py::test_cancelling_a_running_job_takes_its_result",
    ],
    "retry-post": [
        "tests/api/test_repeats.py::test_the_same_key_is_the_same_job",
        "tests/api/test_repeats.py::test_another_body_is_refused",
    ],
    "hidden-dtype": [
        f"{_ENGINE}/test_classification.py::TestHiddenStates::test_model_dtype",
        f"{_ENGINE}/test_encoding.py::test_any_reader_opens_it",
        "tests/api/test_results.py::test_hidden_states_are_a_file_in_the_models_dtype",
    ],
    "hidden-mixed": [f"{_ENGINE}/test_classification.py::TestHiddenStates::test_mixed_askers"],
}
#: case -> the issue that it belongs to: durability (4), webhooks (5), bulk (6)
LATER: dict[str, int] = {
    "duplicate-custom-id": 6,
    "all-failed-batch": 6,
    "quota-released": 6,
    "dead-receiver": 5,
    "failure-event": 5,
    "start-before-commit": 5,
}


def list_cases() -> list[str]:
    """Return the ids in the list's order."""
    lines = (ROOT / "tests" / "cases.jsonl").read_text().splitlines()
    return [json.loads(line)["id"] for line in lines]


@functools.cache
def list_tests(path: str) -> frozenset[str]:
    """Return the names of a module's tests, those of classes as ``Class::test``."""
    tree = ast.parse((ROOT / path).read_text())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}::{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return frozenset(found)


def test_no_case_is_forgotten() -> None:
    """Each id is tested or belongs to one later issue, and no id is made up."""
    cases = list_cases()

    assert len(set(cases)) == len(cases) == 39
    assert sorted([*COVERED, *LATER]) == sorted(cases)
    assert set(LATER.values()) <= {4, 5, 6}


@pytest.mark.parametrize("case", COVERED)
def test_the_tests_of_a_case_exist(case: str) -> None:
    """A test that is renamed or removed is missed here."""
    assert COVERED[case]
    for test in COVERED[case]:
        path, _, name = test.partition("::")
        assert name.rpartition("::")[2].startswith("test_")
        assert name in list_tests(path), test
