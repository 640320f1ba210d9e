"""One HTTP exchange, from the request's head to the response's last byte, whatever happens in between.

Never: ends without exactly one terminal event, unless the client is gone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from gateway.answers import AnswerHead, AnswerShape
from gateway.body import Bodies, HeldBody
from gateway.errors import RequestRefused
from gateway.jobs import Job, Parser
from gateway.journal import CLIENT_LEFT_STATUS, Journal, RequestRecord
from gateway.limits import Limits
from gateway.openai_errors import ApiError, unavailable
from gateway.service import Done, Failed, Service, TextEvent, Ticket
from gateway.streaming import Reply
from gateway.tenants import Tenants
from gateway.texts import Text
from gateway.writing import Form, StreamWriter, WholeWriter, Writer
from kvlease.handoff.messages import RequestId, TenantId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Api:
    """One of OpenAI's two ways to ask for text."""

    name: str
    parse: Parser
    shape: AnswerShape


class Exchanges:
    """All exchanges now, and what they share."""

    def __init__(
        self, service: Service, tenants: Tenants, bodies: Bodies, journal: Journal, deadline_s: float, limits: Limits
    ) -> None:
        """None yet."""
        self.service = service
        self.tenants = tenants
        self.bodies = bodies
        self.journal = journal
        self.deadline_s = deadline_s
        self.limits = limits
        self.is_draining = False
        self._open: set[Exchange] = set()
        self._has_none = asyncio.Event()
        self._has_none.set()

    @property
    def num_open(self) -> int:
        """How many there are."""
        return len(self._open)

    async def serve(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        exchange = Exchange(self, api, Request(scope, receive), send)
        refusal = self._refusal()
        self._open.add(exchange)
        self._has_none.clear()
        try:
            await exchange.run(refusal)
        finally:
            self._open.discard(exchange)
            if not self._open:
                self._has_none.set()

    async def wait_until_none(self) -> None:
        """Wait until no exchange is open."""
        await self._has_none.wait()

    def abort_all(self) -> None:
        """Every open exchange ends now with 503; for the end of draining."""
        for exchange in tuple(self._open):
            exchange.abort(unavailable("The gateway is stopping.", "shutdown", self.limits.retry_after_s))

    def _refusal(self) -> ApiError | None:
        if self.is_draining:
            return unavailable("The gateway is stopping.", "draining", self.limits.retry_after_s)
        if len(self._open) >= self.limits.max_in_flight:
            message = "The gateway serves as many requests as it can; try again."
            return unavailable(message, "gateway_busy", self.limits.retry_after_s, 429)
        return None


class Exchange:
    """One of them."""

    def __init__(self, shared: Exchanges, api: Api, request: Request, send: Send) -> None:
        """Its id is ours, never the client's."""
        self._shared = shared
        self._api = api
        self._request = request
        now = asyncio.get_running_loop().time()
        self._record = RequestRecord(secrets.token_hex(16), api.name, now)
        self._reply = Reply(send, self._record.request_id)
        self._deadline_at = now + shared.deadline_s
        self._abort_error: ApiError | None = None
        self._work: asyncio.Task[None] | None = None

    def abort(self, error: ApiError) -> None:
        """Ends it with this error, wherever it is."""
        self._abort_error = error
        if self._work is not None:
            self._work.cancel()

    async def run(self, refusal: ApiError | None) -> None:
        """All of it. `refusal`: not even the body is read."""
        shared = self._shared
        shared.journal.began()
        try:
            if refusal is None:
                await self._admitted()
            else:
                await self._fail(refusal)
        except RequestRefused as refused:
            await self._fail(refused.error)
        except ClientDisconnect:
            pass
        finally:
            self._record.http_status = self._reply.http_status or CLIENT_LEFT_STATUS
            shared.journal.ended(self._record, asyncio.get_running_loop().time())

    async def _admitted(self) -> None:
        tenant = self._shared.tenants.authenticate(self._request.headers)
        self._record.tenant = tenant
        body = await self._shared.bodies.read(self._request)
        try:
            await self._respond_while_connected(tenant, body)
        finally:
            body.release()
        if self._abort_error is not None:
            await self._fail(self._abort_error)

    async def _respond_while_connected(self, tenant: TenantId, body: HeldBody) -> None:
        """Cancels the work when the client leaves; waits until all of it has ended."""
        async with asyncio.TaskGroup() as group:
            self._work = group.create_task(self._respond(tenant, body))
            watcher = group.create_task(self._watch(self._work))
            self._work.add_done_callback(lambda _: watcher.cancel())

    async def _watch(self, work: asyncio.Task[None]) -> None:
        message = await self._request.receive()
        while message["type"] != "http.disconnect":
            message = await self._request.receive()
        work.cancel()

    async def _respond(self, tenant: TenantId, body: HeldBody) -> None:
        """The work: everything after the body. Whatever ends it, the client hears of it once."""
        shared = self._shared
        try:
            async with asyncio.timeout_at(self._deadline_at + shared.limits.deadline_grace_s):
                try:
                    job = await shared.service.prepare(self._api.parse, bytes(body.data))
                finally:
                    body.release()
                await self._generate(job, Ticket(RequestId(self._record.request_id), tenant, self._deadline_at))
        except RequestRefused as refused:
            await self._fail(refused.error)
        except TimeoutError:
            message = f"The request was not done within {shared.deadline_s:g} seconds."
            await self._fail(ApiError(504, message, "deadline_exceeded"))
        except asyncio.CancelledError:
            if self._abort_error is not None:
                await self._fail(self._abort_error)
            raise
        except OSError:
            logger.debug("client.gone", extra={"request_id": self._record.request_id})
        except Exception:
            logger.exception("request.crashed", extra={"request_id": self._record.request_id})
            await self._fail(ApiError(500, "The gateway failed; its log says why.", "internal_error"))

    async def _generate(self, job: Job, ticket: Ticket) -> None:
        self._record.num_prompt_tokens = len(job.prompt_token_ids)
        events = self._counted(self._shared.service.generate(job, ticket))
        async with aclosing(events):
            await self._write(job, events)

    async def _counted(self, source: AsyncGenerator[TextEvent, None]) -> AsyncGenerator[TextEvent, None]:
        """The events, noted down as they pass."""
        record, clock = self._record, asyncio.get_running_loop().time
        async with aclosing(source) as events:
            async for event in events:
                if isinstance(event, Text):
                    record.num_generated_tokens += event.num_tokens
                if isinstance(event, Text) and (event.num_tokens or record.first_token_at is None):
                    self._shared.journal.tokens_arrived(record, clock())
                if isinstance(event, Done):
                    record.num_generated_tokens = event.usage.num_generated_tokens
                yield event

    async def _write(self, job: Job, events: AsyncIterator[TextEvent]) -> None:
        model, head = self._shared.service.model, self._head()
        form = Form(self._api.shape, head, model.codec, job.tells_logprobs, job.includes_usage)
        writer: Writer = (StreamWriter if job.is_stream else WholeWriter)(self._reply, form, job.num_choices)
        async for event in events:
            match event:
                case Text():
                    await writer.text(event.index, event.text, event.told)
                    if event.reason is not None:
                        await writer.ended(event.index, event.reason)
                case Done(usage, reason):
                    await writer.done(usage)
                    self._record.outcome = reason.value
                case Failed(error):
                    await self._fail(error)

    def _head(self) -> AnswerHead:
        model = self._shared.service.model
        return AnswerHead(self._record.request_id, int(time.time()), model.name, model.fingerprint)

    async def _fail(self, error: ApiError) -> None:
        """Tells the client, if it still listens; a client that stopped reading cannot hold this up."""
        if self._reply.has_ended:
            return
        self._record.outcome = error.code
        try:
            async with asyncio.timeout(self._shared.limits.last_word_s):
                await self._reply.fail(error)
        except (TimeoutError, OSError):
            logger.debug("client.gone", extra={"request_id": self._record.request_id})
