"""Random weights of a served model that behave as trained ones do, in place of vLLM's dummy weights.

vLLM's own are all within 0.001 and the same numbers in every tensor: states don't depend on layers, and every layer
routes a token to the same experts. Speed depends on both, through the experts that a batch needs.
"""

from typing import Any

RANDOM_WEIGHTS = {"load_format": "dummy", "worker_extension_cls": "random_weights_worker.RandomWeights"}
"""Arguments of an engine, in a process that has this folder among those it imports from."""


def give_random_weights(seed: int = 0) -> None:
    """Makes ``load_format="dummy"`` fill matrices with normal numbers of 1/sqrt(columns), and vectors with ones.

    States then have about unit size in every layer, and a router's choices are nearly independent: experts get tokens
    as if drawn at random. Each tensor has other numbers, the same on all ranks. To call in a worker before it makes the
    model: see RANDOM_WEIGHTS.
    """
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    fill_others, filled = dummy_loader.initialize_single_dummy_weight, 0

    def fill(param: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal filled
        if param.dtype not in (torch.bfloat16, torch.float16, torch.float32) or param.device.type == "meta":
            fill_others(param, *args, **kwargs)
            return
        filled += 1
        if param.ndim < 2:
            param.data.fill_(1.0)
            return
        generator = torch.Generator(param.device).manual_seed(1000 * seed + filled)
        param.data.normal_(0.0, param.shape[-1] ** -0.5, generator=generator)

    dummy_loader.initialize_single_dummy_weight = fill
