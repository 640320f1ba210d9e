"""The prefill server: the prompt's computation and its departure."""
