"""What a block costs on its way: goodput and latency of a transport, with and without the border's copies and checks."""
