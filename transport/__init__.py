"""The block channel between a prefill and a decode server: one contract, several transports."""
