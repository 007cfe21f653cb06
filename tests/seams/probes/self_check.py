"""What layers ask of the self-check, and what vLLM's own warm-up makes of it; prints JSON."""

import json
import logging
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import vllm.model_executor.warmup.jit_warmup as jit_warmup

from vllm_rose_plugin.kernels.jit import chosen, providers
from vllm_rose_plugin.layers import self_check


@dataclass(frozen=True)
class Shape:
    num_tokens: int


MADE, CHECKED = [], []


def make(shape):
    MADE.append(shape.num_tokens)


def always(shape, target):
    return True


FAMILY = providers.Family(
    name="doubling",
    reference=providers.Provider("reference", always, make),
    providers=(providers.Provider("rose", always, make),),
    make_inputs=lambda shape, seed: (),
    compare=lambda a, b: "",
)


def choose(*, family, shapes):
    CHECKED.append([family.name, [shape.num_tokens for shape in shapes]])
    return providers.Choice("rose", {}, None)


def main():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("vllm").addHandler(handler)
    logging.getLogger("vllm").setLevel(logging.INFO)
    logging.getLogger("vllm_rose_plugin.kernels.jit.providers").info("a line of kernels/")

    registry = jit_warmup.JitWarmupRegistry(SimpleNamespace())
    with registry.activate():
        for _ in range(3):  # layers
            self_check.need(FAMILY, Shape)
    result = {"registered": len(registry)}

    self_check.run()
    result["without_gpu"] = {"checked": list(CHECKED), "providers": chosen.snapshot()}
    registry.warmup()
    result["without_gpu"]["made"] = list(MADE)

    self_check._checked.clear()
    self_check.choose = choose
    self_check.device_facts = lambda index: None  # nothing here has configs
    torch.cuda.current_device = lambda: 0
    if len(sys.argv) > 1:  # a loader that our seam never sees: vLLM's warm-up comes first
        torch.cuda.is_available = lambda: True
        torch.cuda.empty_cache = lambda: None
        registry.warmup()
        print(json.dumps({"checked": CHECKED, "providers": chosen.snapshot(), "made": MADE}))
        return
    torch.cuda.is_available = lambda: True
    torch.cuda.empty_cache = lambda: None
    self_check.run()
    self_check.run()  # nothing new
    result["providers"] = chosen.snapshot()
    registry.warmup()
    result["made"] = list(MADE)
    self_check.need(FAMILY, lambda tokens: Shape(3 * tokens))  # a draft model's layer
    self_check.run()
    result["checked"] = CHECKED
    self_check.need_kernels(FAMILY, "layers in parts: mend it so")
    self_check.run()  # nothing new, and kernels serve
    self_check.choose = lambda **_: providers.Choice("reference", {}, None)
    plain = replace(FAMILY, name="plain")
    self_check.need(plain, Shape)
    result["no fallback"] = []
    for _ in range(2):  # when it is checked, and for a later engine of the process
        self_check.need_kernels(plain, "layers in parts: mend it so")
        try:
            self_check.run()
        except providers.NoProviderError as error:
            result["no fallback"].append(str(error))
    self_check.run()  # an engine whose layers are whole
    broken = replace(FAMILY, name="broken")
    self_check.need(broken, Shape)

    def refuse(**_):
        raise providers.NoProviderError("broken: none passed")

    self_check.choose = refuse
    try:
        self_check.run()
    except providers.NoProviderError as error:
        result["error"] = str(error)
    result["lines"] = lines
    print(json.dumps(result))


main()
