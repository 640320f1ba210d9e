"""Who asks: from the API key to the tenant.

Never: says which part of a key was wrong, or takes a different time for it.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from gateway.errors import RequestRefused
from gateway.openai_errors import ApiError
from kvlease.handoff.messages import DEFAULT_TENANT, TenantId

_SCHEME = "bearer "


class Tenants:
    """The keys and whose they are. Without keys everybody is one tenant and none is asked for."""

    def __init__(self, api_keys: tuple[tuple[str, str], ...]) -> None:
        """`api_keys`: (key, tenant)."""
        self._tenants = tuple((key.encode(), TenantId(tenant)) for key, tenant in api_keys)

    def authenticate(self, headers: Mapping[str, str]) -> TenantId:
        """The tenant of a request. Raises RequestRefused (401)."""
        if not self._tenants:
            return DEFAULT_TENANT
        header = headers.get("authorization", "")
        if not header.lower().startswith(_SCHEME):
            _refuse("No API key was given; send it as 'Authorization: Bearer KEY'.", "missing_api_key")
        given = header[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")
        found = [tenant for key, tenant in self._tenants if hmac.compare_digest(key, given)]
        if not found:
            _refuse("The API key is not known here.", "invalid_api_key")
        return found[0]


def _refuse(message: str, code: str) -> None:
    raise RequestRefused(ApiError(401, message, code, headers=(("www-authenticate", "Bearer"),)))
