"""The explored world: both servers, what lies between them, and what is remembered outside of them to judge by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from decode_server.service import is_worth_another
from kvlease.handoff.decode_attempt import (
    AskRoom,
    Committed,
    Conclude,
    DecodeAttempt,
    Ended,
    OpenLease,
    RoomReserved,
    SendUp,
    decode_step,
)
from kvlease.handoff.limits import Limits
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Admitted,
    Complete,
    Finished,
    FinishReason,
    Proposal,
    Rejected,
    RejectReason,
    TokensGenerated,
    Verdict,
)
from kvlease.handoff.prefill_attempt import EndedHere
from kvlease.handoff.verdicts import DecodeFacts, aborted, judge_request, rejected
from kvlease.kvcache.memory import Room
from kvlease.kvcache.sizing import blocks_for
from tests.explorer.decode_side import DecodeSide, DecodeState, LandingWork, RequestState
from tests.explorer.ghost import BLOCK_SIZE, require, token_at
from tests.explorer.judge import judge_end, judge_frame
from tests.explorer.net import NUM_SLOTS, Channel, Key, Stream, over_the_wire_down, over_the_wire_up
from tests.explorer.prefill_side import PrefillSide, PrefillState, PromptKey
from tests.explorer.requests import VOCABULARY, Scenario, grant_value, proposal_value, request_value
from tests.explorer.trails import Trails

GONE, CLOSED = "the client left", "the connection broke"


@dataclass(frozen=True, slots=True)
class State:
    """One state of everything. The last line is ghost: nobody in the world can see it."""

    decode: DecodeState
    prefill: PrefillState
    channel: Channel
    streams: tuple[tuple[Key, Stream], ...]
    old_epochs: tuple[int, ...]  # pairs that have ended, which prefill does not know yet
    verdicts: tuple[tuple[Key, Verdict], ...]
    hurt: frozenset[int]
    faults_left: int
    crashes: frozenset[str]


class World:
    """Loaded with a state, moved by an event, saved again. `said` is what the diagram shows of the last event."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.trails = Trails()
        self.d, self.p = DecodeSide(scenario), PrefillSide(scenario, self.trails)
        self.d.on_room = self._room_came
        self.channel, self.streams = Channel(), dict[Key, Stream]()
        self.old_epochs: tuple[int, ...] = ()
        self.verdicts: dict[Key, Verdict] = {}
        self.hurt: set[int] = set()
        self.faults_left = scenario.max_faults
        self.crashes: frozenset[str] = frozenset()
        self.said: list[str] = []

    def first(self) -> State:
        none: frozenset[Any] = frozenset()
        return State(
            self.d.fresh, self.p.fresh, Channel(), (), (), (), none, self.scenario.max_faults, none
        )

    def load(self, state: State) -> None:
        self.d.load(state.decode)
        self.p.load(state.prefill)
        self.channel, self.streams = state.channel, dict(state.streams)
        self.old_epochs, self.verdicts, self.hurt = state.old_epochs, dict(state.verdicts), set(state.hurt)
        self.faults_left, self.crashes = state.faults_left, state.crashes
        self.said.clear()

    def save(self) -> State:
        streams = tuple(sorted((key, stream) for key, stream in self.streams.items() if not stream.is_gone))
        alive = {key for key, _ in streams} | {name[:2] for name in self.p.here}
        alive |= {(i, r.attempt_number) for i, r in enumerate(self.d.requests) if r.stage == "attempt"}
        verdicts = tuple(sorted((k, self._plain(v)) for k, v in self.verdicts.items() if k in alive))
        hurt = frozenset(i for i in self.hurt if self.d.requests[i].stage != "ended")
        return State(
            *(self.d.save(), self.p.save(), self.channel, streams, self.old_epochs, verdicts, hurt),
            *(self.faults_left, self.crashes),
        )

    @staticmethod
    def _plain(verdict: Verdict) -> Verdict:
        return Admitted(0) if isinstance(verdict, Admitted) else verdict

    # -- the client, and requests as the decode service leads them

    def arrive(self, index: int) -> None:
        request = request_value(index, self.scenario.specs[index])
        pool_tokens = self.scenario.decode_blocks * BLOCK_SIZE
        verdict = judge_request(request, DecodeFacts(pool_tokens, pool_tokens, VOCABULARY, 0, 8, draining=False))
        if verdict is not None:
            self.verdicts[index, 0] = verdict
            self._update(index, stage="door")
            self._end(index, verdict)
        else:
            self._attempt(index, 1, rejected(RejectReason.NO_PREFILL, "no prefill server is paired and ready"))

    def _attempt(self, index: int, number: int, last: Rejected | Aborted) -> None:
        if not self.channel.decode_believes:
            self._update(index, stage="door", attempt_number=number - 1)
            self._end(index, last)
            return
        spec, epoch = self.scenario.specs[index], self.channel.epoch
        attempt = DecodeAttempt(spec.num_tokens, blocks_for(spec.num_tokens, BLOCK_SIZE))
        self.d.requests[index] = RequestState("attempt", number, epoch, attempt)
        proposal = proposal_value(index, spec, number, epoch)
        stream = Stream(up=(proposal,))
        self.streams[index, number] = stream
        self.said.append(f"D->P {index}.{number} Propose")

    def leave(self, index: int) -> None:
        """The client's cancel, or decode's deadline: the request's task is cancelled wherever it stands."""
        if self.d.requests[index].stage == "attempt":
            self._withdraw(index, keep_room=False)
        else:
            self.d.leave(index)
        self._end(index, GONE)
        self.listen()

    def _end(self, index: int, end: object) -> None:
        request = self.d.requests[index]
        require(request.stage not in ("new", "ended"), "P6", f"request {index} ends again, by {end}")
        key = (index, request.attempt_number)
        judge_end(index, end, self.verdicts.get(key) or self.verdicts.get((index, 0)), is_hurt=index in self.hurt)
        self.d.requests[index] = RequestState(stage="ended", end=_name_of(end))
        self.said.append(f"D->C {index} {_name_of(end)}")

    def _update(self, index: int, **changes: Any) -> None:
        self.d.requests[index] = replace(self.d.requests[index], **changes)

    # -- an attempt on decode, as its run performs it

    def decode_happens(self, key: Key, happening: Any) -> None:
        index, number = key
        request = self.d.requests[index]
        if request.stage != "attempt" or request.attempt_number != number:
            return  # nobody reads this inbox any more
        assert request.attempt is not None
        after, actions = decode_step(request.attempt, happening)
        self.trails.decode(request.attempt, happening, after)
        self._update(index, attempt=after)
        for action in actions:
            match action:
                case AskRoom():
                    self.d.ask_room(key)
                case OpenLease(lease):
                    self.d.holding(index).open(lease, self.d.inbox(key))
                    self._update(index, lease=lease)
                case SendUp(message):
                    self._send_up(key, message)
                case Conclude(outcome):
                    self._conclude(index, outcome)
                    return

    def _send_up(self, key: Key, message: Any) -> None:
        stream = self.streams[key]
        if stream.up_ends or not stream.prefill_hears:
            return  # the stream's reader will say so, after everything that prefill has said
        self.streams[key] = replace(stream, up=(*stream.up, over_the_wire_up(message)))
        self.said.append(f"D->P {key[0]}.{key[1]} {type(message).__name__}")

    def _conclude(self, index: int, outcome: Any) -> None:
        request = self.d.requests[index]
        self._withdraw(index, keep_room=isinstance(outcome, Committed))
        match outcome:
            case Committed(first_token_id):
                assert request.room is not None
                self._update(index, stage="running", attempt=None, lease=None)
                self.d.join(index, request.room, first_token_id)
            case Complete(token, reason):
                self.d.requests[index] = replace(request, room=None, lease=None, token_ids=(token,))
                self._end(index, Finished(reason, self.scenario.specs[index].num_tokens, 1))
            case Rejected() | Aborted():
                if is_worth_another(outcome) and request.attempt_number < Limits().max_attempts:
                    self._attempt(index, request.attempt_number + 1, outcome)
                else:
                    self._end(index, outcome)

    def _withdraw(self, index: int, *, keep_room: bool) -> None:
        request = self.d.requests[index]
        key = (index, request.attempt_number)
        self.d.holding(index).give_back(keep_room=keep_room)
        self._update(index, lease=None, room=request.room if keep_room else None)
        self.d.withdraw_ticket(key)
        if key in self.streams:
            self.streams[key] = self.streams[key].cancelled()

    def _room_came(self, key: Key, room: Room) -> None:
        self._touched(key, "held at decode")
        self.d.holding(key[0]).take(room)
        self._update(key[0], room=room)
        self.d.scrubs = (*self.d.scrubs, (key, self.d.requests[key[0]].epoch, room))

    def end_scrub(self, number: int) -> None:
        key, epoch, room = self.d.scrubs[number]
        self.d.scrubs = self.d.scrubs[:number] + self.d.scrubs[number + 1 :]
        holding = self.d.holding_of(key, epoch)
        holding.scrub(room)
        holding.scrubbed(room)
        self.decode_happens(key, RoomReserved(grant_value(*key, epoch), room.holder))
        self.listen()

    def listen(self) -> None:
        """Everything that was posted is heard; what the texts have to say is said."""
        while self.d.news:
            key, happening = self.d.news.pop(0)
            self.decode_happens(key, happening)
        for index, request in enumerate(tuple(self.d.requests)):
            if request.stage == "running":
                self._publish(index)
        if self.d.news:
            self.listen()

    def _publish(self, index: int) -> None:
        heard = self.d.heard(index)
        token_ids, is_over = self.d.tokens(index)
        self._update(index, token_ids=token_ids, is_over=is_over)
        for event in heard:
            if not isinstance(event, TokensGenerated):
                self.d.leave(index)
                if isinstance(event, Finished):
                    self._judge_text(index, token_ids)
                self._end(index, event)

    def _judge_text(self, index: int, token_ids: tuple[int, ...]) -> None:
        spec = self.scenario.specs[index]
        right = tuple(token_at(index, position) for position in range(spec.num_tokens, len(token_ids)))
        require(token_ids[spec.num_tokens :] == right, "P7", f"request {index} has the text {token_ids}")

    # -- streams

    def take_up(self, key: Key) -> None:
        stream = self.streams[key]
        message = stream.up[0]
        self.streams[key] = replace(stream, up=stream.up[1:])
        if isinstance(message, Proposal):
            self._judge(key, message)
            return
        name = self.p.find(key)
        if name is not None:
            self._relay(name, self.p.happen(name, message))

    def _judge(self, key: Key, proposal: Proposal) -> None:
        living = self.channel.epoch if self.channel.prefill_believes else None
        verdict = self.p.judge(proposal, living)
        require(key not in self.verdicts, "P2", f"attempt {key} is judged again")
        self.verdicts[key] = verdict
        if living is None:
            said: list[Any] = [verdict, None]
            self._say(key, said)
        else:
            name = (*key, proposal.epoch)
            self._relay(name, self.p.host(name, verdict))

    def _relay(self, name: PromptKey, said: list[Any]) -> None:
        self._say(name[:2], said)

    def relay_all(self) -> None:
        for name in tuple(self.p.here):
            self._relay(name, self.p.said(name))

    def _say(self, key: Key, said: list[Any]) -> None:
        stream = self.streams.get(key)
        if stream is None:
            return
        for message in said:
            if message is None:
                stream = stream.closed()
            else:
                self.said.append(f"P->D {key[0]}.{key[1]} {_name_of(message)}")
                if stream.decode_hears and not stream.down_ends:
                    stream = replace(stream, down=(*stream.down, over_the_wire_down(message)))
        self.streams[key] = stream

    def end_up(self, key: Key) -> None:
        """Prefill hears that the stream has ended; what was still on its way is lost."""
        self.streams[key] = replace(self.streams[key], up=(), prefill_hears=False)
        self.tell_prefill(key, AbortReason.CANCELLED, "the attempt's stream has ended")

    def tell_prefill(self, key: Key, reason: AbortReason, message: str) -> None:
        name = self.p.find(key)
        if name is not None:
            self._relay(name, self.p.happen(name, EndedHere(aborted(reason, message))))

    def take_down(self, key: Key) -> None:
        stream = self.streams[key]
        self.streams[key] = replace(stream, down=stream.down[1:])
        self.decode_happens(key, stream.down[0])
        self.listen()

    def end_down(self, key: Key) -> None:
        self.streams[key] = replace(self.streams[key], decode_hears=False)
        self.decode_happens(key, Ended(aborted(AbortReason.PEER_LOST, "prefill ended the attempt's stream")))
        self.listen()

    # -- prefill's work, and the channel

    def begin_pass(self) -> None:
        self.p.begin_pass()
        for chunk in self.p.chunks:
            self._touched(chunk.prompt.name[:2], "held at prefill")  # type: ignore[attr-defined]
        self.relay_all()

    def end_pass(self, failing: frozenset[int]) -> None:
        for chunk in self.p.chunks:
            self._touched(chunk.prompt.name[:2], "computed")  # type: ignore[attr-defined]
        self.p.end_pass(failing)
        self.relay_all()

    def _touched(self, key: Key, what: str) -> None:
        verdict = self.verdicts.get(key)
        require(isinstance(verdict, Admitted), "P3", f"attempt {key}, which has {verdict}, is {what}")

    def end_seal(self) -> None:
        sealing = self.p.sealing
        assert sealing is not None
        name: PromptKey = sealing.prompt.name  # type: ignore[attr-defined]
        is_cancelled = name[2] != self.channel.epoch or not self.channel.prefill_believes
        frame = self.p.end_seal(is_cancelled)
        if frame is not None:
            self._touched(name[:2], "sent")
            judge_frame(frame, name[0], self.scenario.specs[name[0]].num_tokens)
            self.channel = self.channel.sent(frame)
            self.said.append(f"P=>D {name[0]}.{name[1]} block {sealing.position}")
        self.relay_all()

    def begin_landing(self) -> None:
        frame = self.channel.slots[self.channel.num_taken % NUM_SLOTS]
        self.channel = self.channel.taken()
        if not self.d.begin_landing(frame):
            self.channel = self.channel.released()
            self.said.append("D    a block without a lease")

    def end_landing(self, stray: str) -> None:
        """`stray`: bytes that hit the slot `torn` between the header's check and the copy, or `late`, behind the digest."""
        work = self.d.landing
        assert work is not None
        self.d.landing = None
        is_cancelled = work.frame is not None
        slot = (self.channel.num_taken - 1) % NUM_SLOTS
        ring = bytearray(work.frame if work.frame is not None else self.channel.slots[slot])

        def hit() -> None:
            ring[-1 - 64 * (stray == "torn")] ^= 0xFF
            ring[256] ^= 0xFF

        self.d.ledger.before_copy = hit if stray == "torn" else None
        self.d.storage.before_settle = hit if stray == "late" else None
        found = self.d.judge_landing(work, ring)
        self.d.ledger.before_copy = self.d.storage.before_settle = None
        self.d.dock.finish(work.docking, None if is_cancelled else found)
        if not is_cancelled:
            self.channel = self.channel.with_slot(slot, bytes(ring)).released()
            self.said.append(f"D    {found}")
        self.listen()

    def end_step(self, failing: frozenset[int]) -> None:
        self.d.end_step(failing)
        self.listen()

    # -- ends of pairs and servers

    def decode_notices(self) -> None:
        """The pair is lost for decode: its attempts hear of it, the ring is no longer emptied, the streams are closed."""
        self.channel = replace(self.channel, decode_believes=False)
        if self.d.landing is not None and self.d.landing.frame is None:
            frame = self.channel.slots[(self.channel.num_taken - 1) % NUM_SLOTS]
            self.d.landing = LandingWork(self.d.landing.docking, frame)
        for index, request in enumerate(tuple(self.d.requests)):
            if request.stage == "attempt":
                end = Ended(aborted(AbortReason.PEER_LOST, "the pair is lost"))
                self.decode_happens((index, request.attempt_number), end)
        for key, stream in self.streams.items():
            self.streams[key] = stream.broken()
        self.listen()

    def prefill_notices(self, epoch: int) -> None:
        if epoch == self.channel.epoch:
            self.channel = replace(self.channel, prefill_believes=False)
        self.old_epochs = tuple(old for old in self.old_epochs if old != epoch)
        for name in tuple(self.p.here):
            if name[2] == epoch:
                self.tell_prefill(name[:2], AbortReason.PEER_LOST, "the pair is lost")

    def pair_again(self) -> None:
        if self.channel.prefill_believes:
            self.old_epochs = (*self.old_epochs, self.channel.epoch)
        self.channel = Channel(epoch=self.channel.epoch + 1)

    def crash_decode(self) -> None:
        for index, request in enumerate(tuple(self.d.requests)):
            if request.stage not in ("new", "ended"):
                self._end(index, CLOSED)
        requests = tuple(self.d.requests)
        self.d.load(replace(self.d.fresh, requests=requests))
        self.channel = replace(self.channel, is_broken=True, decode_believes=False)
        for key, stream in self.streams.items():
            self.streams[key] = replace(stream.broken(), decode_hears=False)

    def crash_prefill(self) -> None:
        self.p.load(self.p.fresh)
        self.channel = replace(self.channel, is_broken=True, prefill_believes=False)
        self.old_epochs = ()
        for key, stream in self.streams.items():
            self.streams[key] = replace(stream.broken(), prefill_hears=False)


def _name_of(value: object) -> str:
    reason = getattr(value, "reason", None)
    name = value if isinstance(value, str) else type(value).__name__
    return f"{name}({reason})" if isinstance(reason, str | FinishReason) else name
