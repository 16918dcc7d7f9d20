"""Show oomguard in two minutes: diagnose a real log, then rescue a real model call."""

import os
import pathlib
import subprocess
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
HERE = pathlib.Path(__file__).parent
LOG = HERE / "logs" / "vllm_serve_kv_cache.log"


def main() -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.rule("1. A real log of vLLM 0.32.0 that failed to start")
    console.print(f"$ oomguard diagnose {LOG.relative_to(HERE.parent)}", style="bold")
    subprocess.run(
        [sys.executable, "-m", "oomguard", "diagnose", LOG.relative_to(HERE.parent)],
        cwd=HERE.parent,
        check=True,
    )

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import oomguard
    from oomguard.report.history import attempts_table
    from oomguard.testing import limit_memory

    console.rule("2. A real Llama on a simulated device of 256 MiB: oomguard.guard")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    batch = {"input_ids": torch.randint(3, 2048, (64, 384))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])

    def generate(start: int = 0, stop: int = 64) -> torch.Tensor:
        part = {name: value[start:stop] for name, value in batch.items()}
        return model.generate(**part, max_new_tokens=16, do_sample=False)

    expected = generate()
    with limit_memory("256 MiB"):
        try:
            generate()
        except torch.OutOfMemoryError as error:
            console.print("Without the guard:", style="bold")
            console.print(
                f"  torch.OutOfMemoryError: {str(error).split(' Including')[0]}", markup=False
            )
    began_s = time.monotonic()
    with limit_memory("256 MiB"), oomguard.guard() as g:
        result = generate()
        took_s = time.monotonic() - began_s
    largest = g.attempts[-1].settings["batch_size"]
    began_s = time.monotonic()
    with limit_memory("256 MiB"):
        for start in range(0, 64, largest):
            generate(start, start + largest)
    ideal_s = time.monotonic() - began_s
    console.print("\nWith it:", style="bold")
    console.print(attempts_table(g.attempts))
    failed_s = sum(attempt.seconds for attempt in g.attempts[:-1])
    parts_s = g.attempts[-1].seconds
    console.print("Where the seconds go:", style="bold")
    for what, seconds in [
        (f"the largest parts that fit, {largest} rows, run directly", ideal_s),
        ("the guarded call", took_s),
        ("  of it the failed attempt", failed_s),
        ("  of it all parts, the small first one too", parts_s),
        ("  of it the rest: diagnosis, plan and log", took_s - failed_s - parts_s),
    ]:
        console.print(f"  {seconds:6.2f} s  {what}", markup=False)
    console.print(f"The guard took {took_s / ideal_s:.1f} times as long as the largest parts.")
    same = int((result == expected).all(dim=1).sum())
    console.print(
        f"Rows equal to a run without a memory limit, in order: {same} of {len(expected)}",
        style="bold",
    )
    if same != len(expected):
        raise SystemExit("the rows differ")


if __name__ == "__main__":
    main()
