"""The keyword arguments of the client: fields of ``JobRequest`` and ``RerankRequest``, typed."""

from typing import TypedDict

from contract.jobs import Lane
from contract.scores import Activation, Determinism, Mode, Truncation, TruncationSide

__all__ = ["JobOptions", "RerankOptions"]


class JobOptions(TypedDict, total=False):
    """What may be said with the items; docs/http_api.md has a line on each."""

    model: str | None
    query: str | list[int] | None
    queries: list[str] | None
    instruction: str | None
    label_token_ids: list[int | list[int]] | None
    labels: list[str] | None
    apply_softmax: bool
    temperature: float
    item_first: bool
    return_token_logprobs: bool
    return_label_mass: bool
    return_pooled_hidden_states: bool
    activation: Activation | None
    truncation: Truncation
    truncation_side: TruncationSide | None
    max_tokens: int | None
    max_item_tokens: int | None
    multi_token: bool
    mode: Mode
    determinism: Determinism | None
    webhook: str | None
    webhook_events: list[str] | None
    priority: Lane | None
    metadata: dict[str, str] | None
    queue_deadline_s: float | None
    run_timeout_s: float | None
    expires_after_s: float | None


class RerankOptions(TypedDict, total=False):
    """What may be said of a reranking; docs/http_api.md has a line on each."""

    model: str | None
    instruction: str | None
    top_n: int | None
    return_documents: bool | None
    max_tokens_per_doc: int | None
    truncation: bool | None
    user: str | None
    priority: int | None
