"""kvlease: language models served by separate prefill and decode processes, with KV blocks moved under leases."""

__version__ = "0.1.0"
