"""Writing to a gRPC stream of ours such that the stream's end is never missed.

`grpc.aio` leaves a write waiting for ever when the call ended before its metadata was sent, as happens when a channel is closed just after
the call was made; and after the end it raises one of several errors, depending on how far the call had come. One of them is the
cancellation of a task that nobody cancelled.

Never: waits on a stream that has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
import grpc.aio

from kvlease.peering.errors import PairLost

if TYPE_CHECKING:  # grpc's classes are generic in their stubs only; what comes down is not our business here
    _Call = grpc.aio.StreamStreamCall[Any, Any]
Message = TypeVar("Message")


class CallWriter(Generic[Message]):
    """The writing end of one call."""

    def __init__(self, call: _Call) -> None:
        """The call was just made."""
        self._call = call
        self._over = asyncio.Event()
        call.add_done_callback(lambda _call: self._over.set())

    async def write(self, message: Message) -> None:
        """Raises `PairLost` when the stream has ended, or ends before the message could be written."""
        writing = asyncio.ensure_future(self._write(message))
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((writing, over), return_when=asyncio.FIRST_COMPLETED)
            if not writing.done() or writing.cancelled():
                raise PairLost("the stream ended before a message could be written")
            writing.result()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise PairLost(f"the stream has ended: {_text(error)}") from error
        finally:
            writing.cancel()
            over.cancel()

    def _write(self, message: Message) -> Awaitable[None]:
        return self._call.write(message)


def _text(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
