"""How the landing side connects: it dials, proves itself, and believes nobody who cannot prove the same.

Never: lets a byte of a connection that is not proven reach a ring.
"""

from __future__ import annotations

import asyncio
import hmac
import socket

from transport.errors import ChannelBroken
from transport.tcp.wire import REPLY_BYTES, Answer, Hello, Offer, prove, unpack_reply


async def dial(answer: Answer, offer: Offer, secret: bytes, establish_s: float) -> socket.socket:
    """A connected, mutually proven, non-blocking socket; `ChannelBroken` if it cannot be had within `establish_s`."""
    where = f"{answer.host}:{answer.port}"
    try:
        async with asyncio.timeout(establish_s):
            return await _dial(answer, offer, secret)
    except TimeoutError as error:
        raise ChannelBroken(f"no connection to {where} within {establish_s:g} s") from error
    except OSError as error:
        raise ChannelBroken(f"connect to {where}: {error.strerror or error}") from error
    except UnicodeError as error:
        raise ChannelBroken(f"{answer.host!r} is no host: {error}") from error


async def _dial(answer: Answer, offer: Offer, secret: bytes) -> socket.socket:
    stream = socket.socket(socket.AF_INET6 if ":" in answer.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        stream.setblocking(False)
        await asyncio.get_running_loop().sock_connect(stream, (answer.host, answer.port))
        await _prove_both(stream, answer, offer, secret)
    except BaseException:
        stream.close()
        raise
    return stream


async def _prove_both(stream: socket.socket, answer: Answer, offer: Offer, secret: bytes) -> None:
    proof = prove(secret, b"landing", answer.token, offer.challenge, offer.geometry)
    hello = Hello(offer.geometry, answer.token, proof)
    await asyncio.get_running_loop().sock_sendall(stream, hello.pack())
    theirs = unpack_reply(await _read_reply(stream))
    if isinstance(theirs, str):
        raise ChannelBroken(theirs)
    if not hmac.compare_digest(theirs, prove(secret, b"departure", answer.token, offer.challenge, offer.geometry)):
        raise ChannelBroken("the departure side could not prove that it knows the cluster's secret")


async def _read_reply(stream: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    reply = b""
    while len(reply) < REPLY_BYTES:
        data = await loop.sock_recv(stream, REPLY_BYTES - len(reply))
        if not data:
            raise ChannelBroken("the departure side refused the hello")
        reply += data
    return reply
