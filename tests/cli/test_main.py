"""`rose` itself: what becomes of output that can't be written and of Ctrl-C."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_rose_plugin import cli

# One command, "doctor", that does what the code in {body} says.
PROGRAM = """
import sys, types
from vllm_rose_plugin import cli
def run(args):
    {body}
    return 0
cli.COMMANDS = ("doctor",)
module = types.SimpleNamespace(HELP="", add_arguments=lambda parser: None, run=run)
sys.modules["vllm_rose_plugin.cli.doctor"] = module
cli.importlib.import_module = lambda name: module
sys.exit(cli.main(sys.argv[1:]))
"""


def run_full(body: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With a stdout on which every write fails for lack of space."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM.format(body=body), *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**inherited, **environment},
        )


def test_the_help_is_a_list_in_one_style() -> None:
    modules = [cli.importlib.import_module(f"vllm_rose_plugin.cli.{name.replace('-', '_')}") for name in cli.COMMANDS]
    assert all(module.HELP[0].islower() and not module.HELP.endswith(".") for module in modules)


@pytest.mark.parametrize("size", [1, 100_000])  # fails in the last flush; fails in print
def test_output_that_cannot_be_written_is_one_line(size: int) -> None:
    result = run_full(f"print('x' * {size})", "doctor")
    assert result.stderr == "rose doctor: error: can't write the output: No space left on device\n"
    assert result.returncode == os.EX_IOERR


def test_without_buffers_too() -> None:
    result = run_full("print('x')", "doctor", PYTHONUNBUFFERED="1")
    assert result.stderr == "rose doctor: error: can't write the output: No space left on device\n"
    assert result.returncode == os.EX_IOERR


def test_the_help_that_cannot_be_written() -> None:
    result = run_full("pass", "--help")
    assert result.stderr == "rose: error: can't write the output: No space left on device\n"
    assert result.returncode == os.EX_IOERR


def test_a_file_that_cannot_be_read_is_named() -> None:
    result = run_full("open('/nowhere/x')", "doctor")
    assert result.stderr == "rose doctor: error: [Errno 2] No such file or directory: '/nowhere/x'\n"
    assert result.returncode == os.EX_IOERR


def test_wrong_usage_stays_wrong_usage() -> None:
    result = run_full("pass", "nothing")
    assert result.returncode == 2 and "invalid choice" in result.stderr


def test_closed_stdout() -> None:
    command = [sys.executable, "-c", PROGRAM.format(body="print('x')"), "doctor"]
    result = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_ctrl_c_while_commands_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "rose: interrupted\n"
