"""What stands around query and item: templates, chat templates, and presets of known rerankers.

The only place that knows a model card's words. A template is rendered to one string, and the
places of query and item in it are kept, so that only they can ever be cut.
"""

import re
from dataclasses import dataclass

from jinja2 import TemplateError

from contract.errors import ModelLoadError
from contract.models import ModelConfig
from worker.engine.foreign import Tokenizer

__all__ = ["NONE", "PRESETS", "Rendered", "Span", "Template", "find_template"]

#: the entry's word for "no template, and I know that the model card asks for one"
NONE = "none"

_FIELD = re.compile(r"\{(query|item|instruction)\}")
#: stand in for query and item while a chat template is rendered once
_MARKS = {name: f"\ue000{name}\ue001" for name in ("query", "item", "instruction")}
_INSTRUCTION = "{instruction}"


@dataclass(frozen=True, slots=True)
class Preset:
    """A reranker whose model card demands a template; ``pattern`` recognises its name.

    ``line`` is how an instruction stands in ``text``, which without one has nothing in its place.
    """

    pattern: str
    text: str
    instruction: str
    labels: tuple[str, ...]
    line: str = _INSTRUCTION


PRESETS: dict[str, Preset] = {
    "qwen3-reranker": Preset(
        pattern=r"qwen3-reranker",
        text=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n"
            "<Document>: {item}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ),
        instruction="Given a web search query, retrieve relevant passages that answer the query",
        labels=("yes", "no"),
    ),
    "mxbai-rerank-v2": Preset(
        pattern=r"mxbai-rerank-[a-z]+-v2",
        text=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
            "assistant.<|im_end|>\n<|im_start|>user\n{instruction}query: {query}\n"
            "document: {item}\nYou are a search relevance expert who evaluates how well documents "
            "match search queries. For each query-document pair, carefully analyze the semantic "
            "relationship between them, then provide your binary relevance judgment (0 for not "
            "relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n"
        ),
        instruction="",
        labels=("1", "0"),
        line="instruction: {instruction}\n",
    ),
    "bge-reranker-v2-gemma": Preset(
        pattern=r"bge-reranker-v2-gemma",
        text=(
            "A: {query}\nB: {item}\nGiven a query A and a passage B, determine whether the "
            "passage contains an answer to the query by providing a prediction of either 'Yes' "
            "or 'No'."
        ),
        instruction="",
        labels=("Yes",),
    ),
}


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``begin`` to ``end`` of a rendered text; ``part`` is 0 for query, 1 for item."""

    begin: int
    end: int
    part: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """One sequence's text and where its parts are; ``pair`` is a pair model's second text."""

    text: str
    spans: tuple[Span, ...]
    pair: str | None = None

    @property
    def shared(self) -> str:
        """What comes before the item: all sequences of a request begin with it."""
        return self.text[: min((span.begin for span in self.spans if span.part), default=0)]


@dataclass(frozen=True, slots=True)
class Template:
    """Literals and fields in order: ``pieces``, and ``instructed`` where there is an instruction.

    ``instructed`` is empty where none is taken; ``instruction`` stands where a request brings none.
    ``labels`` are a preset's own, ``name`` is for the receipt.
    """

    name: str
    pieces: tuple[str, ...]
    labels: tuple[str, ...] = ()
    instructed: tuple[str, ...] = ()
    instruction: str = ""

    def render(self, query: str, item: str, instruction: str | None = None) -> Rendered:
        """Fill in query, item and instruction."""
        told = self.instruction if instruction is None else instruction
        given = {"{query}": query, "{item}": item, _INSTRUCTION: told}
        text = ""
        spans = []
        for piece in self.instructed if told and self.instructed else self.pieces:
            filled = given.get(piece, piece)
            if piece in {"{query}", "{item}"}:
                spans.append(Span(len(text), len(text) + len(filled), int(piece == "{item}")))
            text += filled
        return Rendered(text, tuple(spans))


def find_template(
    name: str, config: ModelConfig, tokenizer: Tokenizer, names: tuple[str, ...]
) -> Template | None:
    """Return the template that ``config`` asks for, or None.

    ``names`` are what the checkpoint is called. Raises ``ModelLoadError`` for a template without
    its fields, and for a reranker that demands one while the entry says nothing.
    """
    if config.template in {None, NONE} and not config.chat_template:
        if config.template is None:
            _check_demand(name, names)
        _check_place(name, config.instruction)
        return None
    preset = PRESETS.get(config.template or "")
    text = "{query}{item}" if config.template in {None, NONE} else config.template or ""
    if preset is not None:
        text = preset.text
    elif "{item}" not in text:
        message = (
            f'{name}: template = "{text}" is neither one of {NONE}, {", ".join(PRESETS)} nor a '
            "text that holds {item}"
        )
        raise ModelLoadError(message)
    if config.chat_template and preset is None:
        plain, instructed = _render_chats(name, tokenizer, text)
    else:
        line = preset.line if preset else _INSTRUCTION
        plain, instructed = text.replace(_INSTRUCTION, ""), text.replace(_INSTRUCTION, line)
    if _INSTRUCTION not in instructed:
        instructed = ""
    default = preset.instruction if preset else ""
    chosen = default if config.instruction is None else config.instruction
    if not instructed:
        _check_place(name, chosen)
    label = config.template if preset else "chat" if config.chat_template else "own"
    return Template(
        name=str(label),
        pieces=_split(plain),
        labels=preset.labels if preset else (),
        instructed=_split(instructed),
        instruction=chosen,
    )


def _split(text: str) -> tuple[str, ...]:
    parts = enumerate(_FIELD.split(text))
    return tuple(f"{{{part}}}" if index % 2 else part for index, part in parts if part)


def _render_chats(name: str, tokenizer: Tokenizer, text: str) -> tuple[str, str]:
    """Return the conversation without an instruction, and with one where it can be told.

    The instruction is the system's message unless the text has a place for it.
    """
    if tokenizer.chat_template is None:
        message = f"{name}: chat_template = true, but the tokenizer has no chat template"
        raise ModelLoadError(message)
    user = {"role": "user", "content": text.replace(_INSTRUCTION, "")}
    plain = _render_chat(tokenizer, [user])
    if _INSTRUCTION in text:
        return plain, _render_chat(tokenizer, [{"role": "user", "content": text}])
    try:
        told = _render_chat(tokenizer, [{"role": "system", "content": _INSTRUCTION}, user])
    except TemplateError:  # some refuse messages of the system
        told = ""
    return plain, told


def _render_chat(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    marked = [
        {**message, "content": _FIELD.sub(lambda found: _MARKS[found[1]], message["content"])}
        for message in messages
    ]
    rendered: str = tokenizer.apply_chat_template(
        marked, tokenize=False, add_generation_prompt=True
    )
    for field, mark in _MARKS.items():
        rendered = rendered.replace(mark, f"{{{field}}}")
    return rendered


def _check_place(name: str, instruction: str | None) -> None:
    if instruction:
        message = (
            f'{name}: instruction = "{instruction}" is told nowhere: its template has no '
            "{instruction}, and no chat template takes it"
        )
        raise ModelLoadError(message)


def _check_demand(name: str, names: tuple[str, ...]) -> None:
    for preset, known in PRESETS.items():
        if any(re.search(known.pattern, given, re.IGNORECASE) for given in names):
            message = (
                f"{name}: this reranker's model card demands a template, and without it its "
                f'scores are wrong. Write template = "{preset}" in [models.{name}], or '
                f'template = "{NONE}" where the requests bring it'
            )
            raise ModelLoadError(message)
