"""Where the vLLMs that tests start keep what they find out about model classes, which takes seconds for each class."""

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def vllm_cache(version: str) -> Path:
    """A folder that processes of one vLLM version may share as ``VLLM_CACHE_ROOT``.

    What vLLM writes bears the same names in both. It looks whether the file of a class has changed, but not what that
    imports; hence one for each state of our sources.
    """
    digest = hashlib.sha256()
    for file in sorted((ROOT / "vllm_rose_plugin").rglob("*.py")):
        digest.update(file.read_bytes())
    return ROOT / "build" / "test-cache" / f"vllm-{version}-{digest.hexdigest()[:12]}"
