"""The plugin's logger: under vLLM's, so that its format, level and once-only calls apply."""

import logging

from vllm.logger import init_logger

logger = init_logger("vllm.vllm_rose_plugin")

# kernels/ knows no vLLM and logs under its own name: whatever it says goes where vLLM's lines go.
logging.getLogger("vllm_rose_plugin").parent = logging.getLogger("vllm")
