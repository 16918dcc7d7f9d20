"""Write the table of model classes whose rows do not depend on each other, which the package ships.

Every model class of the installed transformers is made small, with random weights. A process of its
own follows its ``forward`` and ``generate`` under fake tensors, and compares rows alone with rows
next to others. The results of other versions of transformers stay in the table.
"""

import argparse
import collections
import gc
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.independence_table import TABLE, merged, read_table, written
from support.resume import Results

LIMIT_S = 60.0
_WALL_TIMES = 6  # others use the processors too
WORKERS = 2
MEMORY_BYTES = 12 << 30
# Families that most programs use come first: an interrupted run has them.
FIRST = (
    "Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "Gemma", "Phi", "GPT", "OPT", "Bloom", "Falcon", "T5", "MT5", "Bart",
    "MBart", "M2M100", "Marian", "Pegasus", "Bert", "Roberta", "XLMRoberta", "Deberta", "DistilBert", "Electra", "MPNet",
    "Albert", "ModernBert", "Whisper", "Wav2Vec2", "Hubert", "WavLM", "CLIP", "Siglip", "ViT", "Dino", "Swin", "Detr",
    "Blip", "Llava", "PaliGemma", "Idefics", "Vits", "SpeechT5", "MusicGen", "Sam", "Segformer", "LayoutLM", "Tapas",
    "Esm", "Mamba", "Jamba", "Bamba", "Zamba", "RecurrentGemma", "Rwkv", "Switch", "NllbMoe", "Olmo", "DeepseekV", "Granite",
)  # fmt: skip

MAIN = (
    "Model", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForCTC", "ForImageClassification",
    "ForSequenceClassification", "ForTextToSpeech", "ForSpeechToText",
)  # fmt: skip


def work(name: str, answer: Connection, limit_s: float) -> None:
    """Send a class's verdicts."""
    from support.row_verdict import verdicts

    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s)))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # until the process ends
    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    answer.send(verdicts(name))


def warm_up() -> None:
    """Load what every class needs, so that the processes of the classes begin with it."""
    import torch

    from support.row_verdict import verdicts

    torch.set_num_threads(1)  # a pool of threads would not be there in the processes
    verdicts("GPT2LMHeadModel")
    gc.collect()
    gc.freeze()


def unknown(why: str) -> dict[str, Any]:
    """Return the verdict of a class whose process did not answer."""
    return {
        "forward": {
            "verdict": "unknown",
            "why": why,
            "by": "",
            "draws": False,
            "layout": {},
            "notes": [why],
        }
    }


def run_classes(
    names: Sequence[str], workers: int, limit_s: float, ends_s: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each class with its verdicts, as they end; one that crashes or hangs costs itself
    alone.

    Args:
        names: the classes.
        workers: how many run at once.
        limit_s: seconds of a processor for one.
        ends_s: the time, as ``time.monotonic`` has it, after which none begins.
    """
    context = multiprocessing.get_context("fork")
    waiting = collections.deque(names)
    running: dict[Connection, tuple[str, Any, float]] = {}
    while running or (waiting and time.monotonic() < ends_s):
        while waiting and len(running) < workers and time.monotonic() < ends_s:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(waiting[0], theirs, limit_s), daemon=True)
            process.start()
            theirs.close()
            running[ours] = waiting.popleft(), process, time.monotonic()
        for ours in wait(list(running), timeout=1.0):
            name, process, _ = running.pop(ours)  # type: ignore[index]
            try:
                found = ours.recv()  # type: ignore[union-attr]
            except EOFError:
                process.join()
                found = unknown(f"its process ended with status {process.exitcode}")
            process.kill()
            process.join()
            yield name, found
        for ours, (name, process, begun) in list(running.items()):
            if time.monotonic() - begun > _WALL_TIMES * limit_s:
                process.kill()
                process.join()
                del running[ours]
                yield name, unknown(f"no result after {_WALL_TIMES * limit_s:.0f} s")


def in_order(names: Sequence[str]) -> list[str]:
    """Return the names with the families first that most programs use."""
    return sorted(
        names, key=lambda name: (not name.startswith(FIRST), not name.endswith(MAIN), name)
    )


def main() -> None:
    """Run the classes, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="only these classes; the table is not written")
    parser.add_argument(
        "--resume",
        type=Path,
        help="a file that keeps each class's result; those in it are not run again",
    )
    parser.add_argument(
        "--unknown", action="store_true", help="run those again that the file has as unknown"
    )
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes at once")
    parser.add_argument("--minutes", type=float, default=240.0, help="begin no class after so many")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds of a processor for one class"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="the table to write")
    asked = parser.parse_args()

    import transformers

    from support.tiny_models import model_classes

    transformers.logging.set_verbosity_error()
    version = transformers.__version__
    kept = Results(asked.resume, any_tree=True)
    every = asked.only or in_order(list(model_classes()))
    found = {name: known for name in every if (known := kept.get(f"{version} {name}")) is not None}
    again = {
        name
        for name, one in found.items()
        if asked.unknown and "unknown" in [each["verdict"] for each in one.values()]
    }
    left = [name for name in every if name not in found or name in again]
    if left:
        warm_up()
    ran = run_classes(left, asked.workers, asked.limit, time.monotonic() + 60 * asked.minutes)
    for number, (name, verdict) in enumerate(ran, 1):
        found[name] = verdict
        kept.add(f"{version} {name}", verdict)
        told = ", ".join(
            f"{call}: {one['verdict']} {one['why'][:100]}" for call, one in verdict.items()
        )
        print(f"{number}/{len(left)} {name}  {told}", flush=True)
        if asked.only:
            print(json.dumps(verdict, indent=2))
    if asked.only:
        return
    table = merged(read_table(asked.table), version, found)
    asked.table.write_text(written(table), encoding="utf-8")
    for call in ("forward", "generate"):
        counts = collections.Counter(one[call]["verdict"] for one in found.values() if call in one)
        print(
            f"{call}, transformers {version}: "
            + ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
        )


if __name__ == "__main__":
    main()
