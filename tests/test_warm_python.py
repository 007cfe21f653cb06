"""What a program finds in a process forked by warm_python.py is what it would find in a new one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import WARM

LOOK = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "environ": dict(os.environ), "cwd": os.getcwd(), "stdin": sys.stdin.read(),
    "name": __name__, "file": __file__, "vllm": [m for m in sys.modules if m.startswith("vllm")],
}))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "first"), str(tmp_path / "second")]), "ONLY": "here"}


def test_a_script_sees_what_it_would_see_in_a_new_process(tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    argv, stdin = [str(script), "a", "b c"], "given \u00e9"
    warm = WARM.run(argv, env=environment, stdin=stdin, cwd=tmp_path)
    new = subprocess.run(
        [sys.executable, *argv], env=environment, input=stdin, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (warm.returncode, warm.stderr) == (0, "")
    found, expected = json.loads(warm.stdout), json.loads(new.stdout)
    assert found == expected
    assert found["vllm"] == [] and found["environ"]["ONLY"] == "here"


def test_a_module_comes_from_the_working_folder(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "looking.py").write_text(LOOK)
    found = json.loads(WARM.run(["-m", "looking", "a"], env=environment, cwd=tmp_path).stdout)
    assert found["argv"] == [str(tmp_path / "looking.py"), "a"] and found["name"] == "__main__"
    assert found["path"][0] == str(tmp_path)


def test_exit_codes_and_tracebacks(tmp_path: Path, environment: dict[str, str]) -> None:
    for text, code, said in (("raise SystemExit(7)", 7, ""), ("raise ValueError('no')", 1, "ValueError: no\n")):
        script = tmp_path / "ends.py"
        script.write_text(f"print('before')\n{text}\n")
        done = WARM.run([str(script)], env=environment)
        assert (done.returncode, done.stdout) == (code, "before\n")
        assert done.stderr.endswith(said) and bool(done.stderr) == bool(said)


def test_a_program_that_runs_too_long_is_killed_and_the_next_one_runs(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    slow, quick = tmp_path / "slow.py", tmp_path / "quick.py"
    slow.write_text("import time; time.sleep(60)\n")
    quick.write_text("print('quick')\n")
    with pytest.raises(subprocess.TimeoutExpired):
        WARM.run([str(slow)], env=environment, timeout=0.5)
    assert WARM.run([str(quick)], env=environment).stdout == "quick\n"
