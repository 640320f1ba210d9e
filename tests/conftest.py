"""What holds for every test: no network, one thread a process, reproducible properties."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Read when torch and transformers are imported, which no test module has done yet.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

# A shared machine makes single examples slow now and then; pytest-timeout bounds the whole.
settings.register_profile("kvlease", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvlease")
