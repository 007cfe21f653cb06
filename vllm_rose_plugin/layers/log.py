"""The plugin's logger: under vLLM's, so that its format, level and once-only calls apply."""

from vllm.logger import init_logger

logger = init_logger("vllm.vllm_rose_plugin")
