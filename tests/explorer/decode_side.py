"""The decode server of the explored world: its shipped objects, put back into any state and taken out of it again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from decode_server.holding import AttemptHolding
from decode_server.landing import Berth, Dock, Docking
from decode_server.memory import DecodeMemory, Rooms
from decode_server.room import _Ticket
from decode_server.sequences import RunningBatch, Sequence, SequenceEvent
from decode_server.worker import begin_step, publish_step, unpin_step
from kvlease.engine.batch import SequenceStep
from kvlease.engine.isolation import run_isolated
from kvlease.handoff.decode_attempt import DecodeAttempt
from kvlease.handoff.lease_book import Lease, LeaseBook
from kvlease.handoff.messages import LeaseId
from kvlease.kvcache.memory import KVMemory, Room
from kvlease.kvcache.pool import BlockPool
from kvlease.sampling.tokens import DrawnToken
from tests.explorer.ghost import REMAINS, GhostLedger, GhostRunner, GhostStorage, holder_of, plain, request_of
from tests.explorer.net import Key
from tests.explorer.requests import Scenario, proposal_value, request_value
from tests.explorer.side import Effect


@dataclass(frozen=True, slots=True)
class RequestState:
    """One request on decode. `stage`: new, attempt, running, ended; `end`: what its client heard last."""

    stage: str = "new"
    attempt_number: int = 0
    epoch: int = 0
    attempt: DecodeAttempt | None = None
    room: Room | None = None
    lease: Lease | None = None
    generated: tuple[int, ...] = ()
    is_over: bool = False
    end: object = None


@dataclass(frozen=True, slots=True)
class LandingWork:
    """One block being copied in. `frame`: None while it lies in the ring; its bytes when the ring is gone. No docking: a stranger."""

    docking: Docking
    frame: bytes | None = None


@dataclass(frozen=True, slots=True)
class DecodeState:
    """Everything that a decode server knows."""

    pool: BlockPool
    pool_key: tuple[object, ...]
    ledger: bytes
    memory: bytes
    requests: tuple[RequestState, ...]
    tickets: tuple[tuple[Key, int, int], ...] = ()  # whose, blocks, how often bypassed
    book: tuple[Lease, ...] = ()
    berths: tuple[tuple[LeaseId, Berth], ...] = ()
    landing: LandingWork | None = None
    scrubs: tuple[tuple[Key, int, Room], ...] = ()
    batch: tuple[int, ...] = ()
    step: tuple[tuple[int, Room, SequenceStep], ...] = ()
    number: int = field(default=-1, compare=False)

    def key(self) -> tuple[object, ...]:
        return (
            *(self.pool_key, self.ledger, self.memory, self.requests, self.tickets, self.book, self.berths),
            *(self.landing, self.scrubs, self.batch, self.step),
        )


@dataclass(frozen=True, slots=True)
class NamedInbox:
    """Where the world hears what happened to an attempt."""

    name: Key
    news: list[tuple[Key, Any]] = field(compare=False, repr=False)

    def post(self, happening: Any) -> None:
        self.news.append((self.name, happening))


class DecodeObjects:
    """One set of shipped objects for all states."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        num_blocks = scenario.decode_blocks
        self.storage, self.ledger = GhostStorage(num_blocks), GhostLedger(num_blocks)
        self.kv = KVMemory(BlockPool(num_blocks), self.ledger, self.storage)
        self.kv._holders = cast("Any", self._next_holder())
        self.memory = DecodeMemory(self.kv, 1)
        self.dock = Dock(self.memory, cast("Any", None), Counter())
        self.batch = RunningBatch(self.ledger, 8)
        self.runner = GhostRunner(self.storage, self.ledger)
        self.news: list[tuple[Key, Any]] = []
        self.effects: list[Effect] = []
        self.requests: list[RequestState] = []
        self.tickets: dict[int, tuple[Key, int]] = {}
        self._withdrawing = 0
        self.landing: LandingWork | None = None
        self.scrubs: tuple[tuple[Key, int, Room], ...] = ()
        self.step: tuple[tuple[int, Room, SequenceStep], ...] = ()
        self._holdings: dict[tuple[int, int, int], AttemptHolding] = {}
        self._sequences = [self._sequence(index, cast("Any", None)) for index in range(len(scenario.specs))]
        self._inboxes: dict[Key, NamedInbox] = {}
        fresh = BlockPool(num_blocks)
        remains = REMAINS * (len(self.storage.save()) // len(REMAINS))
        requests = tuple(RequestState() for _ in scenario.specs)
        self.fresh = DecodeState(fresh, fresh.key(), self.ledger.save(), remains, requests)

    def _next_holder(self) -> Iterator[int]:
        """The id for whoever has just been served: its ticket is known here, and waits no more."""
        while True:
            served = [n for n in self.tickets if n not in self.memory._waiting]
            key, _ = self.tickets.pop(min(served, key=lambda number: number == self._withdrawing))
            yield holder_of(*key)

    # -- states

    def load(self, state: DecodeState) -> None:
        self.kv.pool = state.pool.copy()
        self.ledger.load(state.ledger)
        self.storage.load(state.memory)
        self.requests = list(state.requests)
        self.news.clear()
        queue = self.memory._queue
        queue._tickets = [_Ticket(i + 1, blocks, passed) for i, (_, blocks, passed) in enumerate(state.tickets)]
        queue._next_number = len(state.tickets)
        self.tickets = {i + 1: (key, blocks) for i, (key, blocks, _) in enumerate(state.tickets)}
        self.memory._waiting = {number: ((blocks,), self._taker(key)) for number, (key, blocks) in self.tickets.items()}
        self.dock._book = LeaseBook()
        for lease in state.book:
            self.dock._book._leases[lease.grant.lease_id] = lease
        self.dock._berths = dict(state.berths)
        self.landing, self.scrubs, self.step = state.landing, state.scrubs, state.step
        for index, request in enumerate(state.requests):
            sequence = self._sequences[index]
            sequence.room, sequence.generated = cast("Room", request.room), list(request.generated)
            sequence.is_over = request.is_over
        self.batch._sequences = [self._sequences[index] for index in state.batch]

    def save(self) -> DecodeState:
        pool = self.kv.pool
        pool._generations = [0] * len(pool._generations)
        tickets = tuple((self.tickets[t.number][0], t.num_blocks, t.num_bypassed) for t in self.memory._queue._tickets)
        return DecodeState(
            pool,
            pool.key(),
            self.ledger.save(),
            self.storage.save(),
            tuple(replace(request, room=plain(request.room)) if request.room else request for request in self.requests),
            tickets,
            self.dock._book.key(),
            tuple(sorted(self.dock._berths.items())),
            self.landing,
            tuple((key, epoch, cast("Room", plain(room))) for key, epoch, room in self.scrubs),
            tuple(self._sequences.index(sequence) for sequence in self.batch._sequences),
            self.step,
        )

    @property
    def pool(self) -> BlockPool:
        return self.kv.pool

    # -- the parts that a server's methods are made of

    def holding(self, index: int) -> AttemptHolding:
        """What the request's attempt holds, as the state has it."""
        request = self.requests[index]
        holding = self.holding_of((index, request.attempt_number), request.epoch)
        holding.rooms, holding.lease = (request.room,) if request.room else (), request.lease
        return holding

    def holding_of(self, key: Key, epoch: int) -> AttemptHolding:
        """Any attempt's, also of one that is over."""
        name = (*key, epoch)
        if name not in self._holdings:
            proposal = proposal_value(key[0], self.scenario.specs[key[0]], key[1], epoch)
            self._holdings[name] = AttemptHolding(proposal, self.kv, self.dock)
        return self._holdings[name]

    def inbox(self, key: Key) -> NamedInbox:
        return self._inboxes.setdefault(key, NamedInbox(key, self.news))

    def ask_room(self, key: Key) -> None:
        sizes = self.holding(key[0]).sizes
        self.tickets[self.memory._queue._next_number + 1] = (key, sum(sizes))
        self.memory.ask(sizes, self._taker(key))

    def _taker(self, key: Key) -> Callable[[Rooms], None]:
        return lambda rooms: self.room_came(key, *rooms)

    def room_came(self, key: Key, room: Room) -> None:
        self.effects.append(("touched", key, "held at decode"))
        self.holding(key[0]).take((room,))
        self.requests[key[0]] = replace(self.requests[key[0]], room=room)
        self.scrubs = (*self.scrubs, (key, self.requests[key[0]].epoch, room))

    def withdraw_ticket(self, key: Key) -> None:
        for number, (owner, _) in tuple(self.tickets.items()):
            if owner == key:
                self._withdrawing = number
                self.memory.withdraw(number)
                if number not in self.memory._waiting:
                    self.tickets.pop(number, None)

    def text_begins(self, index: int, room: Room, drawn: DrawnToken) -> None:
        """The prompt has arrived: as the service does it."""
        request = request_value(index, self.scenario.specs[index])
        sequence = self._sequences[index]
        sequence.room, sequence.generated, sequence.is_over = room, [], False
        num_prompt_blocks = -(-len(request.prompt_token_ids) // self.kv.block_size)
        self.kv.pool.publish(room.holder, room.handles[:num_prompt_blocks])
        if not sequence.take(drawn):
            self.batch.join(sequence)

    def text_ends(self, index: int) -> None:
        """The request's text has ended, whatever the cause: as the service's last lines do it."""
        sequence = self._sequences[index]
        sequence.is_over = True
        self.batch.leave(sequence)
        self.kv.free(sequence.room)

    def heard(self, index: int) -> list[SequenceEvent]:
        events, heard = self._sequences[index].events, []
        while not events.empty():
            heard.append(events.get_nowait())
        return heard

    def tokens(self, index: int) -> tuple[tuple[int, ...], bool]:
        sequence = self._sequences[index]
        return tuple(sequence.generated), sequence.is_over

    def step_begins(self) -> None:
        taken = begin_step(self.batch, self.kv)
        self.step = tuple((self._sequences.index(seq), seq.room, step) for seq, step in taken)

    def step_ends(self, failing: frozenset[int]) -> None:
        work, self.step, self.runner.failing = self.step, (), failing
        taken = [(self._at_work(index, room), step) for index, room, step in work]
        results = run_isolated(self.runner, [step for _, step in taken])
        unpin_step(taken, self.kv)
        publish_step(self.batch, taken, results)

    def _at_work(self, index: int, room: Room) -> Sequence:
        """The sequence that the step was begun for, even if the request has gone on without it."""
        sequence = self._sequences[index]
        if sequence.room == room:
            return sequence
        ended = self._sequence(index, room)
        ended.is_over = True
        return ended

    def _sequence(self, index: int, room: Room) -> Sequence:
        request = request_value(index, self.scenario.specs[index])
        # The servers free the room in this very moment; here it is free when the end is heard, see docs/proof.md.
        (sequence,) = Sequence.begin(request, (room,), asyncio.Queue(), on_end=lambda choice: None)
        return sequence

    def rooms(self) -> list[tuple[int, Room]]:
        return [(i, r.room) for i, r in enumerate(self.requests) if r.room is not None]

    def rooms_at_work(self) -> list[tuple[int, Room]]:
        rooms = [room for _, room, _ in self.step] + [room for _, _, room in self.scrubs]
        if self.landing is not None:
            rooms.append(self.landing.docking.berth.room)
        return [(request_of(room.holder), room) for room in rooms]
