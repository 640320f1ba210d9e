"""The prefill server of the explored world: its shipped objects, put back into any state and taken out of it again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from kvlease.handoff.messages import AbortReason, Proposal, Verdict
from kvlease.handoff.prefill_attempt import EndedHere, Judged, PrefillAttempt, PrefillHappening
from kvlease.handoff.verdicts import PrefillFacts, aborted, judge_prompt
from kvlease.kvcache.departure import DepartureLease
from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.ledger import ComputedBlocks
from kvlease.kvcache.memory import KVMemory, Room
from kvlease.kvcache.pool import BlockPool
from prefill_server.departure import DepartureLine, Sealing
from prefill_server.prompts import Prompt
from prefill_server.scheduler import Chunk, PromptQueue
from prefill_server.worker import ComputeLoop
from tests.explorer.ghost import (
    BLOCK_SIZE,
    FRAME_BYTES,
    REMAINS,
    GhostLedger,
    GhostRunner,
    GhostStorage,
    holder_of,
    plain,
    request_of,
)
from tests.explorer.net import Key
from tests.explorer.requests import FINGERPRINT, VOCABULARY, Scenario, proposal_value
from tests.explorer.side import Effect
from tests.explorer.trails import Trails

PromptKey = tuple[int, int, int]  # request, attempt, epoch


@dataclass(frozen=True, slots=True)
class PromptState:
    attempt: PrefillAttempt
    room: Room | None
    computed: ComputedBlocks | None
    lease: DepartureLease | None


@dataclass(frozen=True, slots=True)
class PrefillState:
    """Everything that a prefill server knows. `chunks`: the pass at work; `sealing`: the block that is being sealed."""

    pool: BlockPool
    pool_key: tuple[object, ...]
    ledger: bytes
    memory: bytes
    prompts: tuple[tuple[PromptKey, PromptState], ...] = ()
    waiting: tuple[PromptKey, ...] = ()
    begun: tuple[PromptKey, ...] = ()
    line: tuple[PromptKey, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    sealing: Sealing | None = None
    number: int = field(default=-1, compare=False)

    def key(self) -> tuple[object, ...]:
        """The same, hashable; a prompt by its name."""
        chunks = tuple((c.prompt.name, c.room, c.end, c.is_new, c.step) for c in self.chunks)  # type: ignore[attr-defined]
        s = self.sealing
        sealing = s and (s.prompt.name, s.room, s.computed, s.lease, s.position)  # type: ignore[attr-defined]
        return (
            *(self.pool_key, self.ledger, self.memory, self.prompts),
            *(self.waiting, self.begun, self.line, chunks, sealing),
        )


class NamedPrompt(Prompt):
    """The shipped prompt; its name says which of the world's it is."""

    name: PromptKey
    trails: Trails | None = None

    def happen(self, happening: PrefillHappening) -> PrefillAttempt:
        before = self.attempt
        after = super().happen(happening)
        if self.trails is not None:
            self.trails.prefill(before, happening, after)
        return after


class PrefillServer:
    """One set of shipped objects for all states."""

    def __init__(self, scenario: Scenario, trails: Trails) -> None:
        self._scenario, self._trails = scenario, trails
        num_blocks = scenario.prefill_blocks
        self.storage, self.ledger = GhostStorage(num_blocks), GhostLedger(num_blocks)
        self.kv = KVMemory(BlockPool(num_blocks), self.ledger, self.storage)
        self.kv._holders = cast("Any", self._next_holder())
        self.queue = PromptQueue(self.kv, scenario.chunk_tokens)
        self.runner = GhostRunner(self.storage, self.ledger)
        self.loop = ComputeLoop(self.queue, self.kv, self.runner, cast("Any", None))
        self._lines: dict[int, DepartureLine] = {}  # of each epoch's pair
        self._prompts: dict[PromptKey, NamedPrompt] = {}  # all that ever were, over all states
        self.here: dict[PromptKey, NamedPrompt] = {}  # those of this state
        self.chunks: tuple[Chunk, ...] = ()
        self.sealing: Sealing | None = None
        self.effects: list[Effect] = []
        fresh = BlockPool(num_blocks)
        remains = REMAINS * (len(self.storage.save()) // len(REMAINS))
        self.fresh = PrefillState(fresh, fresh.key(), self.ledger.save(), remains)

    def _next_holder(self) -> Iterator[int]:
        while True:
            prompt = cast("NamedPrompt", self.queue._waiting[0])
            yield holder_of(*prompt.name[:2])

    # -- states

    def load(self, state: PrefillState) -> None:
        self.kv.pool = state.pool.copy()
        self.ledger.load(state.ledger)
        self.storage.load(state.memory)
        self.here = {}
        for name, saved in state.prompts:
            prompt = self.here[name] = self._prompts[name]
            prompt.attempt, prompt.room, prompt.computed, prompt.lease = (
                saved.attempt,
                saved.room,
                saved.computed,
                saved.lease,
            )
        self.queue._waiting = deque(self.here[name] for name in state.waiting)
        self.queue._begun = [self.here[name] for name in state.begun]
        for epoch, line in self._lines.items():
            line._prompts = deque(self.here[name] for name in state.line if name[2] == epoch)
        self.chunks, self.sealing = state.chunks, state.sealing

    def save(self) -> PrefillState:
        pool = self.kv.pool
        pool._generations = [0] * len(pool._generations)
        at_work = {cast("NamedPrompt", c.prompt).name for c in self.chunks}
        if self.sealing is not None:
            at_work.add(cast("NamedPrompt", self.sealing.prompt).name)
        waiting, begun = _names(self.queue._waiting), _names(self.queue._begun)
        line = tuple(name for line in self._lines.values() for name in _names(line._prompts))
        kept = at_work.union(waiting, begun, line)
        names = sorted(n for n, p in self.here.items() if not p.attempt.is_over or p.room is not None or n in kept)
        prompts = tuple(
            (name, PromptState(p.attempt, plain(p.room), p.computed, p.lease))
            for name, p in ((name, self.here[name]) for name in names)
        )
        return PrefillState(
            pool,
            pool.key(),
            self.ledger.save(),
            self.storage.save(),
            prompts,
            waiting,
            begun,
            line,
            tuple(replace(chunk, room=cast("Room", plain(chunk.room))) for chunk in self.chunks),
            self.sealing,
        )

    @property
    def pool(self) -> BlockPool:
        return self.kv.pool

    # -- what happens

    def propose(self, key: Key, proposal: Proposal, living_epoch: int | None) -> None:
        """A proposal arrives. Without a living pair nobody hosts it: it gets its verdict, and the stream ends."""
        verdict = self._judge(proposal, living_epoch)
        self.effects.append(("verdict", key, verdict))
        if living_epoch is None:
            self.effects += [("down", key, verdict), ("down", key, None)]
        else:
            self._host((*key, proposal.epoch), verdict)
            self._relay()

    def _judge(self, proposal: Proposal, living_epoch: int | None) -> Verdict:
        facts = PrefillFacts(
            self._scenario.prefill_blocks * BLOCK_SIZE,
            self._scenario.prefill_blocks * BLOCK_SIZE,
            VOCABULARY,
            self.queue.num_waiting,
            8,
            draining=False,
            epoch=cast("Any", living_epoch),
            fingerprint=FINGERPRINT,
        )
        return judge_prompt(proposal, facts)

    def _host(self, name: PromptKey, verdict: Verdict) -> None:
        prompt = self._prompts.get(name)
        if prompt is None:
            request, attempt, epoch = name
            proposal = proposal_value(request, self._scenario.specs[request], attempt, epoch)
            prompt = self._prompts[name] = NamedPrompt(proposal, BLOCK_SIZE, self.kv, self.queue, self.line(epoch))
            prompt.name, prompt.trails = name, self._trails
        prompt.attempt = PrefillAttempt.of(prompt.proposal, BLOCK_SIZE)
        prompt.room = prompt.computed = prompt.lease = None
        self.here[name] = prompt
        prompt.happen(Judged(verdict))

    def hear(self, key: Key, happening: PrefillHappening) -> None:
        """Something happens to an attempt; nothing if its prompt has ended."""
        for name, prompt in self.here.items():
            if name[:2] == key:
                prompt.happen(happening)
        self._relay()

    def lose_pair(self, epoch: int) -> None:
        for name, prompt in tuple(self.here.items()):
            if name[2] == epoch:
                prompt.happen(EndedHere(aborted(AbortReason.PEER_LOST, "the pair is lost")))
        self._relay()

    def _relay(self) -> None:
        for name, prompt in self.here.items():
            while not prompt.outbox.empty():
                self.effects.append(("down", name[:2], prompt.outbox.get_nowait()))

    def begin_pass(self) -> None:
        self.chunks = tuple(self.loop.begin())
        self._touch("held at prefill")
        self._relay()

    def _touch(self, what: str) -> None:
        self.effects += [("touched", cast("NamedPrompt", c.prompt).name[:2], what) for c in self.chunks]

    def end_pass(self, failing: frozenset[int]) -> None:
        self._touch("computed")
        chunks, self.chunks, self.runner.failing = list(self.chunks), (), failing
        results = self.loop.compute(chunks)
        self.loop.unpin(chunks)
        self.loop.publish(chunks, results)
        self._relay()

    @property
    def lines(self) -> list[DepartureLine]:
        return list(self._lines.values())

    def line(self, epoch: int) -> DepartureLine:
        if epoch not in self._lines:
            self._lines[epoch] = DepartureLine(self.kv, cast("Any", None), Counter())
        return self._lines[epoch]

    def begin_seal(self, epoch: int) -> None:
        self.sealing = self.line(epoch).begin()

    def end_seal(self, living_epoch: int | None) -> None:
        """As the line's loop does it; where its pair has ended, the block goes nowhere."""
        sealing, self.sealing = self.sealing, None
        assert sealing is not None, "a seal ends that was begun"
        name = cast("NamedPrompt", sealing.prompt).name
        line, target, num_bytes = self.line(name[2]), bytearray(FRAME_BYTES), 0
        is_cancelled = name[2] != living_epoch
        try:
            num_bytes = line.seal(sealing, memoryview(target))
        except UnprovenSlot as error:
            if not is_cancelled:
                sealing.prompt.happen(EndedHere(aborted(AbortReason.ENGINE_FAILED, str(error))))
        line.sealed(sealing)
        if not is_cancelled and line.may_leave(sealing):
            line.left(sealing)
            self.effects.append(("frame", name[:2], sealing.position, bytes(target[:num_bytes])))
        self._relay()

    def rooms(self) -> list[tuple[int, Room]]:
        """Who lives here and holds something."""
        return [(name[0], p.room) for name, p in self.here.items() if p.room is not None]

    def rooms_at_work(self) -> list[tuple[int, Room]]:
        rooms = [c.room for c in self.chunks] + ([self.sealing.room] if self.sealing else [])
        return [(request_of(room.holder), room) for room in rooms]


def _names(prompts: Any) -> tuple[PromptKey, ...]:
    return tuple(prompt.name for prompt in prompts)
