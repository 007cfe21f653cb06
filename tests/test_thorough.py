"""``make test-thorough`` takes values away from tests of ``make test``, never whole tests that have several."""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from thorough import THOROUGH

ROOT = Path(__file__).parent
LEFT_ALONE = {"tests/all_reduce/test_all_reduce_bits.py::test_a_rack_of_72_ranks"}
"""With a single value: the protocol tests run as many ranks, without the compiled code."""


def collected(marker: str) -> dict[str, set[str]]:
    """Values by test."""
    files = sorted({str(ROOT / pattern.split(r"\.py")[0]) + ".py" for pattern in THOROUGH})
    assert all(Path(file).is_file() for file in files)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marker, *files]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, set[str]] = defaultdict(set)
    for line in done.stdout.splitlines():
        if "::" in line:
            name, _, values = line.partition("[")
            found[name].add(values)
    return found


def test_some_values_of_every_test_stay():
    thorough, rest = collected("thorough"), collected("not thorough")
    assert len(thorough) >= len(THOROUGH)
    assert set(thorough) - set(rest) == LEFT_ALONE
