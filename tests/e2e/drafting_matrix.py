"""Every combination of 1 to 4 speculative tokens, eager and compiled, one and two ranks, both forms, all precisions.

    python tests/e2e/drafting_matrix.py [--only TEXT]

Prints a line for each: how many of 20 continuations of 200 tokens are those of the same engine without drafting, and
the share of accepted drafts by position. Exit code 1 when a token differs. Not part of `make test`, which runs a
covering choice, test_drafted.py and test_mtp_ranks.py.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from drafting_cases import EAGER, EP, ROSE, TEXT_LENGTHS, TP2, engines
from drafting_engine import MARK
from e2e_setup import EXAMPLE, HERE
from transformers import AutoTokenizer
from vllm_server import serve_environment

from vllm_rose_plugin.cli import main as rose

PRECISIONS = {"bf16": ("bf16", "mtp", "b_b"), "mixed": ("mxfp8", "mtp", "m_b"), "mxfp8": ("mxfp8", "mtp_mxfp8", "m_m")}
MODES = {"eager": EAGER, "compiled": {}}
RANKS = {"tp1": {}, "tp2": TP2, "tp2_ep": TP2 | EP}


def table(ranks: str) -> dict[str, tuple]:
    """The cases of one number of ranks, as in drafting_cases.py; precision and form change from one k to the next."""
    found = {}
    for mode, arguments in MODES.items():
        for precision, (target, draft, attached) in PRECISIONS.items():
            flags = arguments | RANKS[ranks] | (ROSE if target == "mxfp8" else {})
            reference = f"{ranks}_{mode}_{target}"
            found.setdefault(reference, (None, target, None, 0, flags, ("texts",)))
            for k in range(1, 5):
                directory = (k + len(precision)) % 2
                served, model = (target, draft) if directory else (attached, "")
                name = f"{ranks}_{mode}_{precision}_{'directory' if directory else 'attached'}_k{k}"
                found[name] = (reference, served, model, k, flags, ("texts",))
    return found


def checkpoints(root: Path) -> dict[str, str]:
    """Targets and drafts, quantized and attached."""
    found = {"bf16": EXAMPLE / "target", "mtp": EXAMPLE / "mtp", "mxfp8": root / "mxfp8", "mtp_mxfp8": root / "draft"}
    rose(["quantize", str(found["bf16"]), str(found["mxfp8"])])
    rose(["quantize", str(found["mtp"]), str(found["mtp_mxfp8"])])
    for target, draft, attached in PRECISIONS.values():
        rose(["mtp", "attach", str(found[target]), str(found[draft]), str(root / attached)])
        found[attached] = root / attached
    return {name: str(path) for name, path in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run cases whose name holds this, and what they are compared with")
    only = parser.parse_args().only
    text = (EXAMPLE / "validation.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(EXAMPLE / "target")(text, add_special_tokens=False, verbose=False)["input_ids"]
    inputs = {"texts": [ids[500 * i :][:length] for i, length in enumerate(TEXT_LENGTHS)], "questions": []}
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        models = checkpoints(Path(directory))
        for ranks in RANKS:
            cases = {name: case for name, case in table(ranks).items() if only in name}
            cases = {case[0]: table(ranks)[case[0]] for case in cases.values() if case[0]} | cases
            plan = Path(directory) / "plan.json"
            plan.write_text(json.dumps({"inputs": inputs, "cases": engines(cases, models)}))
            environment = serve_environment(Path(directory) / "cache", ranks=1 + (ranks != "tp1"))
            if ranks == "tp1":
                environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(HERE / "drafting_engine.py"), str(plan)]
            done = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            wrong += report(done, cases)
    return 1 if wrong else 0


def report(process: subprocess.Popen, cases: dict[str, tuple]) -> int:
    """Print the results as they come; how many were not as without drafting."""
    results: dict[str, dict] = {}
    wrong = 0
    assert process.stdout is not None
    for raw in process.stdout:
        line = raw.decode(errors="replace")
        if not line.startswith(MARK):
            continue
        result = json.loads(line.removeprefix(MARK))
        name = result["name"]
        results[name] = result
        reference = cases[name][0]
        if "error" in result:
            print(f"{name:<40}{result['error'][:300]}", flush=True)
            wrong += 1
        elif reference:
            pairs = zip(result["texts"]["tokens"], results[reference]["texts"]["tokens"], strict=True)
            same = sum(ours == expected for ours, expected in pairs)
            shares = " ".join(f"{n / result['texts']['drafts']:.1%}" for n in result["texts"]["accepted"])
            print(f"{name:<40}{same} of 20 the same, accepted {shares}", flush=True)
            wrong += same != len(TEXT_LENGTHS)
    missing = len(cases) - len(results)
    if missing or process.wait():
        print(f"{missing} cases gave no result, exit code {process.wait()}", flush=True)
    return wrong + missing


if __name__ == "__main__":
    sys.exit(main())
