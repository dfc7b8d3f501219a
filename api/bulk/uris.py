"""Inputs by URI, only from stores that the settings allow: nobody reads what is not theirs."""

from urllib.parse import urlsplit

from contract.config import Settings
from contract.errors import InvalidRequestError
from storage.blobs import BlobStore

__all__ = ["open_uri"]


def open_uri(uri: str, settings: Settings) -> tuple[BlobStore, str]:
    """Return the store and the key of ``uri``.

    ``bulk_input_urls`` lists the allowed prefixes, separated by spaces; their queries carry what
    the store needs. Raises ``InvalidRequestError`` for any other URI.
    """
    for allowed in settings.bulk_input_urls.split():
        prefix = urlsplit(allowed)._replace(query="", fragment="").geturl().rstrip("/") + "/"
        key = uri.removeprefix(prefix)
        if uri.startswith(prefix) and _is_plain(key):
            return BlobStore.open(allowed), key
    message = "the URI is outside of the stores that the setting bulk_input_urls allows"
    raise InvalidRequestError(message, param="input_uri")


def _is_plain(key: str) -> bool:
    parts = key.split("/")
    return not any(part in {"", ".", ".."} for part in parts) and not set("?#%\\") & set(key)
