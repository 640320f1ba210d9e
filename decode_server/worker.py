"""The token loop: one forward pass after the other while anything runs.

Never: touches a sequence's blocks without a pin.
"""

from __future__ import annotations

from decode_server.memory import DecodeMemory
from decode_server.sequences import RunningBatch
from kvlease.engine.isolation import Failure, Runner, run_isolated
from kvlease.engine.work_thread import WorkThread


async def decode_tokens(batch: RunningBatch, memory: DecodeMemory, runner: Runner, thread: WorkThread) -> None:
    """Until cancelled."""
    while True:
        await batch.has_work.wait()
        taken = batch.next_steps()
        if not taken:
            continue
        rooms = tuple(sequence.room for sequence, _ in taken)
        memory.kv.pin(rooms)
        try:
            results = await thread.run(run_isolated, runner, [step for _, step in taken])
        finally:
            memory.kv.unpin(rooms)
        for (sequence, _), result in zip(taken, results, strict=True):
            if isinstance(result, Failure):
                batch.fail(sequence, result.message)
            else:
                (drawn,) = result  # every decode step wants one token
                batch.publish(sequence, drawn)
