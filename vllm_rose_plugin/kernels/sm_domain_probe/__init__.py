"""Which SMs lie in which locality domain: learned from where a partition's blocks run."""

from vllm_rose_plugin.kernels.sm_domain_probe.launch import forced_sm_domains, learn_sm_domains

__all__ = ["forced_sm_domains", "learn_sm_domains"]
