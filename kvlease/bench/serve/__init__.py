"""Load on a server that speaks OpenAI's HTTP API, ours or another one, and what its clients see."""
