"""The two roles' state tables: everything that decides which event may follow which.

An attempt lives on both sides at once, and each side keeps its own state; the messages of the stream are what moves both.
A missing entry is an illegal move and leaves the state as it was. `docs/protocol.md` is printed from these tables.

Never: knows what a state holds; the attempts do.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from kvlease.handoff.errors import IllegalMove


class DecodeState(StrEnum):
    """Where an attempt stands on the decode side."""

    PROPOSED = "proposed"  # the proposal is out; nothing is held
    ADMITTED = "admitted"  # prefill has a place for it; nothing is held here
    WANTED = "wanted"  # prefill asked for the grant; waiting for room
    GRANTED = "granted"  # room is held and blocks may land
    CLOSING = "closing"  # the manifest is here, blocks are still missing
    COMMITTED = "committed"
    COMPLETED = "completed"  # ended by its first token; nothing was transferred
    REJECTED = "rejected"
    ABORTED = "aborted"


class DecodeEvent(StrEnum):
    """What can happen to an attempt on the decode side."""

    ADMITTED = "Admitted arrives"
    REJECTED = "Rejected arrives"
    READY = "Ready arrives"
    ROOM = "room is reserved"
    BLOCK = "a block is verified"
    COMMIT = "Commit arrives"
    WHOLE = "manifest and blocks agree"
    COMPLETE = "Complete arrives"
    END = "it is ended"


class PrefillState(StrEnum):
    """Where an attempt stands on the prefill side."""

    RECEIVED = "received"
    QUEUED = "queued"  # admitted; nothing is held
    COMPUTING = "computing"  # blocks are held and being filled
    OFFERED = "offered"  # the grant was asked for
    SENDING = "sending"  # granted; sealed blocks leave
    SENT = "sent"  # the manifest is out; no engine block is held any more
    RECEIPTED = "receipted"
    COMPLETED = "completed"
    REJECTED = "rejected"
    ABORTED = "aborted"


class PrefillEvent(StrEnum):
    """What can happen to an attempt on the prefill side."""

    ADMIT = "it is admitted"
    REJECT = "it is rejected"
    START = "its first chunk starts"
    CHUNK = "a chunk is computed"
    OFFER = "Ready is sent"
    GRANT = "Grant arrives"
    BLOCK = "a block is sent"
    COMMIT = "Commit is sent"
    COMPLETE = "Complete is sent"
    RECEIPT = "Receipt arrives"
    END = "it is ended"


_D, _E = DecodeState, DecodeEvent
DECODE_TABLE: Final[Mapping[DecodeState, Mapping[DecodeEvent, DecodeState]]] = {
    _D.PROPOSED: {_E.ADMITTED: _D.ADMITTED, _E.REJECTED: _D.REJECTED, _E.END: _D.ABORTED},
    _D.ADMITTED: {_E.READY: _D.WANTED, _E.COMPLETE: _D.COMPLETED, _E.END: _D.ABORTED},
    _D.WANTED: {_E.ROOM: _D.GRANTED, _E.COMPLETE: _D.COMPLETED, _E.END: _D.ABORTED},
    _D.GRANTED: {
        _E.BLOCK: _D.GRANTED,
        _E.COMMIT: _D.CLOSING,
        _E.COMPLETE: _D.COMPLETED,
        _E.END: _D.ABORTED,
    },
    _D.CLOSING: {_E.BLOCK: _D.CLOSING, _E.WHOLE: _D.COMMITTED, _E.END: _D.ABORTED},
    _D.COMMITTED: {},
    _D.COMPLETED: {},
    _D.REJECTED: {},
    _D.ABORTED: {},
}

_P, _F = PrefillState, PrefillEvent
PREFILL_TABLE: Final[Mapping[PrefillState, Mapping[PrefillEvent, PrefillState]]] = {
    _P.RECEIVED: {_F.ADMIT: _P.QUEUED, _F.REJECT: _P.REJECTED, _F.END: _P.ABORTED},
    _P.QUEUED: {_F.START: _P.COMPUTING, _F.END: _P.ABORTED},
    _P.COMPUTING: {
        _F.CHUNK: _P.COMPUTING,
        _F.OFFER: _P.OFFERED,
        _F.COMPLETE: _P.COMPLETED,
        _F.END: _P.ABORTED,
    },
    _P.OFFERED: {
        _F.CHUNK: _P.OFFERED,
        _F.GRANT: _P.SENDING,
        _F.COMPLETE: _P.COMPLETED,
        _F.END: _P.ABORTED,
    },
    _P.SENDING: {
        _F.CHUNK: _P.SENDING,
        _F.BLOCK: _P.SENDING,
        _F.COMMIT: _P.SENT,
        _F.COMPLETE: _P.COMPLETED,
        _F.END: _P.ABORTED,
    },
    _P.SENT: {_F.RECEIPT: _P.RECEIPTED, _F.END: _P.ABORTED},
    _P.RECEIPTED: {},
    _P.COMPLETED: {},
    _P.REJECTED: {},
    _P.ABORTED: {},
}


def decode_move(state: DecodeState, event: DecodeEvent) -> DecodeState:
    """The decode side's next state, or `IllegalMove`."""
    try:
        return DECODE_TABLE[state][event]
    except KeyError:
        raise IllegalMove("decode", state, event) from None


def prefill_move(state: PrefillState, event: PrefillEvent) -> PrefillState:
    """The prefill side's next state, or `IllegalMove`."""
    try:
        return PREFILL_TABLE[state][event]
    except KeyError:
        raise IllegalMove("prefill", state, event) from None


def decode_is_over(state: DecodeState) -> bool:
    """Whether nothing can happen to the attempt on the decode side any more."""
    return not DECODE_TABLE[state]


def prefill_is_over(state: PrefillState) -> bool:
    """Whether nothing can happen to the attempt on the prefill side any more."""
    return not PREFILL_TABLE[state]
