"""Kernel families. Nothing here imports vLLM."""
