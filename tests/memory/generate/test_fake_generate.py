"""What a trace answers where a model's code reads a value."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from oomguard.live_storages import LiveStorages  # noqa: E402
from oomguard.memory.generate.fake_generate import _Watch, twin_of  # noqa: E402


@pytest.fixture
def reads():
    """Read what a function makes under a trace of a call whose mask hides nothing, or something."""

    def read(make, *, mask_is_full=True):
        twin = twin_of(torch.nn.Linear(2, 2))
        with twin.mode, _Watch(LiveStorages(), twin, mask_is_full=mask_is_full):
            return make().item()

    return read


def test_a_number_made_of_numbers_is_itself(reads):
    assert reads(lambda: torch.div(1024, 512, rounding_mode="trunc")) == 2


def test_whether_all_of_a_mask_are_true_is_asked_in_two_ways(reads):
    def mask():
        return torch.empty(3, 5, dtype=torch.bool)

    for ask in (lambda: mask().all(), lambda: mask().sum() == 15):
        assert reads(ask) is True
        assert reads(ask, mask_is_full=False) is False


def test_any_other_value_is_no_or_nothing(reads):
    assert reads(lambda: torch.empty(3, 5).sum()) == 0
    assert reads(lambda: torch.empty(3, 5, dtype=torch.bool).sum() == 4) is False
    assert reads(lambda: torch.empty(3).sum() == 3) is False
