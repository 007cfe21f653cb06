"""``rose``: the plugin's command line."""

import argparse
import importlib
import os
import sys

import vllm_rose_plugin

COMMANDS = ("doctor", "quantize", "verify", "tiny-model")


class UserError(Exception):
    """What the user must change, in one line."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``rose`` with one subparser per command."""
    parser = argparse.ArgumentParser(prog="rose", description=vllm_rose_plugin.__doc__.split("\n")[0])
    parser.add_argument("--version", action="version", version=f"vllm_rose_plugin {vllm_rose_plugin.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        module = importlib.import_module(f"vllm_rose_plugin.cli.{command.replace('-', '_')}")
        subparser = subparsers.add_parser(command, help=module.HELP, description=module.HELP)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        0: done. 1: the command ran and its answer is no (a checkpoint with faults, serving can't work).
        2: wrong usage or input. 130: interrupted. 141: whoever read the output has gone.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except UserError as error:
        print(f"rose {args.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `rose doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"rose {args.command}: interrupted", file=sys.stderr)
        return 130
