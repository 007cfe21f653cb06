"""Refuse a damaged MXFP8 checkpoint while it loads, by the name of the damaged tensor.

vLLM fills parameters with whatever the checkpoint has under their names: a scale tensor that is missing leaves
uninitialised memory, one of another dtype is cast. So the headers of the checkpoint's files are read once per process:
before the load where the files are local, else after it, when vLLM has downloaded them.
"""

from pathlib import Path
from typing import Any

import torch

from vllm_rose_plugin.checkpoint.headers import check_headers
from vllm_rose_plugin.layers.log import logger
from vllm_rose_plugin.layers.schemes import mxfp8_share

_checked: set[str] = set()
NOT_FILES = ("dummy", "tensorizer", "sharded_state", "runai_streamer_sharded")


def check_model(vllm_config: Any, model_config: Any, *, loaded: bool) -> None:
    """Check the checkpoint that is being loaded, once per process.

    Nothing to do for load formats that read no safetensors checkpoint, nor for mixed ones, whose FP8 tensors may
    rightly have other scales.

    Args:
        vllm_config: the configuration; its quantization config is the model's.
        model_config: names the checkpoint.
        loaded: whether its weights have been read, so that its files must be there.

    Raises:
        ValueError: names the first faulty tensors.
    """
    model = str(model_config.model)
    if vllm_config.load_config.load_format in NOT_FILES or model in _checked:
        return
    if vllm_config.quant_config is None or mxfp8_share(vllm_config.quant_config) != "all":
        return
    directory = local_directory(model, model_config.revision)
    if directory is None:
        if loaded:
            _checked.add(model)
            logger.warning_once("MXFP8 header check skipped: no local files of %s found.", model)
        return
    _checked.add(model)
    if not any(directory.glob("*.safetensors")):
        return
    faults = check_headers(directory)
    if faults:
        _checked.discard(model)
        more = f" (and {len(faults) - 3} more; `rose verify {directory}` lists all)" if len(faults) > 3 else ""
        raise ValueError(f"damaged MXFP8 checkpoint {directory}: {'; '.join(faults[:3])}{more}")


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError naming the tensor when it isn't of this dtype and shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, the MXFP8 layer needs {dtype} {list(shape)}; "
            "`rose verify` on the checkpoint shows where it comes from"
        )


def local_directory(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        return None
