"""Named limits of the channels between servers.

Never: configured; what users may change lives in a server's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, sizes in bytes."""

    #: A connection attempt, hello and answer included. Loopback needs milliseconds, a cold peer a second or two.
    pair_s: float = 10.0
    #: One try at a connection that nobody answers, not even with a refusal: the address of a server that has moved on.
    connect_s: float = 2.0
    #: Pause before a lost pair is made anew: doubles up to the second value, so a sick peer is not stormed.
    backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    #: Pause after a refusal: nothing changes until somebody restarts one of the two.
    refused_s: float = 5.0
    #: HTTP/2 pings notice a peer that is frozen or cut off, below Python, within the sum of both.
    keepalive_s: float = 2.0
    keepalive_timeout_s: float = 2.0
    #: A prompt's token ids take at most five bytes each; the rest is for everything else in a message.
    token_id_bytes: int = 5
    message_bytes: int = 64 << 10
    #: Texts of a hello: an address is a host name and a port, and a layout names each kind of layer once.
    address_chars: int = 300
    layout_chars: int = 8 << 10
    #: What a transport needs to know of the other end: keys, numbers and an address.
    offer_bytes: int = 4 << 10
    #: Calls of one server at a time: more than its queue and its pool can hold. Each costs a task and a few kilobytes.
    max_calls: int = 4096
    #: Living pairs of one prefill server: each may hold a departure ring.
    max_pairs: int = 64
    #: How long running requests may take to end when a server is told to stop.
    drain_s: float = 30.0
