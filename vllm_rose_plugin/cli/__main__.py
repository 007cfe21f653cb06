"""``python -m vllm_rose_plugin.cli``: the same as ``rose``, for a source tree that isn't installed."""

from vllm_rose_plugin.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
