"""Do the nodes of a recipe exist, and is its image named in a way that stays the same."""

import re
from collections.abc import Iterator

from vllm_rose_plugin import __version__
from vllm_rose_plugin.recipes.check.rose_backends import what_needs_us
from vllm_rose_plugin.recipes.finding import Finding
from vllm_rose_plugin.recipes.hardware import GPUS
from vllm_rose_plugin.recipes.schema import Recipe
from vllm_rose_plugin.seams.seam import SUPPORTED_VLLM

OUR_IMAGE = "vllm-rose"
STOCK_IMAGE = "vllm/vllm-openai"
"""vLLM's own, which has no plugin."""
CUDA_TAGS = ("cu130", "cu134")
"""CUDA of the bases that our image is built on: 13.0 for Hopper and Blackwell, 13.4 for Rubin (`docker/`)."""
_MOVING_TAGS = ("latest", "nightly", "main", "dev")


def check_hardware(recipe: Recipe) -> Iterator[Finding]:
    """Nodes against the rack, GPUs against the node, and a tag that doesn't move."""
    hardware, gpu = recipe.hardware, GPUS[recipe.hardware.gpu]
    if hardware.gpus_per_node > gpu.gpus_per_node:
        yield recipe.finding(
            ("hardware", "gpus_per_node"),
            hardware.gpus_per_node,
            f"is more than a node of {gpu.name} has",
            f"1 to {gpu.gpus_per_node}",
            f"write gpus_per_node: {gpu.gpus_per_node}",
        )
    if 1 < gpu.nodes_per_rack < hardware.first_node + hardware.nodes:
        yield recipe.finding(
            ("hardware", "nodes"),
            hardware.nodes,
            f"from first_node {hardware.first_node} on is more than the {gpu.nodes_per_rack} nodes of a rack",
            f"first_node + nodes up to {gpu.nodes_per_rack}",
            "lower one of them",
        )
    yield from _check_image(recipe)
    yield from _check_status(recipe)
    if (
        recipe.kv_transfer is not None
        and recipe.kv_transfer.transport == "ucx/nvlink-fabric"
        and gpu.nodes_per_rack == 1
    ):
        yield recipe.finding(
            ("kv_transfer", "transport"),
            recipe.kv_transfer.transport,
            f"{gpu.name} nodes share no NVLink fabric",
            "ucx/ib",
            "write transport: ucx/ib",
        )


def _check_status(recipe: Recipe) -> Iterator[Finding]:
    """A recipe that says it was measured names the file with the figures, from the root of the tree."""
    figures = recipe.status.partition(": ")[2]
    root = recipe.path.resolve().parent.parent
    if figures and not (root / figures).is_file():
        problem, legal = f"names {figures}, and {root} has no such file", "a file with the figures, or not measured"
        yield recipe.finding(("status",), recipe.status, problem, legal, "name the file, or write not measured")


def _check_image(recipe: Recipe) -> Iterator[Finding]:
    """No moving tag; of our own image, this version for the GPU's CUDA; of vLLM's, a version that flags were checked
    against, and none of our backends. Of other images nothing is known."""
    keys, tag = ("container", "tag"), recipe.container.tag
    needed = CUDA_TAGS[-1:] if GPUS[recipe.hardware.gpu].compute_capability >= (10, 7) else CUDA_TAGS
    ours = [f"{__version__}-{cuda}" for cuda in needed]
    legal, cure = " or ".join(ours), f"write tag: {ours[0]}"
    if tag in _MOVING_TAGS:
        yield recipe.finding(keys, tag, "names another image tomorrow", f"a version, such as {ours[0]}", cure)
    elif recipe.container.image == OUR_IMAGE and tag not in ours:
        problem = f"is no tag of {OUR_IMAGE} {__version__} for {recipe.hardware.gpu}"
        yield recipe.finding(keys, tag, problem, legal, cure)
    elif recipe.container.image == STOCK_IMAGE:
        version = re.fullmatch(r"v(\d+\.\d+)\.\d+(-.+)?", tag)
        if version is None or version[1] not in SUPPORTED_VLLM:
            legal = " or ".join(f"v{minor}.N" for minor in SUPPORTED_VLLM)
            problem = "holds a vLLM whose flags aren't known here"
            yield recipe.finding(keys, tag, problem, legal, f"write tag: v{SUPPORTED_VLLM[-1]}.0")
        needed_for = [(name, what) for name, role in recipe.roles.items() if (what := what_needs_us(role))]
        if needed_for:
            problem = "has no plugin, and in {} {}".format(*needed_for[0])
            cure = f"write image: {OUR_IMAGE}, tag: {ours[0]}"
            yield recipe.finding(("container", "image"), STOCK_IMAGE, problem, "an image with this plugin", cure)
