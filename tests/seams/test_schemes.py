"""How much of a Quark checkpoint counts as MXFP8; the other formats are covered by real configurations."""

from types import SimpleNamespace

import pytest

from vllm_rose_plugin.layers.schemes import mxfp8_share

MXFP8 = {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}


def scheme(weight, activation):
    return {"weight": weight, "input_tensors": activation, "output_tensors": None, "bias": None}


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({"global_quant_config": scheme(MXFP8, MXFP8), "layer_quant_config": {}}, "all"),
        ({"global_quant_config": scheme([MXFP8], MXFP8), "layer_quant_config": {}}, "all"),
        ({"global_quant_config": scheme(FP8, FP8), "layer_quant_config": {"*experts*": scheme(MXFP8, MXFP8)}}, "some"),
        ({"global_quant_config": scheme(MXFP4, FP8), "layer_quant_config": {}}, "none"),
        ({"global_quant_config": scheme([FP8, MXFP4], MXFP8), "layer_quant_config": {}}, "none"),
        ({"global_quant_config": scheme(FP8, FP8), "layer_quant_config": None}, "none"),
    ],
)
def test_quark(config, share):
    assert mxfp8_share(SimpleNamespace(get_name=lambda: "quark", quant_config=config)) == share
