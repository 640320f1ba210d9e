"""What `deploy/smoke` does, with nothing but the standard library."""
