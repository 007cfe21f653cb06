"""GPU memory that other GPUs can reach: what a host allows, and buffers that a group of ranks shares."""
