"""docs/seams.md says what the table says."""

from pathlib import Path

from vllm_rose_plugin.seams.document import document
from vllm_rose_plugin.seams.table import seams

PAGE = Path(__file__).parents[2] / "docs/seams.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == document(), "run: python -m vllm_rose_plugin.seams.document > docs/seams.md"


def test_every_seam_is_there_with_reason_and_upstream():
    sections = PAGE.read_text().split("\n### ")[1:]
    assert len(sections) == len(seams())
    by_name = {section.split("\n")[0]: section for section in sections}
    for seam in seams():
        section = by_name[seam.name]
        assert seam.why in section and seam.upstream in section and seam.module in section
        assert all(f"`{name}`" in section for name in seam.target.split(", "))
        assert f"| vLLM | {', '.join(seam.versions)} |" in section
