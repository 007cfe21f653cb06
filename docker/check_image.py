"""Judge a freshly built image, where there is no GPU: `rose doctor` must find nothing wrong but the missing GPU.

The doctor calls `register()` in a process of its own, imports every module that a seam attaches to, and looks for the
seam's target there. Here its findings of level error end the build, and so do packages of another version than the
plugin's extra asks for, and a CUDA context.
"""

import json
import subprocess
import sys
from typing import Any

NO_GPU = {"cuda_build_without_gpu", "no_driver", "no_gpu"}
"""Codes of findings that a machine with no GPU is bound to have."""


def problems(report: dict[str, Any]) -> list[str]:
    """What is wrong with the image, from the doctor's JSON; empty: nothing."""
    found = [
        f"{f['code']}: {f['text']}" for f in report["findings"] if f["level"] == "error" and f["code"] not in NO_GPU
    ]
    found += [
        f"{package['name']} {package['version'] or 'is missing'}, wanted {package['wanted']}"
        for package in report["packages"]
        if package["satisfied"] is False or (package["wanted"] and package["version"] is None)
    ]
    check = report["seam_check"]
    if not check["ran"] or not check["seams"]:
        found.append(f"register() was not checked: {check['problem'] or 'no seam was looked at'}")
    if check["cuda_initialized"]:
        found.append("register() created a CUDA context")
    return found


def main() -> int:
    """Print the versions and the verdict; 1 where the image must not be used."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_rose_plugin.cli", "doctor", "--json"], capture_output=True, text=True
    )
    try:
        report = json.loads(done.stdout)
    except ValueError:
        print(f"rose doctor gave no report (exit code {done.returncode}): {done.stderr.strip()}", file=sys.stderr)
        return 1
    vllm = report["vllm"]
    print(f"plugin {report['plugin_version']}, {vllm['distribution']} {vllm['version']}, Python {report['python']}")
    for package in report["packages"]:
        print(
            f"  {package['name']} {package['version']}" + (f", wanted {package['wanted']}" if package["wanted"] else "")
        )
    for seam in report["seam_check"]["seams"]:
        print(f"  seam {seam['name']}: {seam['state']}")
    found = problems(report)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
