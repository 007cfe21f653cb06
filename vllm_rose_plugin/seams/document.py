"""``docs/seams.md``, made from the table of seams: ``python -m vllm_rose_plugin.seams.document > docs/seams.md``."""

import sys
from collections.abc import Iterator

from vllm_rose_plugin.seams.seam import SUPPORTED_VLLM, Seam
from vllm_rose_plugin.seams.table import seams

_INTRODUCTION = """\
# Where the plugin touches vLLM

Made by `python -m vllm_rose_plugin.seams.document > docs/seams.md` from the table in `vllm_rose_plugin/seams/`;
`rose doctor` shows the state of each seam in the vLLM that is installed.

Supported vLLM versions: {versions}; any other is refused when the plugin is loaded. A seam is attached when vLLM
imports its module. It checks first that its target exists and looks as expected, and ends start-up with an error that
names the seam if it doesn't. `VLLM_ROSE_DISABLE=1` attaches none.
"""


def document() -> str:
    """The whole page, in Markdown."""
    table = seams()
    official = [seam for seam in table if seam.kind == "official"]
    patches = [seam for seam in table if seam.kind == "patch"]
    lines = [_INTRODUCTION.format(versions=", ".join(SUPPORTED_VLLM))]
    lines += [f"## Patches of private names ({len(patches)})", ""]
    lines += ["The row `upstream` names what would let us delete the patch.", ""]
    for seam in patches:
        lines += _section(seam, "upstream")
    lines += [f"## Official registrations ({len(official)})", ""]
    for seam in official:
        lines += _section(seam, "documented at")
    return "\n".join(lines).rstrip() + "\n"


def _section(seam: Seam, upstream_label: str) -> Iterator[str]:
    yield f"### {seam.name}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| target | {', '.join(f'`{name}`' for name in seam.target.split(', '))} |"
    yield f"| module | `{seam.module}` |"
    yield f"| vLLM | {', '.join(seam.versions)} |"
    yield f"| why | {_cell(seam.why)} |"
    yield f"| {upstream_label} | {_link(seam.upstream)} |"
    yield ""


def _link(upstream: str) -> str:
    if upstream.startswith("https://"):
        return f"<{upstream}>"
    return f"`{upstream}`" if upstream.startswith("vllm.") else _cell(upstream)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Print the page."""
    sys.stdout.write(document())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
