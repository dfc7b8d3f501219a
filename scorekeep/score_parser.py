"""The options that say how to score: for one job, a bulk, or a re-score alike."""

import argparse

from contract.scores import Activation, Truncation
from scorekeep.options import JobOptions

__all__ = ["fill_parameters", "read_parameters"]


def fill_parameters(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--instruction", metavar="TEXT", help="the task, for models whose template takes one"
    )
    parser.add_argument(
        "--label",
        dest="labels",
        action="append",
        help="causal models: a label of one token, often with a space before it; repeat it",
    )
    parser.add_argument(
        "--label-token-id",
        dest="label_token_ids",
        action="append",
        type=int,
        metavar="ID",
        help="causal models: a label by its token id; repeat it",
    )
    parser.add_argument("--softmax", action="store_true", help="make each row sum to 1")
    parser.add_argument("--activation", choices=[str(each) for each in Activation])
    parser.add_argument(
        "--truncation",
        choices=[str(each) for each in Truncation],
        help="what to cut from an input that is too long (default: error, that item fails)",
    )


def read_parameters(options: argparse.Namespace) -> JobOptions:
    """Return only what was given: what is left out has the service's defaults."""
    chosen = JobOptions()
    if options.instruction is not None:
        chosen["instruction"] = options.instruction
    if options.labels is not None:
        chosen["labels"] = options.labels
    if options.label_token_ids is not None:
        chosen["label_token_ids"] = options.label_token_ids
    if options.softmax:
        chosen["apply_softmax"] = True
    if options.activation is not None:
        chosen["activation"] = Activation(options.activation)
    if options.truncation is not None:
        chosen["truncation"] = Truncation(options.truncation)
    return chosen
