"""``rose``: the plugin's command line."""

import argparse
import importlib
import os
import sys

import vllm_rose_plugin

COMMANDS = (
    "doctor",
    "quantize",
    "verify",
    "mtp",
    "tiny-model",
    "cache",
    "tune",
    "check",
    "render",
    "plan",
    "bench",
)

_DESCRIPTION = "Tools around MXFP8 mixture-of-experts models in vLLM: checkpoints, kernels, deployments."


class UserError(Exception):
    """What the user must change, in one line."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``rose`` with one subparser per command."""
    parser = argparse.ArgumentParser(prog="rose", description=_DESCRIPTION)
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
        2: wrong usage or input. 74: the system refused a read or a write. 130: interrupted.
        141: whoever read the output has gone.
    """
    name = "rose"
    try:
        try:
            args = build_parser().parse_args(argv)
        except SystemExit:  # --help, --version, wrong usage
            _flush_output()
            raise
        name = f"rose {args.command}"
        code = args.run(args)
        _flush_output()
        return code
    except UserError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `rose doctor | head`
        _discard_output()
        return 141
    except OSError as error:
        print(f"{name}: error: {_output_problem(error) or error}", file=sys.stderr)
        return os.EX_IOERR
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _flush_output() -> None:
    """Where a full disk can still be told in one line; at the interpreter's exit it can't."""
    if sys.stdout is not None:  # it is None where the shell closed it
        sys.stdout.flush()


def _output_problem(error: OSError) -> str | None:
    """What is wrong with stdout, where that is what ``error`` is about."""
    if error.filename is not None or sys.stdout is None:
        return None
    try:
        print(flush=True)  # the error doesn't say on what; where it was stdout, this fails too
    except OSError as again:
        _discard_output()
        return f"can't write the output: {again.strerror}"
    return None


def _discard_output() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's exit doesn't fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
