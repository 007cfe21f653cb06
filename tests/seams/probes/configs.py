"""Resolve engine configurations given as JSON on stdin ({case: EngineArgs keywords}); prints what came of each."""

import json
import re
import sys

from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext


def resolve(keywords):
    config = EngineArgs(skip_tokenizer_init=True, **keywords).create_engine_config(UsageContext.ENGINE_CONTEXT)
    text = re.sub(r"0x[0-9a-f]+|instance_id='[^']*'", "", repr(config))
    speculative = config.speculative_config
    return {
        "repr": text,
        "hash": config.compute_hash(),
        "additional_config": config.additional_config,
        "quant_config": repr(config.quant_config and vars(config.quant_config).keys()),
        "moe_backend": config.kernel_config.moe_backend,
        "draft_moe_backend": speculative.moe_backend if speculative else None,
    }


def main():
    results = {}
    for case, keywords in json.load(sys.stdin).items():
        try:
            results[case] = resolve(keywords)
        except Exception as error:
            results[case] = {"error": str(error)}
    json.dump(results, sys.stdout)


main()
