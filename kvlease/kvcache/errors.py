"""Errors of the KV cache.

    KVCacheError
    ├── UnprovenSlot     a slot was asked for that is not proven for this sequence and position
    └── UnknownHolder    a pool was asked about a holder that has nothing in it: never known, or already released

Both are faults of our own code, caught before a byte is read: neither is retryable, both end the request they belong to
with an internal error (HTTP 500, gRPC INTERNAL). What a peer can cause is a value, `landing.Refused`, and no exception.
"""

from __future__ import annotations


class KVCacheError(Exception):
    """Root of this tree."""


class UnprovenSlot(KVCacheError):
    """A read or a sealing was asked for bytes that nothing has proven; the message names block, slot and owner."""


class UnknownHolder(KVCacheError, KeyError, AssertionError):
    """No such holder. A second release looks like this, so it is an assertion too."""

    def __str__(self) -> str:
        """The plain message: `KeyError` alone would print it quoted."""
        return str(self.args[0]) if self.args else "unknown holder"
