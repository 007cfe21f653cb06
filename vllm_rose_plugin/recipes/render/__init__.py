"""From a recipe to files: ``vllm serve --config`` files, a Slurm job, Kubernetes objects, a compose file."""
