"""GPU memory that other GPUs can reach: what this host allows."""
