"""The model's folder, fetched and converted when it must be, once it is known that what was asked for fits.

Never: imports torch; leaves a foreign error without the option that caused it.
"""

from __future__ import annotations

from pathlib import Path

from kvlease.cli.capacity import PoolSize, refuse_context_that_does_not_fit
from kvlease.cli.errors import ConfigurationError
from kvlease.cli.settings import Settings
from kvlease.models.errors import ModelUnusable
from kvlease.models.facts import ModelFacts


def prepare(settings: Settings, pools: tuple[PoolSize, ...]) -> Path:
    """The prepared folder of --model. Raises ConfigurationError when there is none, or when --max-model-len does not fit it."""
    from kvlease.models.fetch import prepare_model  # noqa: PLC0415  loads what converts models, which few starts need

    try:
        folder = prepare_model(settings.model, settings.cache)
        facts = ModelFacts.read(folder)
    except ModelUnusable as error:
        raise ConfigurationError(f"--model {settings.model}: {error}") from None
    refuse_context_that_does_not_fit(settings.max_model_len, facts.context_length, pools)
    return folder
