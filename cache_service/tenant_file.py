"""Where tenants are written down: a YAML or JSON file, or an environment variable. The only reader of either.

tenants:
  - name: acme
    key_hashes: ["sha256:…"]        # `python -m cache_service hash-key` makes one
    share_group: labs               # optional: common cache entries with others of the group
    limits: {requests_per_minute: 600, max_concurrent_requests: 32, max_image_bytes: 20000000}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cache_service.tenants import TenantRegistry

KEYS_VARIABLE = "SIGHTLINE_API_KEYS"
"""The document as JSON, or plain keys separated by commas, which all belong to the tenant `default`."""


def load_tenants(path: str | None = None, environment: Mapping[str, str] | None = None) -> TenantRegistry:
    """Tenants of the file, else of the environment variable, else an open registry.

    Raises:
        ValueError: Both are given, or what was given cannot be used. Names the option, never a key.
    """
    variable = (environment or {}).get(KEYS_VARIABLE, "").strip()
    if path is not None and variable:
        raise ValueError(f"tenants come from a file or from {KEYS_VARIABLE}, not from both")
    if path is not None:
        return TenantRegistry.from_mapping(_read(path))
    return TenantRegistry.from_mapping(_parse_variable(variable)) if variable else TenantRegistry()


def _read(path: str) -> Mapping[str, Any]:
    try:
        document = yaml.safe_load(Path(path).read_text("utf-8"))  # JSON is YAML, too
    except OSError as error:
        raise ValueError(f"the tenant file cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ValueError("the tenant file is neither YAML nor JSON") from None  # the parser's words would quote keys
    return _as_document(document)


def _parse_variable(text: str) -> Mapping[str, Any]:
    if not text.startswith("{"):
        keys = [key.strip() for key in text.split(",") if key.strip()]
        return {"tenants": [{"name": "default", "keys": keys}]}
    try:
        return _as_document(json.loads(text))
    except json.JSONDecodeError:
        raise ValueError(f"{KEYS_VARIABLE} starts like JSON, but is none") from None


def _as_document(document: object) -> Mapping[str, Any]:
    if not isinstance(document, Mapping):
        raise ValueError("a tenant document is a mapping with the key `tenants`")
    if not document.get("tenants"):
        # An empty file must not silently mean an open server.
        raise ValueError("the tenant document names no tenants; leave the option out for an open server")
    return document
