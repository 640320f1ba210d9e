"""The tokens before the one that is drawn, as penalties need them: which ones there were, and how often each was generated.

Never: costs a request without penalties anything: what is not asked for is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]


class PromptTokens:
    """The distinct ids of a prompt, found when first asked for: texts of one prompt share the answer."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """`token_ids` is kept, not copied."""
        self._token_ids = token_ids

    @cached_property
    def ids(self) -> Ids:
        """Sorted."""
        return np.unique(np.fromiter(self._token_ids, np.int64, len(self._token_ids)))


class PastTokens:
    """A prompt and what was generated behind it. Grows between passes, never during one."""

    def __init__(self, prompt: PromptTokens) -> None:
        """Nothing is generated yet."""
        self._prompt = prompt
        self._generated: Counter[int] = Counter()

    def add(self, token_id: int) -> None:
        """One more was generated."""
        self._generated[token_id] += 1

    def generated(self) -> tuple[Ids, Counts]:
        """The distinct generated ids, and how often each was."""
        ids, counts = self._generated.keys(), self._generated.values()
        return np.fromiter(ids, np.int64, len(ids)), np.fromiter(counts, np.int64, len(counts))

    def seen(self) -> Ids:
        """The distinct ids of prompt and generated tokens together."""
        return np.union1d(self._prompt.ids, self.generated()[0])
