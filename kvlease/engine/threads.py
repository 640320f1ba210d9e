"""How many threads one operation may use.

Never: imports torch before `prepare_environment` had its chance; OpenMP reads its variables when torch is loaded.
"""

from __future__ import annotations

import os
import sys

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def prepare_environment(num_threads: int) -> None:
    """For a composition root, before anything imports torch or numpy: bound every thread pool that they would make."""
    assert num_threads >= 1, f"at least one thread, got {num_threads}"
    assert "torch" not in sys.modules, "too late: torch has read its environment already"
    for name in _VARIABLES:
        os.environ[name] = str(num_threads)
    # Tokenizers would otherwise keep a pool of its own, and warn after every fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def set_threads(num_threads: int) -> None:
    """Bound torch's own pools; to be called before the first operation, which fixes the inter-operation pool for good."""
    import torch  # noqa: PLC0415  see above

    assert num_threads >= 1, f"at least one thread, got {num_threads}"
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
