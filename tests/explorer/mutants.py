"""Every guard of the safety argument, removed in turn as an edit of a copy of the sources; what each removal breaks is the proof that it guards.

Where two guards cover the same ground both are removed, or the second would hide the first. Nothing shipped can weaken a guard.
"""

from __future__ import annotations

from dataclasses import dataclass

Edit = tuple[str, str, str]  # file, what stands there exactly once, what is to stand there


@dataclass(frozen=True, slots=True)
class Mutant:
    """`caught_by`: promises one of which the explorer must find broken, or the one test that must fail. `kin`: the field's faults.

    `looks_at_rests` False: what is left over when all is over is not judged, so that the way leads to the bytes.
    """

    guard: str
    edits: tuple[Edit, ...]
    caught_by: tuple[str, ...] = ()
    test: str = ""
    kin: str = ""
    looks_at_rests: bool = True


_DOCK, _HOLDING, _WORKER = "decode_server/landing.py", "decode_server/holding.py", "decode_server/worker.py"
_LANDING, _POOL, _LEDGER = "kvlease/kvcache/landing.py", "kvlease/kvcache/pool.py", "kvlease/kvcache/ledger.py"
_DECODE, _PREFILL = "kvlease/handoff/decode_attempt.py", "kvlease/handoff/prefill_attempt.py"
_LINE = "prefill_server/departure.py"
_SEALER, _COMPUTE, _PROMPTS = "kvlease/kvcache/departure.py", "prefill_server/worker.py", "prefill_server/prompts.py"

_NO_LANDING_PINS: tuple[Edit, ...] = (
    (_DOCK, "        self._memory.kv.pin((berth.room,))\n", ""),
    (_DOCK, "        self._memory.kv.unpin((docking.berth.room,))\n", ""),
)
_NO_FOREIGN_CHECK: Edit = (_LANDING, "    assert occupancy is not Occupancy.FOREIGN", "    assert True or occupancy")
_NO_CONFIRM: tuple[Edit, ...] = (
    (_SEALER, "    computed.confirm(first_position, num_valid)\n    runs", "    runs"),
    (_SEALER, "    computed.confirm(first_position, num_valid)  # again", "    # again"),
)
_NO_PINS: tuple[Edit, ...] = (
    (_POOL, "        self._live(holder).num_pins += 1", "        self._live(holder)"),
    (
        _POOL,
        "        holding = self._known(holder)\n        assert holding.num_pins > 0",
        "        return ()\n        assert holding.num_pins > 0",
    ),
)
_DEAF = """        case Ended(cause) if cause.reason is AbortReason.{}:
            return attempt, ()
        case Ended(cause):
"""
_NO_PROOF: Edit = (_LEDGER, "        if not proven.all():", "        if False:")

MEMORY: tuple[Mutant, ...] = (
    Mutant("a landing pins its room", _NO_LANDING_PINS, ("P1",), kin="B021"),
    Mutant(
        "a lease ends with its attempt",
        (
            (_HOLDING, "        if self.lease is not None:", "        if self.lease is not None and keep_rooms:"),
            *_NO_LANDING_PINS,
            _NO_FOREIGN_CHECK,
        ),
        ("P1",),
        kin="B024",
        looks_at_rests=False,
    ),
    Mutant("pins are counted", ((_POOL, "num_pins += 1", "num_pins = 1"),), ("P10",), kin="B041"),
    Mutant("a free waits for local threads", _NO_PINS, ("P1",)),
    Mutant(
        "only a running thread's blocks wait",
        ((_POOL, "return () if holding.num_pins else self._drop(holder)", "return ()"),),
        ("P5", "P10"),
    ),
    Mutant(
        "the token loop pins what it reads",
        (
            (_WORKER, "        kv.pin([sequence.room for sequence, _ in taken])", "        pass"),
            (_WORKER, "    kv.unpin([sequence.room for sequence, _ in taken])", "    pass"),
        ),
        ("P1",),
    ),
    Mutant(
        "a sealing pins its room, and its proof is asked again behind the copy",
        (
            (_LINE, "        self._kv.pin((room,))\n", ""),
            (_LINE, "        self._kv.unpin((sealing.room,))\n", "        pass\n"),
            *_NO_CONFIRM,
        ),
        ("P1", "P11"),
    ),
    Mutant(
        "the digest of the copy is compared",
        ((_LANDING, "    if digest != seal.digest:", "    if digest is None:"),),
        ("P1",),
    ),
    Mutant(
        "blocks out of the free list are unproven",
        (("kvlease/kvcache/memory.py", "        self.ledger.clear(room.table)\n", ""),),
        ("P1", "P10"),
    ),
    Mutant(
        "decode scrubs what it writes slot by slot",
        (
            (
                _HOLDING,
                "        self._kv.scrub(rooms[0], len(self._proposal.prompt_token_ids) // self._kv.block_size)",
                "        pass",
            ),
        ),
        ("P8",),
    ),
    Mutant(
        "prefill scrubs before it computes",
        ((_COMPUTE, "                self.kv.scrub(chunk.room)", "                pass"),),
        ("P8",),
    ),
    Mutant(
        "a block counts only under a living lease",
        ((_DOCK, "        elif self._book.find(lease_id) is None:", "        elif False:"),),
        ("P10",),
    ),
)

HANDOFF: tuple[Mutant, ...] = (
    Mutant(
        "a sequence runs only when its blocks are whole",
        ((_DECODE, "if attempt.commit is None or not attempt.lease.is_whole:", "if attempt.commit is None:"),),
        ("P10",),
    ),
    Mutant(
        "the same, and attention takes only what is proven",
        (
            (_DECODE, "if attempt.commit is None or not attempt.lease.is_whole:", "if attempt.commit is None:"),
            _NO_PROOF,
        ),
        ("P1",),
        kin="the incident",
    ),
    Mutant(
        "the verdict asks whether the prompt fits",
        (("kvlease/handoff/verdicts.py", "    if num_tokens > limit:", "    if False:"),),
        ("P6",),
    ),
    Mutant(
        "decode's door asks the same",
        (
            ("kvlease/handoff/verdicts.py", "    if num_tokens >= limit:", "    if False:"),
            ("kvlease/handoff/verdicts.py", "    if num_tokens + request.max_tokens > limit:", "    if False:"),
        ),
        ("P6",),
    ),
    Mutant(
        "a rejected prompt is not queued",
        ((_PREFILL, "(SendDown(verdict), Over())", "(SendDown(verdict), Enqueue(), Over())"),),
        ("P3", "P6"),
    ),
    Mutant(
        "a verdict is carried unchanged",
        (
            (
                _DECODE,
                "(Conclude(happening),)\n        case Ready",
                "(Conclude(replace(happening, http_status=500)),)\n        case Ready",
            ),
        ),
        ("P2",),
    ),
    Mutant(
        "a stall ends the attempt",
        (
            (
                _DECODE,
                "        case Ended(cause):\n",
                _DEAF.format("PEER_STALLED"),
            ),
        ),
        ("P6",),
        kin="B059",
    ),
    Mutant(
        "the stream's end ends decode's attempt",
        (
            (
                _DECODE,
                "        case Ended(cause):\n",
                _DEAF.format("PEER_LOST"),
            ),
        ),
        ("P6",),
    ),
    Mutant(
        "the stream's end ends prefill's attempt",
        (
            (
                _PREFILL,
                "            return _end(attempt, cause)\n\n\ndef _moved",
                "            return attempt, ()\n\n\ndef _moved",
            ),
        ),
        ("P6",),
    ),
    Mutant(
        "an attempt that ended stands still",
        (
            (_DECODE, "    if attempt.is_over:\n        return attempt, ()\n    try", "    try"),
            (_PREFILL, "    if attempt.is_over:\n        return attempt, ()\n    try", "    try"),
        ),
        ("P10",),
    ),
    Mutant(
        "an end frees prefill's blocks",
        ((_PREFILL, "held = () if attempt.state is PrefillState.SENT else (Free(),)", "held = ()"),),
        ("P5", "P6", "P10"),
    ),
    Mutant(
        "the manifest frees prefill's blocks",
        ((_PREFILL, "(Free(), SendDown(commit))", "(SendDown(commit),)"),),
        ("P5", "P6"),
    ),
    Mutant(
        "blocks are freed once",
        (
            (_PREFILL, "held = () if attempt.state is PrefillState.SENT else (Free(),)", "held = (Free(),)"),
            (_PROMPTS, "            self.room = None\n", ""),
        ),
        ("P8",),
    ),
    Mutant(
        "only computed blocks are sendable",
        ((_PREFILL, "        return self.num_computed // self.wire_block_size", "        return self.num_blocks"),),
        ("P10",),
    ),
)

QUEUES: tuple[Mutant, ...] = (
    Mutant(
        "who left waits for no room",
        (
            (
                "decode_server/memory.py",
                "        self._queue.withdraw(number)\n        self._waiting.pop(number, None)\n",
                "",
            ),
        ),
        ("P3", "P5", "P10"),
    ),
    Mutant(
        "freed room goes to who waits",
        (("decode_server/memory.py", "        kv.on_free = self._serve\n", ""),),
        ("P6",),
    ),
    Mutant(
        "who left is not computed",
        (("prefill_server/scheduler.py", "            self._waiting.remove(prompt)", "            pass"),),
        ("P5", "P6", "P10"),
    ),
    Mutant(
        "a sequence that ended gets no token",
        (
            (
                "decode_server/sequences.py",
                "        if sequence.is_over or sequence not in self._sequences:",
                "        if False:",
            ),
        ),
        ("P10",),
    ),
)

_STRAYS, _JUDGED = "tests/kvcache/test_stray_writes.py", "tests/kvcache/test_landing.py"


def _identity(check: str, field: str) -> Mutant:
    line = f'        ("{check}", seal.{field}, expectation.{field}, '
    return Mutant(
        f"a seal's {check} is compared",
        ((_LANDING, line, line.replace(f"seal.{field}", f"expectation.{field}")),),
        test=_JUDGED,
    )


#: What needs a forger, a copy torn between its bytes, or a bug of the sender: each has a test that fails without it.
BYTES: tuple[Mutant, ...] = (
    Mutant(
        "the digest is taken of the copy",
        (
            (
                "kvlease/kvcache/canonical.py",
                "            digest.update(target)",
                "            digest.update(content[cursor : cursor + num_bytes])",
            ),
        ),
        test=_STRAYS,
    ),
    Mutant(
        "padding must be zero",
        (
            (
                "kvlease/kvcache/canonical.py",
                "            if bytes(content[cursor : span.end]) != padding:",
                "            if False:",
            ),
        ),
        test=_JUDGED,
    ),
    _identity("lease", "lease_id"),
    _identity("nonce", "nonce"),
    _identity("fingerprint", "fingerprint"),
    Mutant(
        "a seal's position is within the prompt",
        ((_LANDING, "    if seal.position >= len(expectation.chains):", "    if False:"),),
        test=_JUDGED,
    ),
    Mutant(
        "a seal's valid tokens are the prompt's",
        ((_LANDING, "    if seal.num_valid != num_valid:", "    if False:"),),
        test=_JUDGED,
    ),
    Mutant(
        "a seal's chain is the prompt's",
        ((_LANDING, "    if seal.chain != expectation.chains[seal.position]:", "    if False:"),),
        test=_JUDGED,
    ),
    Mutant("a block lands once", ((_LANDING, "    if occupancy is Occupancy.OWN:", "    if False:"),), test=_JUDGED),
    Mutant(
        "a header is tagged",
        (
            (
                "kvlease/kvcache/seal.py",
                "        if not hmac.compare_digest(_tag(body, nonce), header[_SIGNED_BYTES:]):",
                "        if False:",
            ),
        ),
        test="tests/kvcache/test_seal.py",
    ),
    Mutant(
        "only this engine's own slots are sealed",
        (
            (
                _LEDGER,
                "            proven &= self._kind[rows].reshape(-1)[window] == SlotKind.COMPUTED",
                "            pass",
            ),
        ),
        test="tests/kvcache/test_ledger.py",
    ),
    Mutant(
        "a grant belongs to its epoch",
        ((_PREFILL, "    if grant.epoch != attempt.epoch:", "    if False:"),),
        test="tests/handoff/test_attempts.py",
    ),
    Mutant(
        "the manifest agrees with the lease",
        (("kvlease/handoff/lease_book.py", "        if commit.num_blocks != self.num_blocks:", "        if False:"),),
        test="tests/handoff/test_attempts.py",
    ),
)

BY_EXPLORER: tuple[Mutant, ...] = (*MEMORY, *HANDOFF, *QUEUES)
EVERY: tuple[Mutant, ...] = (*BY_EXPLORER, *BYTES)
