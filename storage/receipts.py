"""Receipts: what produced a result, stored once for all the jobs it was the same for."""

from collections.abc import Mapping

from sqlalchemy import select

from storage.database import Transaction
from storage.statements import execute
from storage.tables import receipts

__all__ = ["get_receipt", "put_receipts"]

_PUT = """
INSERT INTO receipts (hash, body, created_at) VALUES (:hash, :body, {now})
ON CONFLICT DO NOTHING
"""


async def put_receipts(tx: Transaction, bodies: Mapping[str, bytes]) -> None:
    """Store each body under its hash; one that is there stays."""
    # In order, so that two transactions with the same new receipts do not wait for each other.
    for digest, body in sorted(bodies.items()):
        await execute(tx, _PUT, {"hash": digest, "body": body})


async def get_receipt(tx: Transaction, digest: str) -> bytes | None:
    """Return the receipt, or none."""
    query = select(receipts.c.body).where(receipts.c.hash == digest)
    body: bytes | None = (await tx.execute(query)).scalar_one_or_none()
    return body
