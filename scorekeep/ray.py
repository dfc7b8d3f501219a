"""The engine for a cluster that runs Ray already: a class for Ray Data's ``map_batches``.

``pip install 'scorekeep[ray]'``. The only module of this package that loads the engine: whoever
imports it wants to score in this very process, without a service.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow

from contract.errors import ScoreError
from contract.models import ModelConfig
from contract.rows import RowReader, check_columns, result_schema
from contract.scores import ItemError, ScoreRequest
from worker.engine.seam import JobScores, PreparedJob, Reading, Scorer
from worker.engine.seam import Sequence as TokenSequence
from worker.isolation import Failure, MemoryLimits, forward_isolated
from worker.loading import create_engine

__all__ = ["Score", "number_lines"]

_MAX_ITEMS = 10_000
_HIDDEN = "hidden_states"


class Score:
    """Scores batches of rows: ``dataset.map_batches(Score, batch_format="pyarrow", …)``.

    Rows are those of a bulk: ``item`` or ``items``, ``custom_id`` or ``id``, and fields of a score
    request; ``columns`` maps other names to ``item``, ``query`` and ``id``; a column ``line`` is
    passed on. Out come the columns of a bulk's Parquet results, one row per item; a row that cannot
    be scored says why. ``hidden_states`` adds a column of them.

    ``config`` are the fields of a model's table in ``scorekeep.toml``. An actor loads the model
    once; give it its GPU with ``num_gpus=1``.
    """

    def __init__(
        self,
        model: str,
        config: Mapping[str, Any],
        *,
        parameters: Mapping[str, Any] | None = None,
        columns: Mapping[str, str] | None = None,
        hidden_states: bool = False,
        batch_tokens: int = 4096,
    ) -> None:
        check_columns(columns or {})
        self._columns = dict(columns or {})
        self._rows = RowReader(columns=self._columns, parameters=parameters or {})
        self._hidden = hidden_states
        self._scorer = create_engine().load_model(model, msgspec.convert(config, ModelConfig))
        self._limits = MemoryLimits(batch_tokens)
        self._schema = result_schema(pyarrow)
        if hidden_states:
            column = pyarrow.field(_HIDDEN, pyarrow.list_(pyarrow.float32()))
            self._schema = self._schema.append(column)

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """Score one batch of rows."""
        lines = [
            self._prepare(number, row) for number, row in enumerate(batch.to_pylist(), start=1)
        ]
        prepared = [line.prepared for line in lines if line.prepared is not None]
        answers = _run(self._scorer, prepared, self._limits)
        results = []
        for line in lines:
            if line.prepared is None:
                results.append(line.render([], None, [line.error]))
                continue
            count = len(line.prepared.sequences)
            mine, answers = answers[:count], answers[count:]
            scores = self._scorer.finish(line.prepared, mine)
            hidden = scores.tensors.get(_HIDDEN)
            results.append(line.render(_list_rows(scores), hidden, scores.errors))
        rows = [row for result in results for row in result]
        return pyarrow.Table.from_pylist(rows, schema=self._schema)

    def _prepare(self, position: int, row: dict[str, Any]) -> "_Line":
        given = {name: value for name, value in row.items() if value is not None}
        line = given.get("line") if self._columns else given.pop("line", None)
        number = line or position
        told = str(given.get("custom_id", given.get("id", f"line-{number}")))
        made = _Line(line, told, self._scorer.description.name)
        try:
            made.custom_id, request = self._rows.read(number, given)
            made.prepared = self._scorer.prepare(self._complete(request))
        except ScoreError as error:
            made.error = ItemError(0, error.code, error.message)
        return made

    def _complete(self, request: ScoreRequest) -> ScoreRequest:
        name = self._scorer.description.name
        changed = msgspec.structs.replace(
            request, model=name, return_pooled_hidden_states=self._hidden
        )
        return changed.check(max_items=_MAX_ITEMS)


def number_lines(dataset: Any) -> Any:  # noqa: ANN401  # ray.data.Dataset
    """Return a Ray dataset with a column ``line`` that counts its rows from 1, in their order."""
    import ray  # noqa: PLC0415  # only who has a dataset has it

    numbers = ray.data.range(dataset.count()).map_batches(_count_from_one, batch_format="pyarrow")
    return dataset.zip(numbers)


def _count_from_one(batch: pyarrow.Table) -> pyarrow.Table:
    return pyarrow.table({"line": [number + 1 for number in batch.column("id").to_pylist()]})


class _Line:
    """One row on its way; either prepared or refused."""

    def __init__(self, line: int | None, custom_id: str, model: str) -> None:
        self.custom_id = custom_id
        self.prepared: PreparedJob | None = None
        self.error = ItemError(0, "", "")
        self._line = line
        self._model = model

    def render(
        self,
        rows: Sequence[list[float]],
        hidden: Any,  # noqa: ANN401  # a tensor of either kind
        errors: Sequence[ItemError],
    ) -> list[dict[str, Any]]:
        """Return one row per item; a refused line has one, with its error."""
        failed = {error.index: error for error in errors}
        base = {"line": self._line, "custom_id": self.custom_id, "model": self._model}
        made = []
        for index in range(len(rows) or len(errors)):
            error = failed.get(index)
            row: dict[str, Any] = base | {"item": index}
            if error is not None:
                row |= {"error_code": error.code, "error_message": error.message}
            else:
                row["scores"] = rows[index]
                row[_HIDDEN] = None if hidden is None else hidden[index].tolist()
            made.append(row)
        return made


def _list_rows(scores: JobScores) -> list[list[float]]:
    table = scores.tensors["scores"].tolist()
    return [row[:count] for row, count in zip(table, scores.label_counts, strict=True)]


def _run(
    scorer: Scorer, jobs: Sequence[PreparedJob], limits: MemoryLimits
) -> list[Reading | ItemError]:
    """Put all sequences through the model, longest first, and return an answer for each."""
    sequences = [sequence for job in jobs for sequence in job.sequences]
    answers: dict[int, Reading | ItemError] = {}
    for part in _split(scorer.description.name, sequences, limits):
        found = forward_isolated(scorer, [sequences[index] for index in part], limits)
        for index, answer in zip(part, found, strict=True):
            answers[index] = _name_failure(answer) if isinstance(answer, Failure) else answer
    return [answers[index] for index in range(len(sequences))]


def _split(
    name: str, sequences: Sequence[TokenSequence], limits: MemoryLimits
) -> Iterator[list[int]]:
    """Yield what goes through the model together: shared prefixes side by side, longest first."""
    costs = [sequence.cost_tokens for sequence in sequences]
    order = sorted(range(len(costs)), key=lambda index: (sequences[index].group, costs[index]))
    part: list[int] = []
    tokens = longest = 0
    for index in reversed(order):
        longest, tokens = max(longest, costs[index]), tokens + costs[index]
        if part and tokens > limits.limit(name, longest):
            yield part
            part, longest, tokens = [], costs[index], costs[index]
        part.append(index)
    if part:
        yield part


def _name_failure(failure: Failure) -> ItemError:
    return ItemError(0, failure.error.code, failure.error.message)
