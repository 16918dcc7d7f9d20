"""The noise of a part is the part of the noise of all, on each device that has a generator."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.engines.transformers.call_state import Draws, generator_states  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402

ROWS, TOKENS, STEPS = 12, 97, 3
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def drawn(given, number):
    return [torch.multinomial(given, number) for _ in range(STEPS)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
@pytest.mark.parametrize(
    ("number", "each", "dtype"), [(1, 1, torch.float32), (4, 3, torch.float64)]
)
def test_parts_draw_what_all_rows_draw_together(device, number, each, dtype):
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    noise = torch.rand(ROWS * each, TOKENS, generator=torch.Generator().manual_seed(2))
    given = noise.to(place, dtype).softmax(-1)
    torch.manual_seed(11)
    began = generator_states(place)
    whole, after = drawn(given, number), torch.rand(2, device=place)

    torch.manual_seed(99)  # wherever the failed call has left it
    draws, parts = Draws(began, ROWS, may_draw=True), []
    for start, stop in ((0, 5), (5, 6), (6, ROWS)):
        with draws.of_rows(start, stop):
            parts.append(drawn(given[start * each : stop * each], number))

    assert draws.problem is None
    for step in range(STEPS):
        assert torch.equal(torch.cat([part[step] for part in parts]), whole[step])
    assert torch.equal(torch.rand(2, device=place), after)


def test_what_cannot_be_repeated_is_a_problem(subtests):
    for name, draw in [
        ("with replacement", lambda given: torch.multinomial(given, 3, replacement=True)),
        (
            "a generator of its own",
            lambda given: torch.multinomial(given, 1, generator=torch.Generator().manual_seed(1)),
        ),
        ("some rows", lambda given: torch.multinomial(given[:3], 1)),
        ("no rows", lambda given: torch.multinomial(given[0], 1)),
        ("other draws", lambda given: torch.rand(3)),
        (
            "other draws between",
            lambda given: (torch.multinomial(given, 1), torch.rand(3), torch.multinomial(given, 1)),
        ),
    ]:
        with subtests.test(name):
            draws = Draws(generator_states(None), ROWS, may_draw=True)
            with draws.of_rows(0, 5):
                draw(torch.ones(5, TOKENS))

            assert "draws random numbers" in draws.problem


def test_part_without_draws_leaves_the_generators_unchanged():
    draws = Draws(generator_states(None), ROWS, may_draw=True)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    with draws.of_rows(0, 5):
        torch.ones(3)

    assert draws.problem is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_part_on_the_cpu_never_holds_the_noise_of_other_rows():
    given = torch.ones(2, 5_000)
    peaks = {}
    for rows in (2, 400):
        draws = Draws(generator_states(None), rows, may_draw=True)
        with draws.of_rows(0, 2):
            torch.multinomial(given, 1)  # what is looked up once for a device is
        with limit_memory("1 GiB") as device, draws.of_rows(0, 2):
            torch.multinomial(given, 1)
        peaks[rows] = device.peak_bytes

    assert peaks[400] == peaks[2]
