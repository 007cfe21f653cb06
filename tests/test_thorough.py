"""``make test-thorough`` takes values away from tests of ``make test``, never whole tests that have several."""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from thorough import THOROUGH

ROOT = Path(__file__).parent
LEFT_ALONE = {"tests/all_reduce/test_all_reduce_bits.py::test_a_rack_of_72_ranks"}
"""With a single value: the protocol tests run as many ranks, without the compiled code."""


PROGRAM = """
import sys, pytest

class Tell:
    def pytest_collection_finish(self, session):
        for item in session.items:
            print("TEST", "thorough" if item.get_closest_marker("thorough") else "rest", item.nodeid)

sys.exit(pytest.main(["--collect-only", "-qq", "-m", "thorough or not thorough", *sys.argv[1:]], plugins=[Tell()]))
"""


def collected() -> dict[str, dict[str, set[str]]]:
    """Values by test, of those that are thorough and of the rest."""
    files = sorted({str(ROOT / pattern.split(r"\.py")[0]) + ".py" for pattern in THOROUGH})
    assert not [file for file in files if not Path(file).is_file()]
    command = [sys.executable, "-c", PROGRAM, *files]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, dict[str, set[str]]] = {"thorough": defaultdict(set), "rest": defaultdict(set)}
    for line in done.stdout.splitlines():
        if line.startswith("TEST "):
            _, kind, nodeid = line.split(" ", 2)
            name, _, values = nodeid.partition("[")
            found[kind][name].add(values)
    return found


def test_some_values_of_every_test_stay():
    found = collected()
    thorough, rest = found["thorough"], found["rest"]
    assert len(thorough) >= len(THOROUGH)
    assert set(thorough) - set(rest) == LEFT_ALONE
