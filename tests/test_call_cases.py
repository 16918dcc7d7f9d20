"""The guard's benchmark on generated calls: what it draws, what it compares with, and one case of it from end to end."""

from __future__ import annotations

import subprocess

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import call_cases  # noqa: E402
from support import resume  # noqa: E402
from support.bare_loop import loop_of  # noqa: E402
from support.call_devices import DEVICES, runs  # noqa: E402
from support.call_models import LONGEST  # noqa: E402
from support.call_patterns import PATTERNS, make_inputs  # noqa: E402
from support.call_results import Kept, difference  # noqa: E402

SEED = 7  # another than the benchmark's own
CASES = range(130)


def small(pattern):
    """A case of this pattern that runs in a moment."""
    number = next(n for n in CASES if call_cases.make_case(n, SEED)["pattern"] == pattern)
    sizes = {
        "hidden": 64,
        "layers": 1,
        "vocab": 500,
        "rows": 8,
        "prompt": 24,
        "new": 4,
        "family": "llama",
        "share": 0.5,
    }
    return {**call_cases.make_case(number, SEED), **sizes}


@pytest.mark.parametrize("pattern", ["sampled", "beams", "scores", "logits and cache"])
def test_a_loop_in_any_sizes_gives_what_the_whole_call_gives(pattern):
    trial = call_cases.Trial(small(pattern))

    loop = loop_of(trial.call, [3, 3, 2], trial.whole)

    assert loop is not None
    assert difference(trial.whole, loop) == ""


def test_a_loss_is_of_no_row_and_no_loop_stands_for_it():
    trial = call_cases.Trial(small("loss"))

    assert loop_of(trial.call, [4, 4], trial.whole) is None


def test_token_unlike_both_is_a_miss_unless_the_loop_gives_it():
    differing = {"differs": "1 of 8 rows differ"}

    assert call_cases.is_miss(differing)
    assert call_cases.is_miss({**differing, "differs_from_loop": "no loop"})
    assert not call_cases.is_miss({**differing, "differs_from_loop": ""})
    assert not call_cases.is_miss({"differs": ""})


def test_sizes_are_those_of_the_parts_that_a_guard_put_together():
    trial = call_cases.Trial(small("greedy"))
    trial.place.rounds_by_rows = True
    trial.whole = Kept(trial.whole.kind, trial.whole.fields, [trial.whole.tensors[0].roll(1, 0)])

    found = call_cases.compared(trial)

    assert sum(found["joined"]) == trial.rows
    assert max(found["joined"]) == found["sizes"][-1]
    assert found["differs"] == "8 of 8 rows differ"
    assert found["differs_from_loop"] == ""


def test_larger_cases_stay_within_what_their_models_take():
    for number in CASES:
        drawn = call_cases.make_case(number, SEED)
        case = DEVICES["cuda"]().enlarged(drawn)
        assert case["prompt"] + case["new"] <= LONGEST
        assert case["vocab"] <= 32000
        assert {key: case[key] for key in ("pattern", "family", "share")} == {
            key: drawn[key] for key in ("pattern", "family", "share")
        }
        assert case["rows"] == 4 * drawn["rows"]
        if PATTERNS[case["pattern"]].inputs == "images":
            assert (
                make_inputs("images", {**case, "rows": 1})["pixel_values"].shape[-1]
                == case["image"]
            )


def test_no_room_is_a_memory_failure_or_cudnn_without_scratch():
    def raises(error):
        def call():
            raise error

        return call

    assert runs(lambda: None)
    assert not runs(raises(torch.OutOfMemoryError("CUDA out of memory.")))
    assert not runs(
        raises(RuntimeError("GET was unable to find an engine to execute this computation"))
    )
    with pytest.raises(RuntimeError, match="misaligned"):
        runs(raises(RuntimeError("CUDA error: misaligned address")))


def test_results_are_kept_without_git_by_the_sources_alone(tmp_path, monkeypatch):
    (tmp_path / "oomguard").mkdir()
    source = tmp_path / "oomguard" / "a.py"
    source.write_text("1")
    monkeypatch.setattr(resume, "ROOT", tmp_path)
    assert subprocess.run(
        ["git", "-C", tmp_path, "rev-parse"], capture_output=True, check=False
    ).returncode

    before = resume.tree()
    again = resume.tree()
    source.write_text("2")

    assert before.startswith("sources+")
    assert before == again != resume.tree()


def test_a_case_runs_from_end_to_end(monkeypatch):
    case = small("greedy")
    monkeypatch.setattr(call_cases, "make_case", lambda number, seed: case)

    found = call_cases.run_case((0, SEED))

    assert found["oomguard"][0] == 1
    assert found["oomguard"][1] >= 0.97 * found["feasible"] - 1
    assert found["differs"] == ""
    assert not call_cases.twice(found)
