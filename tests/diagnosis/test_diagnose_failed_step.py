"""The requests of the step that failed, from the dump of vLLM 0.32."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import oomguard
from oomguard.core.facts import Fact
from oomguard.diagnosis import failed_step, step_requests

CORE = "(EngineCore pid=21102) ERROR 11-25 21:46:45 "
DUMP = (
    "[dump_input.py:79] Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[NewRequestData("
    "req_id=cmpl-a667fa7a9ca0ed43-0-a3fb6777,prompt_token_ids_len=2,prefill_token_ids_len=None,mm_features=[],sampling_params="
    "SamplingParams(n=1, presence_penalty=0.0, stop=[], max_tokens=10, extra_args=None),block_ids=([1],),num_computed_tokens=0,"
    "lora_request=None,prompt_embeds_shape=None)], scheduled_cached_reqs=CachedRequestData(req_ids=[],resumed_req_ids=set(),"
    "new_token_ids_lens=[],all_token_ids_lens={{}},new_block_ids=[],num_computed_tokens=[],num_output_tokens=[]), "
    "num_scheduled_tokens={{{requests}}}, total_num_scheduled_tokens={total}, scheduled_spec_decode_tokens={{}}, finished_req_ids=[])"
)
FAILED = (
    f"{CORE}[core.py:1512] EngineCore encountered a fatal error.\n"
    f"{CORE}[core.py:1512] Traceback (most recent call last):\n"
    f'{CORE}[core.py:1512]   File "/env/vllm/v1/worker/gpu_model_runner.py", line 3127, in execute_model\n'
    f"{CORE}[core.py:1512] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
    "23.69 GiB of which 512.00 MiB is free. Including non-PyTorch memory, this process has 23.10 GiB memory in use. Of the "
    "allocated memory 22.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.\n"
)


def diagnosis_of(requests: str, total: int) -> oomguard.Diagnosis:
    return oomguard.diagnose(f"{CORE}{DUMP.format(requests=requests, total=total)}\n{FAILED}")


def test_failed_steps_requests_are_facts_of_the_incident():
    facts = diagnosis_of("cmpl-a-0: 1, cmpl-b-0: 8191", 8192).first_cause.facts
    assert facts["step_tokens"].value == 8192
    assert step_requests(facts) == {"cmpl-b-0": 8191, "cmpl-a-0": 1}


def test_the_diagnosis_names_the_largest_first():
    notes = diagnosis_of("cmpl-a-0: 1, cmpl-b-0: 8191", 8192).notes
    assert (
        "in the step that failed: 2 requests of 8192 tokens, cmpl-b-0 (8191), cmpl-a-0 (1)" in notes
    )


def facts_of(requests: str, tokens: int | None) -> dict[str, Fact]:
    facts = {"step_requests": Fact("step_requests", requests)}
    return facts if tokens is None else facts | {"step_tokens": Fact("step_tokens", tokens)}


def test_of_many_the_first_few_are_named():
    text = failed_step(facts_of(", ".join(f"r{i}: {i}" for i in range(1, 9)), 36))
    assert (
        text
        == "in the step that failed: 8 requests of 36 tokens, r8 (8), r7 (7), r6 (6), r5 (5), r4 (4) and 3 more"
    )


def test_list_too_long_to_read_counts_what_was_read():
    diagnosis = diagnosis_of(", ".join(f"cmpl-{i:032d}-0: 1" for i in range(400)), 400)
    (note,) = diagnosis.notes
    assert note.startswith("in the step that failed: at least 89 requests, cmpl-0")


def test_without_a_dump_nothing_is_said():
    assert failed_step({}) is None
    assert not oomguard.diagnose(FAILED).notes


@given(
    st.dictionaries(st.text("abc-0123", min_size=1), st.integers(0, 10**6), min_size=1, max_size=20)
)
def test_every_request_is_read_with_its_own_tokens(requests):
    text = ", ".join(f"{name}: {tokens}" for name, tokens in requests.items())
    assert step_requests(facts_of(text, sum(requests.values()))) == requests
