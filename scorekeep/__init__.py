"""What users import and type; knows only the contract and HTTP."""

from contract.webhooks import verify as verify_webhook
from scorekeep.blocking import Client
from scorekeep.client import AsyncClient

__all__ = ["AsyncClient", "Client", "verify_webhook"]
