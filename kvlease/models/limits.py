"""Named limits of this package.

Never: read from the environment or changed at run time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a folder or a template may cost. Sizes in bytes or characters as named, times in seconds."""

    #: A rendered chat. More than any context that we serve (4 M tokens of 4 characters); stops a template that loops.
    max_rendered_chars: int = 16 << 20
    #: A template's error message on its way to the client: one line of a terminal or two.
    max_template_message_chars: int = 200
    #: JSON files of a model folder; the largest tokenizer.json that we know of has 35 MB.
    max_json_bytes: int = 256 << 20
    #: A safetensors header; the format's own reader has the same bound.
    max_header_bytes: int = 100 << 20
    #: Weights up to this size in all are hashed whole for the fingerprint (0.1 s when warm), larger ones by samples.
    whole_hash_bytes: int = 1 << 30
    #: Number and size of these samples, shared out to the files: 64 MiB are read, or two samples of each file.
    num_hash_samples: int = 64
    hash_sample_bytes: int = 1 << 20
    #: Fetching 93 MB; a line of 1 Mbit/s needs 12 minutes.
    fetch_s: float = 1800.0
    #: One network step of the fetch; an offline machine is told so after this at the latest.
    fetch_stall_s: float = 15.0
    #: Converting; the default model needs half a minute on a busy small machine, large files need disk time.
    convert_s: float = 3600.0


LIMITS = Limits()
