"""A snapshot among the inputs: told by its content, explained by the rules, refused like any input that cannot be read."""

from __future__ import annotations

import gzip
import io
import pickle
from pathlib import Path

import pytest

from oomguard.core.errors import InputError
from oomguard.diagnosis import diagnose, diagnose_stream
from oomguard.scan import snapshot
from support.hostile_pickles import hostile_pickles
from support.made_snapshots import example

MIB = 2**20
MADE = example()
ANSWER = MADE.stack(("/job/answer.py", 10, "answer"))
STEP = MADE.stack(("/job/train.py", 10, "step"), ("/job/main.py", 3, "main"))


def written(folder: Path, whole: object, name: str = "any.log") -> str:
    path = folder / name
    path.write_bytes(pickle.dumps(whole))
    return str(path)


def test_refused_allocation_becomes_an_incident_with_facts(tmp_path: Path):
    found = diagnose(written(tmp_path, MADE.in_pieces()))
    (incident,) = found.incidents
    values = {name: fact.value for name, fact in incident.facts.items()}
    assert (incident.kind, found.verdict) == ("cuda_oom", "oom")
    assert (values["tried_bytes"], values["device_free_bytes"]) == (1536 * MIB, 380 * MIB)
    assert (values["free_blocks_bytes"], values["largest_free_block_bytes"]) == (
        2816 * MIB,
        256 * MIB,
    )
    assert (
        values["reserved_total_bytes"]
        == values["allocated_bytes"] + values["reserved_unallocated_bytes"]
    )
    assert values["private_pool_bytes"] == 256 * MIB
    assert incident.evidence[0].text == '  File "/job/model.py", line 140, in logits'


def test_free_blocks_that_are_too_small_are_fragmentation(tmp_path: Path):
    cause = diagnose(written(tmp_path, MADE.in_pieces())).incidents[0].causes[0]
    assert (cause.id, cause.rule) == ("fragmentation", "OG362")


def test_a_device_full_of_live_blocks_names_who_holds_most(tmp_path: Path):
    made = MADE.Recorder()
    served = MADE.stack(("/job/answer.py", 10, "answer"), ("/job/main.py", 3, "main"))
    made.segment([(900 * MIB, "active_allocated", served)])
    made.refuse(500 * MIB, 100 * MIB, served)
    cause = diagnose(written(tmp_path, made.snapshot())).incidents[0].causes[0]
    assert (cause.id, cause.rule) == ("unknown", "OG363")
    assert (
        "0.88 GiB of it allocated by job/answer.py:10 answer < job/main.py:3 main"
        in cause.explanation
    )


def test_the_refused_stack_tells_the_phase_as_a_traceback_does(tmp_path: Path):
    made = MADE.Recorder()
    made.segment([(900 * MIB, "active_allocated", STEP)])
    worker = "/env/lib/python3.12/site-packages/vllm/v1/worker/gpu_worker.py"
    made.refuse(
        500 * MIB,
        100 * MIB,
        MADE.stack((worker, 331, "determine_available_memory"), (worker, 20, "main")),
    )
    profiled = diagnose(written(tmp_path, made.snapshot())).incidents[0]
    made = MADE.Recorder()
    made.segment([(900 * MIB, "active_allocated", STEP)])
    trainer = "/env/lib/python3.12/site-packages/transformers/trainer.py"
    made.refuse(
        500 * MIB, 100 * MIB, MADE.stack((trainer, 3500, "training_step"), (trainer, 2000, "train"))
    )
    trained = diagnose(written(tmp_path, made.snapshot())).incidents[0]
    assert profiled.phase == "profile_run"
    assert (trained.phase, trained.causes[0].id) == ("training", "training")


def test_expandable_segments_are_not_proposed_where_they_are_on(tmp_path: Path):
    whole = MADE.in_pieces()
    whole["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    incident = diagnose(written(tmp_path, whole)).incidents[0]
    assert not [
        patch
        for patch in incident.plan
        if patch.setting == "allocator_options" and patch.applicable
    ]


def test_snapshot_without_a_failure_is_no_incident(tmp_path: Path):
    made = MADE.Recorder()
    made.segment([(900 * MIB, "active_allocated", STEP)])
    found = diagnose(written(tmp_path, made.snapshot()))
    assert (found.verdict, found.incidents) == ("no_oom", ())
    assert found.snapshot is not None
    assert found.snapshot.devices[0].allocated_bytes == 900 * MIB


def test_each_device_that_refused_something_has_its_incident(tmp_path: Path):
    made = MADE.Recorder(2)
    for device in (0, 1):
        made.segment([(900 * MIB, "active_allocated", STEP)], device=device)
        made.refuse(500 * MIB, 100 * MIB, STEP, device=device)
    found = diagnose(written(tmp_path, made.snapshot()))
    assert [incident.facts["gpu_index"].value for incident in found.incidents] == [0, 1]


def test_a_given_device_size_counts(tmp_path: Path):
    incident = diagnose(written(tmp_path, MADE.in_pieces()), gpu_memory="24GiB").incidents[0]
    assert incident.budget.device_total_bytes == 24 * 2**30


def test_a_packed_snapshot_and_one_from_a_pipe_are_read_too(tmp_path: Path):
    packed = tmp_path / "snapshot.pickle.gz"
    packed.write_bytes(gzip.compress(pickle.dumps(MADE.in_pieces())))
    assert diagnose(packed).incidents[0].kind == "cuda_oom"

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    assert diagnose_stream(Pipe(pickle.dumps(MADE.in_pieces()))).incidents[0].kind == "cuda_oom"
    log = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    assert diagnose_stream(Pipe(log)).incidents[0].kind == "cuda_oom"


def test_a_hostile_pickle_is_an_input_that_cannot_be_read(tmp_path: Path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(hostile_pickles(tmp_path / "marker")["REDUCE of os.system, protocol 5"])
    with pytest.raises(
        InputError,
        match=r"snapshot\.pickle: not read as an allocation snapshot: it would import posix\.system",
    ):
        diagnose(path)
    assert not (tmp_path / "marker").exists()


def test_refused_huge_pickle_is_read_only_in_its_first_block():
    class Endless(io.RawIOBase):
        read_bytes = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: bytearray) -> int:
            self.read_bytes += len(buffer)
            buffer[:] = (
                b"\x80\x02" + b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." * (len(buffer) // 12 + 1)
            )[: len(buffer)]
            return len(buffer)

    stream = Endless()
    with pytest.raises(InputError, match="which plain data does not need"):
        diagnose_stream(stream)  # type: ignore[arg-type]
    assert stream.read_bytes < 32 * MIB


@pytest.mark.parametrize("block_bytes", [3, 500, 777, 1024])
def test_snapshot_of_several_blocks_is_read_at_any_split(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int
):
    monkeypatch.setattr(snapshot, "_BLOCK_BYTES", block_bytes)
    assert (
        diagnose_stream(io.BytesIO(pickle.dumps(MADE.in_pieces()))).incidents[0].kind == "cuda_oom"
    )


def test_another_pickle_is_told_as_no_snapshot(tmp_path: Path):
    with pytest.raises(InputError, match="no allocation snapshot: it has no segments"):
        diagnose(written(tmp_path, {"weights": [1, 2, 3]}))


def test_blocks_of_a_later_moment_are_no_cause(tmp_path: Path):
    made = MADE.Recorder()
    made.segment([(90 * MIB, "inactive", [])] * 2)
    made.refuse(100 * MIB, 3 * MIB, ANSWER)
    made.traces[0].append({"action": "segment_unmap", "addr": 0, "size": 20 * MIB, "frames": []})
    incident = diagnose(written(tmp_path, made.snapshot())).incidents[0]
    assert not {
        "allocated_bytes",
        "reserved_total_bytes",
        "free_blocks_bytes",
        "largest_holder",
    } & set(incident.facts)
    assert [cause.rule for cause in incident.causes] == ["OG399"]


def test_blocks_waiting_for_a_stream_are_named_if_sufficient(
    tmp_path: Path,
):
    made = MADE.Recorder()
    made.segment([(16 * MIB, "active_pending_free", ANSWER), (4 * MIB, "active_allocated", ANSWER)])
    made.segment([(20 * MIB, "inactive", [])])
    made.refuse(30 * MIB, MIB, ANSWER)
    cause = diagnose(written(tmp_path, made.snapshot()), gpu_memory="48MiB").incidents[0].causes[0]
    assert cause.rule == "OG364"
    assert (
        "16.00 MiB in torch's segments was freed but waited for another stream" in cause.explanation
    )
    made.refuse(60 * MIB, MIB, ANSWER)
    assert (
        diagnose(written(tmp_path, made.snapshot()), gpu_memory="48MiB").incidents[0].causes[0].rule
        != "OG364"
    )


@pytest.mark.parametrize(
    ("given", "told"), [(24, "24 bytes"), ("21GiB", "21.00 GiB"), ("21.5GiB", "21.50 GiB")]
)
def test_device_smaller_than_its_tensors_is_refused(tmp_path: Path, given: int | str, told: str):
    with pytest.raises(
        InputError, match=f"given device memory is {told}, but torch had 21.25 GiB of device 0"
    ) as refused:
        diagnose(written(tmp_path, MADE.in_pieces()), gpu_memory=given)
    assert "22142MiB or more" in str(refused.value.hint)
