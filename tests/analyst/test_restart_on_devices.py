"""A placed server that is started again: on its device, else on another one, else it waits and says so."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from oomguard.cluster.placement.leases import LeaseFolder
from support.placing import Gpus, serve, simulated_gpus, start
from support.supervising import wait_for

OPTIONS = ("--gpus", "auto", "--restart", "on-failure", "--idempotent")


def fails(gpus: Gpus) -> list[str]:
    """Return a server that ends with 3 until ``succeeds_from_now`` is called."""
    status = gpus.folder / "status"
    status.write_text("3")
    with (gpus.folder / "bin" / "vllm").open("a") as program:
        program.write(f"\nraise SystemExit(int(open({str(status)!r}).read()))\n")
    return serve(gpus)


def succeeds_from_now(gpus: Gpus) -> None:
    assert wait_for(lambda: [what for _, _, what, _ in gpus.happened()].count("starts") == 2, 60)
    (gpus.folder / "status").write_text("0")


@contextmanager
def leased_by_another(gpus: Gpus) -> Iterator[None]:
    """Have the first device's lease as soon as the server has given it back."""
    folder = LeaseFolder(gpus.folder / "leases")
    key, found = simulated_gpus.uuid(0), {}

    def took() -> bool:
        if any(what == "started" for _, _, what, _ in gpus.happened()):
            found.update(folder.take([key], "another", "job") or {})
        return bool(found)

    assert wait_for(took)
    try:
        yield
    finally:
        found[key].close()


def test_its_own_device_comes_first(gpus):
    with start(gpus, OPTIONS, fails(gpus), SIMULATED_RUN_S="1") as job:
        succeeds_from_now(gpus)
        errors = job.communicate(timeout=100)[1]
    assert job.returncode == 0, errors
    assert [uuids for _, _, what, uuids in gpus.happened() if what == "ends"] == [
        [simulated_gpus.uuid(0)]
    ] * 2


def test_where_another_start_has_it_a_free_one_is_taken(gpus):
    with start(gpus, OPTIONS, fails(gpus), SIMULATED_RUN_S="1") as job, leased_by_another(gpus):
        succeeds_from_now(gpus)
        errors = job.communicate(timeout=100)[1]
    assert job.returncode == 0, errors
    used = [uuids for _, _, what, uuids in gpus.happened() if what == "ends"]
    assert used == [[simulated_gpus.uuid(0)], [simulated_gpus.uuid(1)]], errors


def test_wait_names_the_holder_and_a_stop_makes_no_attempt(gpus):
    gpus.are_alike(1)
    with start(gpus, OPTIONS, fails(gpus), SIMULATED_RUN_S="1") as job, leased_by_another(gpus):
        assert job.stderr is not None
        told = ""
        while "Waiting for a device before the next attempt" not in told:
            told = job.stderr.readline()
            assert told
        job.send_signal(signal.SIGTERM)
        rest = job.communicate(timeout=30)[1]
    assert "at_most_s=60" in told
    assert "(another)" in told
    assert job.returncode == 128 + signal.SIGTERM
    assert "attempt" not in rest
    assert "What oomguard did" not in rest


def loses(gpus: Gpus, index: int, *, count: int) -> list[str]:
    """Return a script whose first attempt loses a GPU and fails; a next one says what it sees."""
    lines = [simulated_gpus.line(i, more="lost" if i == index else "") for i in range(count)]
    (gpus.folder / "lost").write_text("".join(f"{line}\n" for line in lines))
    script = """
echo on $CUDA_VISIBLE_DEVICES
[ -e "$0/once" ] && exit 0
touch "$0/once"; cp "$0/lost" "$0/devices"
exit 3"""
    return ["sh", "-c", script, str(gpus.folder)]


def test_lost_device_is_replaced_even_if_still_leased(gpus):
    gpus.are_alike(2)
    options = ("--gpus", "1", "--restart", "on-failure", "--idempotent", "--lease", "job")
    with start(gpus, options, loses(gpus, 0, count=2)) as job:
        out, errors = job.communicate(timeout=100)
    assert (job.returncode, out) == (0, "on 0\non 1\n"), errors
    assert 'No longer using GPU 0: reason="it does not answer: GPU is lost' in errors


def test_lost_device_without_another_ends_the_run(gpus):
    options = (
        "--gpus",
        simulated_gpus.uuid(0),
        "--wait",
        "1s",
        "--restart",
        "on-failure",
        "--idempotent",
    )
    with start(gpus, options, loses(gpus, 0, count=2)) as job:
        out, errors = job.communicate(timeout=100)
    assert (job.returncode, out) == (3, "on 0\n"), errors
    assert (
        "Not retried: no device was free within 1 s: GPU 0: it does not answer: GPU is lost"
        in errors
    )


def test_a_device_that_comes_back_is_taken_again(gpus):
    gpus.are_alike(1)
    options = (
        "--gpus",
        simulated_gpus.uuid(0),
        "--wait",
        "1m",
        "--restart",
        "on-failure",
        "--idempotent",
    )
    with start(gpus, options, loses(gpus, 0, count=1)) as job:
        assert job.stderr is not None
        assert any("Waiting for a device before the next attempt" in line for line in job.stderr)
        gpus.are_alike(1)
        out, errors = job.communicate(timeout=100)
    assert (job.returncode, out) == (0, "on 0\non 0\n"), errors
