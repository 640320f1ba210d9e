"""Errors of the block channel.

    TransportError
    ├── ChannelClosed      this end was closed by its owner
    ├── ChannelBroken      the peer died, the network failed, or the peer broke the protocol
    ├── TransportRefused   it cannot be had at all: no device, bad geometry, an address in use
    └── VerbsError         a call of libibverbs failed; the rdma transport makes one of the two above of it

`ChannelBroken` ends one channel; what was in flight on it may be retried on another one.
"""

from __future__ import annotations


class TransportError(Exception):
    """Root of this tree."""


class ChannelClosed(TransportError):
    """The owner of this end closed it."""


class ChannelBroken(TransportError):
    """The channel is lost; the message says which call saw it and why."""


class TransportRefused(TransportError):
    """The transport cannot be used here; the message says what to do. `exit_code` is what a server then ends with."""

    exit_code = 2


class VerbsError(TransportError):
    """A call of libibverbs failed; the message names the call and the reason."""
