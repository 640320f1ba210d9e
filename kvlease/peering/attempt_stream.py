"""The decode side's end of an attempt's stream. The stream is the attempt: its end, for any reason, ends it.

Never: interprets a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from kvlease.handoff.messages import AttemptDown, AttemptUp
from kvlease.handoff.wire import decode_down, encode_up
from kvlease.peering.call_writer import CallWriter
from kvlease.peering.errors import PairLost
from kvlease.v1 import kvlease_pb2 as pb


class AttemptStream:
    """Messages up and down, in order."""

    def __init__(self, call: grpc.aio.StreamStreamCall[pb.AttemptUp, pb.AttemptDown]) -> None:
        """Takes the call over."""
        self._call = call
        self._writer = CallWriter[pb.AttemptUp](call)

    async def send(self, message: AttemptUp) -> None:
        """Raises `PairLost` when the stream has ended."""
        await self._writer.write(encode_up(message))

    async def messages(self) -> AsyncIterator[AttemptDown]:
        """Until prefill ends the stream; raises `PairLost` when something else does, `WireError` for nonsense."""
        try:
            async for message in self._call:
                yield decode_down(message)
        except grpc.aio.AioRpcError as error:
            raise PairLost(f"{error.code().name}: {error.details()}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise PairLost("the channel was closed under the attempt's stream") from None

    def cancel(self) -> None:
        """End the attempt on the other side too. Harmless after the end."""
        self._call.cancel()
