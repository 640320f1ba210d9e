"""What a prefill and a decode server agree on: messages, state tables, verdicts, leases. Pure."""
