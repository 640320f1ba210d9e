"""The explored world: both servers, what lies between them, and what is remembered outside of them to judge by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvlease.handoff.decode_attempt import Ended
from kvlease.handoff.messages import AbortReason, Admitted, Proposal, Verdict
from kvlease.handoff.prefill_attempt import EndedHere
from kvlease.handoff.verdicts import aborted
from tests.explorer.decode_server_side import DecodeServer
from tests.explorer.decode_side import DecodeState
from tests.explorer.ghost import require
from tests.explorer.judge import judge_end, judge_frame
from tests.explorer.net import MESSAGES, Channel, Key, Stream
from tests.explorer.prefill_side import PrefillServer, PrefillState
from tests.explorer.requests import Scenario
from tests.explorer.side import Effect, Side
from tests.explorer.trails import Trails

STREAM_ENDED = Ended(aborted(AbortReason.PEER_LOST, "prefill ended the attempt's stream"))
STREAM_GONE = EndedHere(aborted(AbortReason.CANCELLED, "the attempt's stream has ended"))


class State(NamedTuple):
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
    """Loaded with a state, moved by an event, saved again. `said`: what was seen of the last event, for the diagram."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.trails = Trails()
        self.decode_server = DecodeServer(scenario, self.trails)
        self.prefill_server = PrefillServer(scenario, self.trails)
        self._decode_side = Side(self.decode_server, "decode")
        self._prefill_side = Side(self.prefill_server, "prefill")
        self.said: list[str] = []
        self.load(self.first())

    def first(self) -> State:
        none: frozenset[Any] = frozenset()
        fresh = self._decode_side.number(self.decode_server.fresh), self._prefill_side.number(self.prefill_server.fresh)
        return State(*fresh, Channel(), (), (), (), none, self.scenario.max_faults, none)

    def load(self, state: State) -> None:
        self.decode, self.prefill, self.channel = state.decode, state.prefill, state.channel
        self.streams = dict(state.streams)
        self.old_epochs, self.verdicts, self.hurt = state.old_epochs, dict(state.verdicts), set(state.hurt)
        self.faults_left, self.crashes = state.faults_left, state.crashes
        self.said.clear()

    def save(self) -> State:
        streams = tuple(sorted((key, stream) for key, stream in self.streams.items() if not stream.is_gone))
        alive = {key for key, _ in streams} | {name[:2] for name, _ in self.prefill.prompts}
        alive |= {(i, r.attempt_number) for i, r in enumerate(self.decode.requests) if r.stage == "attempt"}
        verdicts = tuple(sorted((k, v) for k, v in self.verdicts.items() if k in alive))
        hurt = frozenset(i for i in self.hurt if self.decode.requests[i].stage != "ended")
        ghost = verdicts, hurt, self.faults_left, self.crashes
        return State(self.decode, self.prefill, self.channel, streams, self.old_epochs, *ghost)

    # -- what the servers do to the rest

    def ask_decode(self, happening: Callable[..., None], *arguments: Any) -> None:
        self.decode, effects = self._decode_side.ask(self.decode, happening, *arguments)
        for effect in effects:
            self._take_effect(effect)

    def ask_prefill(self, happening: Callable[..., None], *arguments: Any) -> None:
        self.prefill, effects = self._prefill_side.ask(self.prefill, happening, *arguments)
        for effect in effects:
            self._take_effect(effect)

    def _take_effect(self, effect: Effect) -> None:
        match effect:
            case ("up", key, message):
                self.streams[key] = self.streams.get(key, Stream()).with_up(message)
                self._say("D", "P", key, message)
            case ("cancel", key):
                self._change(key, Stream.cancelled)
            case ("down", key, None):
                self._change(key, Stream.closed)
            case ("down", key, message):
                self._change(key, lambda stream: stream.with_down(message))
                self._say("P", "D", key, message)
            case ("verdict", key, verdict):
                require(key not in self.verdicts, "P2", f"attempt {key} is judged again")
                self.verdicts[key] = Admitted(0) if isinstance(verdict, Admitted) else verdict
            case ("touched", key, what):
                self._touched(key, what)
            case ("frame", key, position, frame):
                self._send(key, position, frame)
            case ("released", what):
                self.channel = self.channel.released()
                self.said.append(f"D    {what}")
            case ("end", index, number, end):
                self._end(index, number, end)

    def _send(self, key: Key, position: int, frame: bytes) -> None:
        self._touched(key, "sent")
        judge_frame(frame, key[0], self.scenario.specs[key[0]].num_tokens)
        self.channel = self.channel.sent(frame)
        self.said.append(f"P=>D {key[0]}.{key[1]} block {position}")

    def _end(self, index: int, number: int, end: object) -> None:
        verdict = self.verdicts.get((index, number)) or self.verdicts.get((index, 0))
        judge_end(index, end, verdict, is_hurt=index in self.hurt)
        self.said.append(f"D->C {index} {name_of(end)}")

    def _change(self, key: Key, change: Callable[[Stream], Stream]) -> None:
        if key in self.streams:
            self.streams[key] = change(self.streams[key])

    def _say(self, source: str, target: str, key: Key, message: object) -> None:
        self.said.append(f"{source}->{target} {key[0]}.{key[1]} {name_of(message)}")

    def _touched(self, key: Key, what: str) -> None:
        verdict = self.verdicts.get(key)
        require(isinstance(verdict, Admitted), "P3", f"attempt {key}, which has {verdict}, is {what}")

    # -- what happens

    @property
    def believed(self) -> int | None:
        """The pair that decode believes in."""
        return self.channel.epoch if self.channel.decode_believes else None

    @property
    def living(self) -> int | None:
        """The pair that prefill believes in."""
        return self.channel.epoch if self.channel.prefill_believes else None

    def take_up(self, key: Key) -> None:
        stream = self.streams[key]
        message = MESSAGES[stream.up[0]]
        self.streams[key] = stream._replace(up=stream.up[1:])
        if isinstance(message, Proposal):
            self.ask_prefill(self.prefill_server.propose, key, message, self.living)
        else:
            self.ask_prefill(self.prefill_server.hear, key, message)

    def end_up(self, key: Key) -> None:
        """Prefill hears that the stream has ended; what was still on its way is lost."""
        self.streams[key] = self.streams[key]._replace(up=(), prefill_hears=False)
        self.ask_prefill(self.prefill_server.hear, key, STREAM_GONE)

    def take_down(self, key: Key) -> None:
        stream = self.streams[key]
        self.streams[key] = stream._replace(down=stream.down[1:])
        self.ask_decode(self.decode_server.hear, key, MESSAGES[stream.down[0]], self.believed)

    def end_down(self, key: Key) -> None:
        self.streams[key] = self.streams[key]._replace(decode_hears=False)
        self.ask_decode(self.decode_server.hear, key, STREAM_ENDED, self.believed)

    def begin_landing(self) -> None:
        frame = self.channel.next_frame
        self.channel = self.channel.taken()
        self.ask_decode(self.decode_server.begin_landing, frame)

    def decode_notices(self) -> None:
        frame = self.channel.frame_at_work
        self.channel = self.channel._replace(decode_believes=False)
        for key, stream in self.streams.items():
            self.streams[key] = stream.broken()
        self.ask_decode(self.decode_server.lose_pair, frame)

    def prefill_notices(self, epoch: int) -> None:
        if epoch == self.channel.epoch:
            self.channel = self.channel._replace(prefill_believes=False)
        self.old_epochs = tuple(old for old in self.old_epochs if old != epoch)
        self.ask_prefill(self.prefill_server.lose_pair, epoch)

    def pair_again(self) -> None:
        if self.channel.prefill_believes:
            self.old_epochs = (*self.old_epochs, self.channel.epoch)
        self.channel = Channel(epoch=self.channel.epoch + 1)

    def crash_decode(self) -> None:
        self.channel = self.channel._replace(is_broken=True, decode_believes=False)
        for key, stream in self.streams.items():
            self.streams[key] = stream.broken()._replace(decode_hears=False)
        self.ask_decode(self.decode_server.crash)

    def crash_prefill(self) -> None:
        self.channel = self.channel._replace(is_broken=True, prefill_believes=False)
        self.old_epochs = ()
        self.prefill = self.prefill_server.fresh
        for key, stream in self.streams.items():
            self.streams[key] = stream.broken()._replace(prefill_hears=False)


def name_of(value: object) -> str:
    reason = getattr(value, "reason", None)
    name = value if isinstance(value, str) else type(value).__name__
    return name if reason is None else f"{name}({reason})"
