"""What a checkpoint can do, found out by loading it: ``python -m worker.checking``.

Takes a registry entry as JSON, prints the model's description as JSON; a checkpoint that cannot be
served is a finding on standard output too, and exit code 1.
"""

import argparse
import sys

import msgspec

from contract.errors import ModelLoadError
from contract.findings import Finding
from contract.models import ModelConfig, ModelDescription
from worker.loading import create_engine

__all__ = ["check_model"]


def check_model(name: str, config: ModelConfig) -> ModelDescription | Finding:
    """Return what the checkpoint can do, or why it cannot be served."""
    try:
        return create_engine().load_model(name, config).description
    except ModelLoadError as error:
        return Finding(part=name, ok=False, detail=error.message)


def main() -> int:
    """Check one entry."""
    parser = argparse.ArgumentParser(prog="worker.checking", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("entry", help="a registry entry as JSON")
    options = parser.parse_args()
    found = check_model(options.name, msgspec.json.decode(options.entry, type=ModelConfig))
    sys.stdout.write(msgspec.json.encode(found).decode())
    return 1 if isinstance(found, Finding) else 0


if __name__ == "__main__":
    sys.exit(main())
