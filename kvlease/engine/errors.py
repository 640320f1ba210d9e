"""Errors of the engine.

    EngineError
    ├── UnsupportedDtype     no such number format here, or not on this device
    ├── UnsupportedDevice    neither 'cpu' nor a 'cuda' device that is present
    ├── UnsupportedFeature   the model needs something that the engine does not do; the message names it
    ├── WeightsInvalid       the folder's weights could not be loaded, or do not fill the model
    ├── EngineFailed         a forward pass raised; nothing that it wrote is proven
    └── LogitsNotFinite      some steps of a pass got NaN or infinity; the others of the same pass are complete

The first four stop a server's start; the last two end requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvlease.sampling.tokens import DrawnToken


class EngineError(Exception):
    """Root of this tree. `retryable`: the same request may do better on another server."""

    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "engine_failed"


class UnsupportedDtype(EngineError):
    """The number format is unknown, or this device cannot compute in it."""


class UnsupportedDevice(EngineError):
    """The device is unknown or absent."""


class UnsupportedFeature(EngineError):
    """The model's configuration asks for something that would make its text depend on what shares the batch, or that we do not compute."""


class WeightsInvalid(EngineError):
    """The weights are missing, unreadable or incomplete."""


class EngineFailed(EngineError):
    """A forward pass did not complete. The slots that it was to write stay unproven; the pass may be run again."""

    retryable: ClassVar[bool] = True


class LogitsNotFinite(EngineError):
    """Rows whose logits hold NaN or infinity, for which there is no token.

    `failed` are indices into what the caller passed; `drawn` has the tokens of all the others, so that one broken request ends alone.
    """

    def __init__(self, failed: Sequence[int], drawn: Sequence[tuple[DrawnToken, ...]]) -> None:
        """`failed` is not empty; what `drawn` has where `failed` points is of no use."""
        self.failed = tuple(failed)
        self.drawn = tuple(drawn)
        super().__init__(f"the model gave logits that are not finite (rows {', '.join(map(str, self.failed))})")
