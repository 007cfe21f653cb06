"""A program for one vLLM: parses pairs of command lines with its own parser and prints where they differ, as JSON.

stdin: a JSON list of pairs of ``vllm`` command lines. stdout: for each pair the options that differ and both values.
"""

import json
import os
import re
import sys


def main() -> None:
    """Answer the request on stdin."""
    pairs = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints lines of its own
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    cmd_init()[0].subparser_init(parser.add_subparsers(dest="subparser"))

    def parse(words: list[str]) -> dict[str, str]:
        args = vars(parser.parse_args(words[1:]))
        args["model"] = args.pop("model_tag", None) or args["model"]  # as ServeSubcommand.cmd does
        args.pop("config", None)
        # An engine of a KV transfer gets a new name each time.
        return {name: re.sub(r"engine_id='[0-9a-f-]{36}'", "engine_id=…", repr(args[name])) for name in args}

    answers = []
    for first, second in pairs:
        one, two = parse(first), parse(second)
        answers.append({name: [one.get(name), two.get(name)] for name in one | two if one.get(name) != two.get(name)})
    json.dump(answers, out)
    out.close()


if __name__ == "__main__":
    main()
