"""An independent slow reference: one sequence at a time, plain transformers, fp32.

It knows nothing of the engine: it calls the stock model on one unpadded sequence and applies
activations by hand. Every parity test is held against it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

__all__ = ["Reference"]


class Reference:
    """A checkpoint as plain transformers runs it; heads by hand where positions matter."""

    def __init__(self, folder: Path, *, causal: bool) -> None:
        kind: Any = (
            transformers.AutoModelForCausalLM
            if causal
            else transformers.AutoModelForSequenceClassification
        )
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def logits(self, ids: list[int], types: list[int] | None = None) -> np.ndarray[Any, Any]:
        """Return a classifier's logits for one sequence, or a causal model's at its last token.

        A decoder with a linear head is run by hand, because transformers pools by the pad id.
        """
        given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        if types is not None:
            given["token_type_ids"] = torch.tensor([types])
        with torch.no_grad():
            if hasattr(self.model, "score"):
                backbone = getattr(self.model, self.model.base_model_prefix)
                row = self.model.score(backbone(**given).last_hidden_state[0, -1])
            else:
                logits = self.model(**given).logits
                row = logits[0, -1] if logits.dim() == 3 else logits[0]
        found: np.ndarray[Any, Any] = row.numpy().astype(np.float64)
        return found

    def hidden(self, ids: list[int], *, row: int) -> np.ndarray[Any, Any]:
        """Return the backbone's last hidden state of one position."""
        backbone = getattr(self.model, self.model.base_model_prefix)
        with torch.no_grad():
            states = backbone(input_ids=torch.tensor([ids])).last_hidden_state
        found: np.ndarray[Any, Any] = states[0, row].numpy()
        return found

    def logprobs(self, ids: list[int]) -> np.ndarray[Any, Any]:
        """Return next-token log-probabilities after ``ids``, in float64."""
        logits = self.logits(ids)
        shifted = logits - logits.max()
        found: np.ndarray[Any, Any] = shifted - np.log(np.exp(shifted).sum())
        return found
