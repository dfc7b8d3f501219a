"""Every setting, read from ``SCOREKEEP_…`` in the environment: the only place for them.

A component takes what it needs from ``Settings``; nothing else reads the environment.
"""

import os
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any

import msgspec

from contract.errors import SettingsError
from contract.limits import TenantLimits

__all__ = ["PREFIX", "Settings", "default_api_key", "is_loopback", "load_settings"]

PREFIX = "SCOREKEEP_"

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Count = Annotated[int, msgspec.Meta(gt=0)]
_Amount = Annotated[int, msgspec.Meta(ge=0)]  # 0: without a limit
_MISSED_HEARTBEATS = 3


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings with their defaults; docs/configuration.md has a line on each.

    Durations are in seconds, sizes in bytes or tokens, as their names say.
    """

    data_dir: str = ".scorekeep"
    config: str | None = None
    database_url: str = ""
    blob_url: str = ""
    redis_url: str = "redis://127.0.0.1:6379/0"
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    public_url: str = ""
    log_level: str = "INFO"
    log_format: str = "text"

    auth: str = ""
    api_key: str = ""
    header_timeout_s: _Positive = 10.0
    body_timeout_s: _Positive = 15.0
    queue_tokens: _Amount = 2_000_000_000
    tenant_requests_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    tenant_queued_jobs: _Amount = 1_000_000
    tenant_queued_tokens: _Amount = 1_000_000_000
    tenant_running_tokens: _Amount = 0
    tenant_stored_bytes: _Amount = 0
    tenant_open_bulks: _Amount = 100
    tenant_webhook_endpoints: _Amount = 100

    max_body_bytes: _Count = 32 * 1024 * 1024
    max_items: _Count = 10_000
    max_job_tokens: Annotated[int, msgspec.Meta(gt=0, le=2**31 - 1)] = 100_000_000
    max_scores: _Count = 1_000_000
    max_file_bytes: _Count = 8 * 1024**3
    max_line_bytes: _Count = 1024 * 1024
    max_reported_lines: _Count = 100
    bulk_input_urls: str = ""
    max_wait_s: _Positive = 60.0
    default_wait_s: _Positive = 30.0

    database_timeout_s: _Positive = 5.0
    lease_s: _Positive = 30.0
    heartbeat_s: _Positive = 10.0
    sweep_s: _Positive = 2.0
    batch_tokens: _Count = 4096
    claim_jobs: _Count = 256
    batch_deadline_s: _Positive = 600.0
    prepare_timeout_s: _Positive = 60.0
    slow_job_s: _Positive = 10.0
    max_attempts: _Count = 5
    max_crashes: _Count = 3
    drain_s: _Positive = 60.0
    result_ttl_s: Annotated[float, msgspec.Meta(ge=0, le=10 * 365 * 86400)] = 0.0
    canary_s: _Positive = 300.0

    webhook_allow_http: bool = False
    webhook_allowed_networks: str = ""
    webhook_timeout_s: _Positive = 15.0
    webhook_concurrency: _Count = 64
    webhook_endpoint_concurrency: _Count = 8

    crash_at: str = ""

    @property
    def database(self) -> str:
        """The SQLAlchemy URL: ``database_url``, or SQLite in the data folder."""
        return (
            self.database_url
            or f"sqlite+aiosqlite:///{Path(self.data_dir).absolute()}/scorekeep.db"
        )

    @property
    def blobs(self) -> str:
        """The blob store's URL: ``blob_url``, or a folder in the data folder."""
        return self.blob_url or f"file://{Path(self.data_dir).absolute()}/blobs"

    @property
    def alive_within_s(self) -> float:
        """How old a worker's last heartbeat may be for it to count as alive."""
        return _MISSED_HEARTBEATS * self.heartbeat_s

    @property
    def requires_keys(self) -> bool:
        """Whether requests need a key: as ``auth`` says, else wherever others can reach us."""
        return self.auth == "required" or (self.auth == "" and not is_loopback(self.host))

    @property
    def tenant_limits(self) -> TenantLimits:
        """What a tenant may have and do that has no limits of its own."""
        return TenantLimits(
            requests_per_s=self.tenant_requests_per_s,
            queued_jobs=self.tenant_queued_jobs,
            queued_tokens=self.tenant_queued_tokens,
            running_tokens=self.tenant_running_tokens,
            stored_bytes=self.tenant_stored_bytes,
            open_bulks=self.tenant_open_bulks,
            webhook_endpoints=self.tenant_webhook_endpoints,
            body_bytes=self.max_body_bytes,
            items=self.max_items,
        )

    @property
    def allowed_networks(self) -> list[IPv4Network | IPv6Network]:
        """The subnets that webhooks may reach although they are not public."""
        return [
            ip_network(part.strip())
            for part in self.webhook_allowed_networks.split(",")
            if part.strip()
        ]


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches ``host``. A name but localhost may be anything."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def default_api_key() -> str | None:
    """Return the key that a client uses where its caller gives none."""
    return os.environ.get(f"{PREFIX}API_KEY") or None


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from ``environment`` (default: the process's).

    Raises ``SettingsError`` that names every variable that is unknown or wrong.
    """
    source = os.environ if environment is None else environment
    fields = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    values: dict[str, Any] = {}
    faults: list[str] = []
    for variable, raw in sorted(source.items()):
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in fields:
            faults.append(f"{variable}: there is no such setting")
            continue
        try:
            values[name] = msgspec.convert(
                _parse_word(raw, fields[name]), fields[name], strict=False
            )
        except msgspec.ValidationError as error:
            faults.append(f"{variable}={raw!r}: {error}")  # numbers and switches: no secrets
    faults += _check_together(values)
    if faults:
        raise SettingsError("; ".join(faults))
    return Settings(**values)


def _parse_word(raw: str, kind: object) -> str | bool:
    if kind is bool and raw.strip().lower() in {"1", "true", "yes", "on"}:
        return True
    if kind is bool and raw.strip().lower() in {"0", "false", "no", "off", ""}:
        return False
    return raw


def _check_together(values: Mapping[str, Any]) -> list[str]:
    faults = []
    if values.get("log_format", "text") not in {"text", "json"}:
        faults.append(f"{PREFIX}LOG_FORMAT: use text or json")
    if values.get("auth", "") not in {"", "required", "off"}:
        faults.append(f"{PREFIX}AUTH: use required or off")
    if values.get("log_level", "INFO") not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        faults.append(f"{PREFIX}LOG_LEVEL: use DEBUG, INFO, WARNING or ERROR")
    for part in str(values.get("webhook_allowed_networks", "")).split(","):
        try:
            if part.strip():
                ip_network(part.strip())
        except ValueError as error:
            faults.append(f"{PREFIX}WEBHOOK_ALLOWED_NETWORKS: {error}")
    if values.get("heartbeat_s", 10.0) * 2 >= values.get("lease_s", 30.0):
        faults.append(f"{PREFIX}HEARTBEAT_S: must be less than half of {PREFIX}LEASE_S")
    return faults
