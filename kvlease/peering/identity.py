"""Random identities: the only place where an incarnation, a lease id or a nonce is drawn.

Never: accepts one from a client, or draws one twice for two things.
"""

from __future__ import annotations

import secrets

from kvlease.handoff.messages import IDENTITY_BYTES, Epoch, Grant, Incarnation, LeaseId, Nonce


def draw_incarnation() -> Incarnation:
    """One process's name, which no other process ever has."""
    return Incarnation(secrets.token_bytes(IDENTITY_BYTES))


def draw_epoch() -> Epoch:
    """One connection's name. Random, so that an epoch of an earlier process is not met again."""
    return Epoch(secrets.randbits(63) | 1)


def draw_grant(epoch: Epoch) -> Grant:
    """A new lease over the connection of this epoch."""
    return Grant(LeaseId(secrets.token_bytes(IDENTITY_BYTES)), Nonce(secrets.token_bytes(IDENTITY_BYTES)), epoch)
