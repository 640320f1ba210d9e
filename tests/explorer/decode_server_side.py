"""What happens to the decode server of the explored world, performed as its async shells perform it.

`pair_epoch`: the pair that decode believes in, None without one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decode_server.service import is_worth_another
from kvlease.handoff.decode_attempt import (
    AskRoom,
    Committed,
    Conclude,
    DecodeAttempt,
    Ended,
    FirstToken,
    OpenLease,
    RoomReserved,
    SendUp,
    decode_step,
)
from kvlease.handoff.limits import Limits
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    ChoiceFinished,
    Complete,
    Finished,
    Rejected,
    RejectReason,
)
from kvlease.handoff.verdicts import DecodeFacts, aborted, judge_request, rejected
from kvlease.kvcache.sizing import blocks_for
from tests.explorer.decode_side import DecodeObjects, LandingWork, RequestState
from tests.explorer.ghost import BLOCK_SIZE, require, token_at
from tests.explorer.net import Key
from tests.explorer.requests import VOCABULARY, Scenario, grant_value, proposal_value, request_value
from tests.explorer.trails import Trails

GONE, CLOSED = "the client left", "the connection broke"
NO_PREFILL = rejected(RejectReason.NO_PREFILL, "no prefill server is paired and ready")


class DecodeServer(DecodeObjects):
    """The server's happenings. The client's events, streams and channel are the world's: they leave as effects."""

    def __init__(self, scenario: Scenario, trails: Trails) -> None:
        super().__init__(scenario)
        self._trails = trails
        self._pair_epoch: int | None = None

    # -- requests, as the service leads them

    def arrive(self, index: int, pair_epoch: int | None) -> None:
        self._pair_epoch = pair_epoch
        request = request_value(index, self.scenario.specs[index])
        pool_tokens = self.scenario.decode_blocks * BLOCK_SIZE
        verdict = judge_request(request, DecodeFacts(pool_tokens, pool_tokens, VOCABULARY, 0, 8, draining=False))
        if verdict is not None:
            self.effects.append(("verdict", (index, 0), verdict))
            self._end(index, verdict)
        else:
            self._attempt(index, 1, NO_PREFILL)

    def _attempt(self, index: int, number: int, last: Rejected | Aborted) -> None:
        if self._pair_epoch is None:
            self._end(index, last)
            return
        spec, epoch = self.scenario.specs[index], self._pair_epoch
        first = FirstToken(VOCABULARY, spec.max_tokens, request_value(index, spec).end_token_ids)
        attempt = DecodeAttempt(spec.num_tokens, blocks_for(spec.num_tokens, BLOCK_SIZE), first_token=first)
        self.requests[index] = RequestState("attempt", number, epoch, attempt)
        self.effects.append(("up", (index, number), proposal_value(index, spec, number, epoch)))

    def leave(self, index: int) -> None:
        """The client's cancel, or decode's deadline: the request's task is cancelled wherever it stands."""
        if self.requests[index].stage == "attempt":
            self._withdraw(index, keep_rooms=False)
        else:
            self.text_ends(index)
        self._end(index, GONE)
        self._listen()

    def _end(self, index: int, end: object) -> None:
        require(self.requests[index].stage != "ended", "P6", f"request {index} ends again, by {end}")
        self.effects.append(("end", index, self.requests[index].attempt_number, end))
        self.requests[index] = RequestState(stage="ended")

    def _update(self, index: int, **changes: Any) -> None:
        self.requests[index] = replace(self.requests[index], **changes)

    # -- an attempt, as its run performs it

    def hear(self, key: Key, happening: Any, pair_epoch: int | None) -> None:
        self._pair_epoch = pair_epoch
        self._happen(key, happening)
        self._listen()

    def _happen(self, key: Key, happening: Any) -> None:
        index, number = key
        request = self.requests[index]
        if request.stage != "attempt" or request.attempt_number != number:
            return  # nobody reads this inbox any more
        assert request.attempt is not None
        after, actions = decode_step(request.attempt, happening)
        self._trails.decode(request.attempt, happening, after)
        self._update(index, attempt=after)
        for action in actions:
            match action:
                case AskRoom():
                    self.ask_room(key)
                case OpenLease(lease):
                    self.holding(index).open(lease, self.inbox(key))
                    self._update(index, lease=lease)
                case SendUp(message):
                    self.effects.append(("up", key, message))
                case Conclude(outcome):
                    self._conclude(index, outcome)
                    return

    def _conclude(self, index: int, outcome: Any) -> None:
        room, number = self.requests[index].room, self.requests[index].attempt_number
        self._withdraw(index, keep_rooms=isinstance(outcome, Committed))
        match outcome:
            case Committed():
                assert room is not None
                self._update(index, stage="running", attempt=None, lease=None)
                (first,) = outcome.first_tokens
                self.text_begins(index, room, first)
            case Complete(_, reason):
                self._end(index, Finished(reason, self.scenario.specs[index].num_tokens, 1))
            case Rejected() | Aborted():
                if is_worth_another(outcome) and number < Limits().max_attempts:
                    self._attempt(index, number + 1, outcome)
                else:
                    self._end(index, outcome)

    def _withdraw(self, index: int, *, keep_rooms: bool) -> None:
        request = self.requests[index]
        key = (index, request.attempt_number)
        self.holding(index).give_back(keep_rooms=keep_rooms)
        self._update(index, lease=None, room=request.room if keep_rooms else None)
        self.withdraw_ticket(key)
        self.effects.append(("cancel", key))

    def end_scrub(self, number: int) -> None:
        key, epoch, room = self.scrubs[number]
        self.scrubs = self.scrubs[:number] + self.scrubs[number + 1 :]
        holding = self.holding_of(key, epoch)
        holding.scrub((room,))
        holding.scrubbed((room,))
        self._happen(key, RoomReserved(grant_value(*key, epoch), room.holder))
        self._listen()

    def _listen(self) -> None:
        """Everything that was posted is heard; what the texts have to say is said."""
        while self.news:
            key, happening = self.news.pop(0)
            self._happen(key, happening)
        for index, request in enumerate(tuple(self.requests)):
            if request.stage == "running":
                self._publish(index)

    def _publish(self, index: int) -> None:
        heard = self.heard(index)
        generated, is_over = self.tokens(index)
        self._update(index, generated=generated, is_over=is_over)
        for event in heard:
            match event:
                case Aborted():
                    self.text_ends(index)
                    self._end(index, event)
                case ChoiceFinished(_, reason, num_generated):
                    self.text_ends(index)
                    self._judge_text(index, generated)
                    self._end(index, Finished(reason, self.scenario.specs[index].num_tokens, num_generated))

    def _judge_text(self, index: int, generated: tuple[int, ...]) -> None:
        first = self.scenario.specs[index].num_tokens
        right = tuple(token_at(index, first + number) for number in range(len(generated)))
        require(generated == right, "P7", f"request {index} has the text {generated}")

    # -- the landing, as the dock's loop does it

    def begin_landing(self, frame: bytes) -> None:
        docking = self.dock.begin(memoryview(frame))
        self.landing = None if docking is None else LandingWork(docking)
        if docking is None:
            self.effects.append(("released", "a block without a lease is dropped"))

    def end_landing(self, in_ring: bytes, stray: str, pair_epoch: int | None) -> None:
        """`stray`: bytes hit the slot `torn` between the header's check and the copy, or `late`, behind the digest."""
        self._pair_epoch = pair_epoch
        work, self.landing = self.landing, None
        assert work is not None, "a landing ends that was begun"
        ring = bytearray(in_ring if work.frame is None else work.frame)

        def hit() -> None:
            ring[256] ^= 0xFF

        self.ledger.before_copy = hit if stray == "torn" else None
        self.storage.before_settle = hit if stray == "late" else None
        try:
            found = self.dock.judge(work.docking, memoryview(ring))
        finally:
            self.ledger.before_copy = self.storage.before_settle = None
        self.dock.finish(work.docking, None if work.frame is not None else found)
        if work.frame is None:
            self.effects.append(("released", f"{type(found).__name__} {getattr(found, 'check', '')}"))
        self._listen()

    # -- the token loop, and the end of a pair

    def begin_step(self) -> None:
        self.step_begins()
        self._listen()

    def end_step(self, failing: frozenset[int]) -> None:
        self.step_ends(failing)
        self._listen()

    def lose_pair(self, frame: bytes) -> None:
        """Its attempts hear of it, and the ring is no longer emptied; a block at work is finished where it lies, for nobody."""
        self._pair_epoch = None
        if self.landing is not None and self.landing.frame is None:
            self.landing = LandingWork(self.landing.docking, frame)
        for index, request in enumerate(tuple(self.requests)):
            if request.stage == "attempt":
                lost = Ended(aborted(AbortReason.PEER_LOST, "the pair is lost"))
                self._happen((index, request.attempt_number), lost)
        self._listen()

    def crash(self) -> None:
        """Another process, with the memory that it finds; whoever was being served sees a broken connection."""
        for index, request in enumerate(tuple(self.requests)):
            if request.stage not in ("new", "ended"):
                self._end(index, CLOSED)
        effects = list(self.effects)
        self.load(replace(self.fresh, requests=tuple(self.requests)))
        self.effects[:] = effects
