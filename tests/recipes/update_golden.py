"""Writes tests/recipes/golden anew: ``python tests/recipes/update_golden.py``, then read the difference."""

from render_cases import GOLDEN, golden_path, golden_text, renderings


def main() -> None:
    """Write every golden file and remove those of renderings that are gone."""
    GOLDEN.mkdir(exist_ok=True)
    wanted = {golden_path(*rendering): rendering for rendering in renderings()}
    for stale in set(GOLDEN.iterdir()) - set(wanted):
        stale.unlink()
    for path, rendering in wanted.items():
        path.write_text(golden_text(*rendering), encoding="utf-8")
    print(f"{len(wanted)} files in {GOLDEN}")


if __name__ == "__main__":
    main()
