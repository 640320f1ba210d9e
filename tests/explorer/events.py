"""What may happen in a state: the system's own moves, and faults. Each fault costs one of the run's budget.

No clock: a deadline and a stall are events that may happen. A stall also happens by itself where everything else stands still,
since the 2 s of a lease without progress do pass; a deadline never helps anybody here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvlease.handoff.decode_attempt import DecodeAttempt, Ended
from kvlease.handoff.messages import AbortReason
from kvlease.handoff.prefill_attempt import EndedHere
from kvlease.handoff.tables import DecodeState
from kvlease.handoff.verdicts import aborted
from kvlease.kvcache.seal import SEAL_BYTES
from tests.explorer.decode_side import DecodeState as Decode
from tests.explorer.net import NUM_SLOTS, Channel, Key, Stream
from tests.explorer.prefill_side import PrefillState
from tests.explorer.world import State, World

Event = tuple[str, *tuple[object, ...]]

FAULTS = frozenset(
    {
        "leave",  # the client cancels, or its deadline passes on decode
        "deadline",  # passes on prefill first
        "stall",
        "break stream",
        "break channel",
        "stray",
        "fail prefill",
        "fail decode",
        "crash prefill",
        "crash decode",
    }
)

FAULT_NAMES = FAULTS - {"fail prefill", "fail decode"}


def own_moves(state: State) -> Iterator[Event]:
    """What happens without any fault. Some may turn out to change nothing."""
    for index, request in enumerate(state.decode.requests):
        if request.stage == "new":
            yield ("arrive", index)
    for key, stream in state.streams:
        yield from _of_stream(key, stream)
    yield from _of_prefill(state.prefill, state.channel)
    yield from _of_decode(state.decode, state.channel)
    yield from _notices(state)


def _of_stream(key: Key, stream: Stream) -> Iterator[Event]:
    if stream.prefill_hears and stream.up:
        yield ("take up", key)
    if stream.prefill_hears and stream.up_ends:
        yield ("end up", key)
    if stream.decode_hears and stream.down:
        yield ("take down", key)
    elif stream.decode_hears and stream.down_ends:
        yield ("end down", key)


def _of_prefill(prefill: PrefillState, channel: Channel) -> Iterator[Event]:
    if prefill.chunks:
        yield ("end pass", -1)
    elif prefill.waiting or prefill.begun:
        yield ("begin pass",)
    if prefill.sealing:
        yield ("end seal",)
    elif channel.prefill_believes and channel.has_credit and any(name[2] == channel.epoch for name in prefill.line):
        yield ("begin seal",)


def _of_decode(decode: Decode, channel: Channel) -> Iterator[Event]:
    if decode.landing:
        yield ("end landing", "")
    elif channel.decode_believes and channel.has_frame:
        yield ("begin landing",)
    for number in range(len(decode.scrubs)):
        yield ("end scrub", number)
    if decode.step:
        yield ("end step", -1)
    elif decode.batch:
        yield ("begin step",)


def _notices(state: State) -> Iterator[Event]:
    channel = state.channel
    if channel.is_broken and channel.decode_believes:
        yield ("decode notices",)
    if channel.is_broken and channel.prefill_believes:
        yield ("prefill notices", channel.epoch)
    for epoch in state.old_epochs:
        yield ("prefill notices", epoch)
    if not channel.decode_believes:
        yield ("pair again",)


def last_resort(state: State) -> Iterator[Event]:
    """What time alone brings when nothing else can happen: the stall of a lease whose manifest is here."""
    for index, request in enumerate(state.decode.requests):
        if request.attempt is not None and request.attempt.state is DecodeState.CLOSING:
            yield ("stall", index)


def faults(state: State, kinds: frozenset[str]) -> Iterator[Event]:
    """Those of these kinds that could happen now."""
    if not state.faults_left:
        return
    for event in _all_faults(state):
        if _KIND_OF.get(str(event[0]), str(event[0])) in kinds:
            yield event


def _owes(attempt: DecodeAttempt) -> bool:
    """Whether decode waits for a verdict or blocks, so that standing still would end it."""
    return attempt.lease is not None or attempt.state is DecodeState.PROPOSED


_KIND_OF = {"end pass": "fail prefill", "end step": "fail decode", "end landing": "stray"}


def _all_faults(state: State) -> Iterator[Event]:
    for index, request in enumerate(state.decode.requests):
        if request.stage in ("attempt", "running"):
            yield ("leave", index)
        if request.attempt is not None and _owes(request.attempt):
            yield ("stall", index)
    for name, _ in state.prefill.prompts:
        yield ("deadline", name[:2])
    for key, stream in state.streams:
        if not (stream.up_ends and stream.down_ends):
            yield ("break stream", key)
    if not state.channel.is_broken:
        yield ("break channel",)
    yield from _strays(state)
    at_work = {c.prompt.name[0] for c in state.prefill.chunks}  # type: ignore[attr-defined]
    yield from (("end pass", index) for index in sorted(at_work))
    yield from (("end step", index) for index, _, _ in state.decode.step)
    yield from ((side,) for side in ("crash prefill", "crash decode") if side not in state.crashes)


def _strays(state: State) -> Iterator[Event]:
    """Bytes that hit a slot with a frame in it: before it is looked at, or at two moments of its landing.

    A slot without a frame needs none: the next frame covers it wholly before anybody looks.
    """
    if not state.channel.is_broken:
        for number in state.channel.arrived:
            yield from (("stray", number, how) for how in ("garble", "header", "replay"))
    if state.decode.landing:
        yield from (("end landing", moment) for moment in ("torn", "late"))


def perform(world: World, event: Event, *, is_fault: bool) -> None:
    """Let it happen. Whom a fault may hurt is written down before."""
    if is_fault:
        world.faults_left -= 1
        world.hurt |= _hurt_by(world, event)
    name, arguments = str(event[0]), event[1:]
    _PERFORMERS[name](world, *arguments)


def _hurt_by(world: World, event: Event) -> set[int]:
    match event:
        case ("leave" | "stall" | "end step" | "end pass", int(index)):
            return {index}
        case ("deadline" | "break stream", (int(index), int())):
            return {index}
        case ("stray", int(number), how):
            return {_owner(world, number)} | ({_owner(world, number + 1)} if how == "replay" else set())
        case ("end landing", "torn"):
            return {_owner(world, world.channel.num_taken - 1)}
    nobody: set[int] = set()
    everybody = set(range(len(world.scenario.specs)))
    return nobody if event == ("end landing", "late") else everybody


def _owner(world: World, number: int) -> int:
    frame = world.channel.slots[number % NUM_SLOTS]
    return frame[16 + 5] if frame else 0


def _stray(world: World, number: int, how: str) -> None:
    slot = number % NUM_SLOTS
    frame = bytearray(world.channel.slots[slot])
    if how == "garble":
        frame[SEAL_BYTES] ^= 0xFF
    elif how == "header":
        frame[0] ^= 0xFF
    else:
        frame = bytearray(world.channel.slots[1 - slot]) or frame
    world.channel = world.channel.with_slot(slot, bytes(frame))


STALLED = Ended(aborted(AbortReason.PEER_STALLED, "nothing has moved"))
TOO_LATE = EndedHere(aborted(AbortReason.DEADLINE, "the deadline has passed"))


def _stall(world: World, index: int) -> None:
    key = (index, world.decode.requests[index].attempt_number)
    world.ask_decode(world.decode_server.hear, key, STALLED, world.believed)


def _break_stream(world: World, key: Key) -> None:
    world.streams[key] = world.streams[key].broken()


def _break_channel(world: World) -> None:
    world.channel = world.channel._replace(is_broken=True)


def _crash(world: World, side: str) -> None:
    world.crashes |= {f"crash {side}"}
    if side == "decode":
        world.crash_decode()
    else:
        world.crash_prefill()


def _failing(request: int) -> frozenset[int]:
    return frozenset({request} - {-1})


def _end_landing(world: World, stray: str) -> None:
    world.ask_decode(world.decode_server.end_landing, world.channel.frame_at_work, stray, world.believed)


_PERFORMERS: dict[str, Callable[..., None]] = {
    "arrive": lambda w, index: w.ask_decode(w.decode_server.arrive, index, w.believed),
    "take up": World.take_up,
    "end up": World.end_up,
    "take down": World.take_down,
    "end down": World.end_down,
    "begin pass": lambda w: w.ask_prefill(w.prefill_server.begin_pass),
    "end pass": lambda w, request: w.ask_prefill(w.prefill_server.end_pass, _failing(request)),
    "begin seal": lambda w: w.ask_prefill(w.prefill_server.begin_seal, w.channel.epoch),
    "end seal": lambda w: w.ask_prefill(w.prefill_server.end_seal, w.living),
    "begin landing": World.begin_landing,
    "end landing": _end_landing,
    "end scrub": lambda w, number: w.ask_decode(w.decode_server.end_scrub, number),
    "begin step": lambda w: w.ask_decode(w.decode_server.begin_step),
    "end step": lambda w, request: w.ask_decode(w.decode_server.end_step, _failing(request)),
    "decode notices": World.decode_notices,
    "prefill notices": World.prefill_notices,
    "pair again": World.pair_again,
    "leave": lambda w, index: w.ask_decode(w.decode_server.leave, index),
    "stall": _stall,
    "deadline": lambda w, key: w.ask_prefill(w.prefill_server.hear, key, TOO_LATE),
    "break stream": _break_stream,
    "break channel": _break_channel,
    "stray": _stray,
    "crash prefill": lambda w: _crash(w, "prefill"),
    "crash decode": lambda w: _crash(w, "decode"),
}
