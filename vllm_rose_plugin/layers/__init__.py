"""What vLLM calls: experts and linear kernel."""
