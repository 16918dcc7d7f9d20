"""Figure: the simulated device's live bytes beside the real CPU allocator, and its reserved bytes beside CUDA's own record.

Live: models with random weights really run, once on the simulated device, once with the allocator's own events recorded by
torch.profiler. Reserved: the allocations and frees of memory snapshots recorded on GPUs go through the simulated allocator;
compared is what torch has taken from its device, at every allocation. Those of 20 jobs on an H100 stand in data/h100_snapshots.tar.xz;
--snapshots names a folder of others (record_snapshots.py records one on a GPU, data/public_snapshots.toml lists public ones).
"""

import argparse
import contextlib
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.cpu_allocator import peak_bytes
from support.figure import conclude
from support.recorded_trace import replay, traces

GOAL_LIVE, GOAL_RESERVED = 0.001, 0.02
OWN = Path(__file__).parent / "data" / "h100_snapshots.tar.xz"
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 8}
DECODERS = {
    "llama": {**SIZES, "vocab_size": 8000, "num_key_value_heads": 2},
    "qwen3": {**SIZES, "vocab_size": 32000, "num_key_value_heads": 2, "head_dim": 32},
    "mistral": {**SIZES, "vocab_size": 16000, "num_key_value_heads": 4, "sliding_window": 64},
    "gpt2": {"vocab_size": 16000, "n_embd": 256, "n_layer": 3, "n_head": 8},
}
ENCODERS = {
    "bert": {**SIZES, "vocab_size": 8000},
    "vit": {**SIZES, "image_size": 64, "patch_size": 8},
}


def cases() -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """Name, model and call: generation, the logits of whole prompts in both attentions, encoders, a step of training."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    for name, fields in DECODERS.items():
        for attention in ("sdpa", "eager"):
            torch.manual_seed(0)
            config = AutoConfig.for_model(name, **fields)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
            model.generation_config.eos_token_id = None
            ids = torch.randint(3, 8000, (8, 96))
            yield f"{name} {attention} generate", model, _generation(model, ids)
            yield f"{name} {attention} logits", model, _inference(model, input_ids=ids)
    for name, fields in ENCODERS.items():
        model = AutoModel.from_config(AutoConfig.for_model(name, **fields), dtype=torch.float32).eval()
        inputs = (
            {"pixel_values": torch.rand(8, 3, 64, 64)}
            if name == "vit"
            else {"input_ids": torch.randint(3, 8000, (8, 96))}
        )
        yield f"{name} hidden states", model, _inference(model, **inputs)
    long = AutoModel.from_config(AutoConfig.for_model("llama", **DECODERS["llama"]), dtype=torch.float32).eval()
    yield "llama long prompt", long, _inference(long, input_ids=torch.randint(3, 8000, (1, 1024)))
    trained = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **DECODERS["llama"]), dtype=torch.float32)
    yield "llama training step", trained, _training(trained, torch.randint(3, 8000, (4, 96)))


def _generation(model: Any, ids: Any) -> Callable[[], object]:
    mask = ids.new_ones(ids.shape)
    return lambda: model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)


def _inference(model: Any, **inputs: Any) -> Callable[[], object]:
    import torch

    return torch.inference_mode()(lambda: model(**inputs))


def _training(model: Any, ids: Any) -> Callable[[], object]:
    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def live_errors() -> list[float]:
    """The error of each case: what the device counted beyond the weights and inputs, beside what the allocator gave out."""
    from oomguard.testing import limit_memory

    errors = []
    for name, model, call in cases():
        call()  # what is made once stays
        with limit_memory("1 TiB") as device:
            device.adopt([*model.parameters(), *model.buffers()])
            call()  # now the inputs have been seen too
            before = device.live_bytes
            device.reset_peak()
            call()
            counted = device.peak_bytes
        real = before + peak_bytes(call)
        errors.append(counted / real - 1)
        print(f"{name:24} {counted / 2**20:9.3f} MiB beside {real / 2**20:9.3f} MiB: {errors[-1]:+.3%}", flush=True)
    return errors


@contextlib.contextmanager
def own_snapshots() -> Iterator[Path]:
    """A folder of the snapshots that stand in this repository."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(OWN) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def reserved_errors(folder: Path) -> list[float]:
    """The largest error of each recorded trace in the folder, at any of its allocations."""
    errors, grown = [], 0
    for path in sorted(folder.rglob("*.p*k*l*")):
        for trace in traces(path):
            found = replay(trace)
            errors.append(found.worst_ratio)
            grown += found.segments_taken > 0
            print(
                f"{path.name[-48:]:48} {found.allocations:6} allocations, {found.segments_taken:4} segments taken: "
                f"at most {found.simulated_bytes / 2**20:6.0f} MiB beside {found.torch_bytes / 2**20:6.0f} MiB, "
                f"at any allocation within {errors[-1]:.2%}",
                flush=True,
            )
    if errors:
        print(f"{len(errors)} traces, torch took more of its device in {grown} of them")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--snapshots", type=Path, help="a folder of memory snapshots that were recorded on GPUs")
    folder = parser.parse_args().snapshots
    warnings.filterwarnings("ignore")
    with own_snapshots() if folder is None else contextlib.nullcontext(folder) as found:
        live, reserved = live_errors(), reserved_errors(found)
    worst_live, worst_reserved = max(map(abs, live)), max(reserved, default=0.0)
    told = f"worst {worst_reserved:.2%}, n = {len(reserved)} (goal <= {GOAL_RESERVED:.0%})"
    conclude(
        f"reserved bytes beside CUDA's record: {told if reserved else 'not measured, n = 0'}; "
        f"live bytes beside the CPU allocator: worst {worst_live:.3%}, n = {len(live)} (goal <= {GOAL_LIVE:.1%})",
        met=worst_live <= GOAL_LIVE and worst_reserved <= GOAL_RESERVED,
    )


if __name__ == "__main__":
    main()
