"""Device to target."""

import pytest

from vllm_rose_plugin.kernels.jit.targets import choose_target


@pytest.mark.parametrize(
    ("capability", "dsl", "target", "has_note"),
    [
        ((9, 0), "4.8.0", "sm_90a", False),
        ((9, 0), None, "sm_90a", False),
        ((10, 0), "4.8.0", "sm_100a", False),
        ((10, 3), "4.8.0", "sm_103a", False),
        ((10, 7), "4.8.0", "sm_107a", False),
        ((10, 7), "4.10.1", "sm_107a", False),
        ((10, 7), "5.0.0.dev1", "sm_107a", False),
        ((10, 7), "4.7.9", "sm_100f", True),
        ((10, 7), None, "sm_100f", True),
        ((8, 0), "4.8.0", None, True),
        ((9, 1), "4.8.0", None, True),
        ((12, 0), "4.8.0", None, True),
    ],
)
def test_choice(capability, dsl, target, has_note):
    choice = choose_target(capability=capability, dsl_version=dsl)
    assert (choice.target, bool(choice.note)) == (target, has_note)


def test_notes_name_what_matters():
    unknown = choose_target(capability=(12, 1), dsl_version="4.8.0").note
    assert "12.1" in unknown and "9.0, 10.0, 10.3, 10.7" in unknown
    old = choose_target(capability=(10, 7), dsl_version="4.7.0").note
    assert "sm_107a" in old and "4.7.0" in old and "4.8" in old
