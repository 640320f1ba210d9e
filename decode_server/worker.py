"""The token loop: one forward pass after the other while anything runs.

Never: touches a sequence's blocks without a pin.
"""

from __future__ import annotations

from decode_server.memory import DecodeMemory
from decode_server.sequences import RunningBatch, Sequence
from kvlease.engine.batch import SequenceStep
from kvlease.engine.isolation import Failure, Result, Runner, run_isolated
from kvlease.engine.work_thread import WorkThread
from kvlease.kvcache.memory import KVMemory

Taken = tuple[Sequence, SequenceStep]


async def decode_tokens(batch: RunningBatch, memory: DecodeMemory, runner: Runner, thread: WorkThread) -> None:
    """Until cancelled."""
    while True:
        await batch.has_work.wait()
        taken = begin_step(batch, memory.kv)
        if not taken:
            continue
        results: list[Result] = []
        try:
            results = await thread.run(run_isolated, runner, [step for _, step in taken])
        finally:
            unpin_step(taken, memory.kv)
        publish_step(batch, taken, results)


def begin_step(batch: RunningBatch, kv: KVMemory) -> list[Taken]:
    """What the next pass computes, its rooms pinned; `unpin_step` must follow unless it is empty."""
    taken = batch.next_steps()
    if taken:
        kv.pin([sequence.room for sequence, _ in taken])
    return taken


def unpin_step(taken: list[Taken], kv: KVMemory) -> None:
    """The engine's thread is done with the rooms."""
    kv.unpin([sequence.room for sequence, _ in taken])


def publish_step(batch: RunningBatch, taken: list[Taken], results: list[Result]) -> None:
    """Give each sequence what its step drew."""
    for (sequence, _), result in zip(taken, results, strict=True):
        if isinstance(result, Failure):
            batch.fail(sequence, result.message)
        else:
            (drawn,) = result  # every decode step wants one token
            batch.publish(sequence, drawn)
