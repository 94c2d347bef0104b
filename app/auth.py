"""Who is calling: from an `Authorization: Bearer KEY` header to a tenant. A server without keys is open to all."""

from __future__ import annotations

from cache_service.tenants import Tenant, TenantRegistry
from deployments.errors import AuthenticationError


class Authenticator:
    """One per ingress replica."""

    def __init__(self, registry: TenantRegistry) -> None:
        self._registry = registry

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant behind a header. Raises AuthenticationError."""
        tenant = self._registry.authenticate(_bearer_key(authorization))
        if tenant is not None:
            return tenant
        if _bearer_key(authorization) is None:
            raise AuthenticationError(
                "No API key was given; send it as `Authorization: Bearer KEY`.", code="missing_api_key"
            )
        raise AuthenticationError("The API key is not known to this server.")


def _bearer_key(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None
