"""A report that tells the failure in a sentence while nothing printed tells it."""

from __future__ import annotations

import pytest

from oomguard.diagnosing import diagnose
from oomguard.incident import Incident


def found(text: str) -> list[Incident]:
    return [incident for incident in diagnose(text).incidents if incident.is_oom]


@pytest.mark.parametrize(
    "text",
    [
        "I tried the small model on a 3090 and it immediately ran out of memory.",
        "With a longer prompt I keep hitting OOM on my 16 GB card. What can I change?",
        "Hello, I use two images per prompt and it causes CUDA out of memory. Can anyone help me?",
        "Thanks for sharing this. After an hour of traffic the server crashes because of OOM. We use a 4090.",
        "My card has 12 GB. The demo OOMs while the last shard is loaded.",
        "The loader gets killed by the OOM killer when I call from_pretrained. Is 32 GB too little?",
        'Now I have a new "out of GPU memory" problem on four V100.',
        "I evaluated both models but encountered out-of-memory (OOM) errors with the larger one on 40GB GPUs.",
        "OOM on a 3080\n\nHi, is there something to set so that it fits? I use the defaults.",
        "我用两张显卡部署\uff0c一启动就出现了Out Of Memory问题\uff0c请问怎么解决\uff1f",
        "### What happened?\n\nSince the update the same GPU command no longer starts, always reports out of memory.\n",
        "Hi,\n\nfaced an out of memory error after the second prompt of the sample. Our card is a V100. Is there any way around it?",
        "Loading the safetensors gets killed at 40 %. Does anyone know how much RAM it takes?",
        "When I merge the adapter, RAM fills up and the script is killed. Is there a mode for 32 GB?",
        "I watch htop: memory grows until the kernel's OOM killer steps in and the loader is killed by the OOM killer.",
        "/kind bug\n\nThe log below shows that the server is OOM, and the status lacks the exit code 137.\n",
        "@ann the smaller limit of 400Mi reproduces the OOM error here.",
        "推論中にメモリ不足になります。RTX 3070 です。どうすればいいですか\uff1f",
        "RTX 3070에서 메모리 부족 오류가 발생합니다.",
    ],
)
def test_somebody_tells_what_happened(text):
    (incident,) = found(text)

    assert incident.certainty_ratio == 0.8
    assert incident.kind in {"cuda_oom", "host_oom"}


@pytest.mark.parametrize(
    "text",
    [
        "If you run out of memory, I recommend a smaller batch.",
        "I want to know whether it will OOM before I download it.",
        "I no longer get OOM errors with the new release. Thanks!",
        "It runs on my 3060 without running out of memory, is that expected?",
        "Our scheduler retries when a worker reports out of memory. Which status should we send?",
        "I thought it was out of memory, but 40 GB are free. Any idea?",
        "We want an alert before a worker gets OOM killed. I can send a patch.",
        "Some users get OOM with it, I have not tried. Does it need 24 GB?",
        "I had the OOM because a notebook held the card, closing it solved it.",
        "How do I estimate when it runs out of memory?",
        "The process was not killed by the OOM killer, I checked dmesg. Any idea?",
        "Loading the model was killed by me with ctrl-c, as it hung. What can I do?",
        "The loader uses little RAM, and it was killed by the watchdog after a timeout. Why?",
        "When the pod is OOM, I would like the operator to restart it.",
        "@ann you can lower the batch if you run out of memory.",
    ],
)
def test_a_failure_that_is_supposed_denied_or_solved_is_none(text):
    assert found(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "# Free the shard first\n\nWe hit OOM on two cards. This PR frees it before the next is read.",
        "fix(loader): free the shard first\n\nWe hit OOM on two cards because two shards were alive.",
        "[Feature]: offload the cache\n\nWith long prompts we run out of memory. I would like an offload.",
        "# Small GPUs\n\nThis guide is for cards with 8 GB. We run out of memory with the defaults, so we use 4 bit.",
        "user: I get OOM when I load it in bf16\nassistant: How much memory has it?",
        "INFO 01-01 00:00:00 engine.py:12] request 7: 'why do I get OOM when I load it?'",
        "> I get OOM when I load it\n\nWhich version do you use? I cannot see it here.",
        'Customer writes: "our endpoint answers 500, the log says CUDA out of memory. Please help."',
        "How we test\n\n```\nI get OOM when I load it\n```\nMy script sends this text.",
    ],
)
def test_in_a_change_a_page_a_request_or_a_quotation_it_is_none(text):
    assert found(text) == []


def test_another_error_below_it_is_the_one_that_counts():
    text = "I got OOM with 8 rows, with 4 rows this:\n\nFile \"a.py\", line 3, in run\nKeyError: 'labels'\n"

    assert found(text) == []


def test_what_an_engine_printed_counts_before_it():
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    (incident,) = found(f"I get OOM with 8 rows, the log:\n\n{message}\n")

    assert incident.certainty_ratio is None


def test_it_has_the_figures_of_the_start_that_is_pasted_below():
    start = (
        "INFO 01-30 05:50:16 worker.py:266] the current vLLM instance can use total_gpu_memory (47.50GiB) x"
        " gpu_memory_utilization (0.90) = 42.75GiB\n"
    )
    (incident,) = found(f"With the trainer I get oom when the model is loaded:\n\n```\n{start}```\n")

    assert incident.facts["gpu_memory_utilization_ratio"].value == 0.9
