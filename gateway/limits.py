"""Named limits of the gateway.

Never: read at run time from anywhere else; every part gets its `Limits` when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a client may make the gateway hold, and on how long anything waits. Times in seconds."""

    #: One request's body. A context of a million token ids as JSON needs about eight megabytes.
    max_body_bytes: int = 8 << 20
    #: All bodies held at one moment, so that many clients together cannot fill the memory.
    max_held_body_bytes: int = 128 << 20
    #: A body that trickles in holds a place; a slow link delivers the largest body within this.
    body_timeout_s: float = 30.0
    #: Requests between head and last byte. Each holds a socket, a decoder and a place in a queue.
    max_in_flight: int = 1024
    #: Open connections, idle ones included: below the usual 4,096 descriptors that a service may have.
    max_connections: int = 2048
    #: Texts that wait for a tokenizing thread; beyond it a client is better told at once.
    max_preparing: int = 64
    #: Tokenizing holds no interpreter lock for most of its time; two keep a short text from waiting behind a long one.
    preparation_threads: int = 2
    #: OpenAI allows 4; some clients send more. Each costs a step per character.
    max_stop_strings: int = 16
    #: Text that may become a stop string is held back, so this bounds the delay of a stream.
    max_stop_chars: int = 256
    #: Tokens that a client may name as ends of its text, beside the model's own.
    max_stop_token_ids: int = 64
    #: How long after the deadline the gateway waits for the server that knows better why.
    deadline_grace_s: float = 1.0
    #: Sends of a last word to a client that may have stopped reading.
    last_word_s: float = 1.0
    #: Attempts at one request on different decode servers, as long as no token was produced.
    max_attempts: int = 2
    #: How often each server's status is asked, and how often while it cannot serve.
    poll_s: float = 1.0
    poll_soon_s: float = 0.2
    poll_timeout_s: float = 1.0
    #: Lost polls until a server is out, and good ones until it is back.
    misses_until_out: int = 3
    hits_until_back: int = 2
    #: One warm-up prompt, cold caches included; and the pauses between tries.
    warm_up_timeout_s: float = 60.0
    warm_up_pause_s: float = 0.1
    warm_up_pause_max_s: float = 5.0
    #: What a client is told to wait before it tries again, when a queue is full or no server is ready.
    retry_after_s: int = 1
    #: How long requests in flight may go on after the order to stop.
    drain_s: float = 30.0
    #: What is left after that: the last words of exchanges that were told to end.
    stop_s: int = 2
    #: How long an idle connection is kept for a client's next request.
    keep_alive_s: int = 30
