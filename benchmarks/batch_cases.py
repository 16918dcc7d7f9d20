"""Figure: failed attempts and rows kept by the guard on generated batch cases, beside accelerate
and torch-max-mem.

Each case is a small model with random weights, rows, lengths and a device on which they do not all
fit at once. The device counts what the model's own code allocates as it runs; no formula is asked.
The largest feasible batch is found by trying (bisection on the same device). The weights are on the
device before anything is measured, as they are on a GPU.
"""

import contextlib
import os
import random
import warnings
from typing import Any

from support.batch_tools import device_with, largest, tried, weights_bytes
from support.figure import conclude
from support.generated_cases import told, used_cases

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt2", "opt", "mixtral", "t5")


def make_case(number: int, seed: int) -> dict[str, Any]:
    """The numbers of one case; the same for the same seed."""
    draw = random.Random(1000 * seed + number)
    family = FAMILIES[number % len(FAMILIES)]
    long = draw.random() < 0.3
    return {
        "number": number,
        "family": family,
        "hidden": draw.choice((64, 128, 192)),
        "layers": draw.choice((2, 3, 4)),
        "vocab": draw.choice((500, 2000, 8000)),
        "rows": draw.randint(8, 96),
        "prompt": draw.randint(4, 48) if long else draw.randint(48, 384),
        "new": draw.randint(24, 96) if long else draw.randint(2, 16),
        "padded": draw.random() < 0.5,
        "attention": draw.choice(("sdpa", "sdpa", "eager")),
        "beams": draw.choice((1, 1, 1, 2, 3)),
        "samples": draw.random() < 0.2,
        "share": draw.uniform(0.12, 0.95),
    }


def make_model(case: dict[str, Any]) -> Any:
    """The case's model in float32 with random weights."""
    import torch
    import transformers as hf

    hidden = case["hidden"]
    layers = case["layers"]
    vocab = case["vocab"]
    plain = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "head_dim": hidden // 4,
    }
    extra = {
        "mistral": {"sliding_window": 64},
        "gemma2": {"sliding_window": 64, "query_pre_attn_scalar": hidden // 4},
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    }
    if case["family"] == "gpt2":
        config = hf.GPT2Config(
            vocab_size=vocab, n_embd=hidden, n_layer=layers, n_head=4, n_positions=1024
        )
    elif case["family"] == "opt":
        config = hf.OPTConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            ffn_dim=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=1024,
            word_embed_proj_dim=hidden,
        )
    elif case["family"] == "t5":
        config = hf.T5Config(
            vocab_size=vocab,
            d_model=hidden,
            d_kv=hidden // 4,
            d_ff=3 * hidden,
            num_layers=layers,
            num_heads=4,
            decoder_start_token_id=0,
        )
    else:
        config = hf.AutoConfig.for_model(case["family"], **plain, **extra.get(case["family"], {}))
    torch.manual_seed(case["number"])
    if case["family"] == "t5":
        kind = hf.AutoModelForSeq2SeqLM
    else:
        kind = hf.AutoModelForCausalLM
    model = kind.from_config(
        config,
        attn_implementation=None if case["family"] in {"t5", "gemma2"} else case["attention"],
    ).eval()
    model.generation_config.eos_token_id = None
    return model


class Trial:
    """One case on its device: the call on some rows, and the largest number that fits."""

    def __init__(self, case: dict[str, Any]) -> None:
        import torch

        self.case = case
        self.model = make_model(case)
        self.rows = case["rows"]
        rows = case["rows"]
        prompt = case["prompt"]
        self.ids = torch.randint(3, case["vocab"], (rows, prompt))
        self.mask = torch.ones_like(self.ids)
        if case["padded"]:  # every row, so that no part is lighter than another
            for row in range(rows):
                self.mask[row, : 1 + row * prompt // (2 * rows)] = 0
        with self.device(2**40) as device:
            self.call()
            weights = weights_bytes(self.model)
            self.capacity = int(weights + (device.peak_bytes - weights) * case["share"])

    def device(self, capacity: int) -> contextlib.AbstractContextManager[Any]:
        """A device with the weights on it."""
        return device_with(self.model, capacity)

    def call(self, start: int = 0, stop: int | None = None) -> Any:
        """The call on rows ``start`` to ``stop``."""
        case = self.case
        part = slice(start, stop)
        return self.model.generate(
            input_ids=self.ids[part],
            attention_mask=self.mask[part],
            max_new_tokens=case["new"],
            pad_token_id=0,
            do_sample=case["samples"] and case["beams"] == 1,
            num_beams=case["beams"],
        )

    def fits(self, rows: int) -> bool:
        """Whether that many rows run at once."""
        import torch

        with self.device(self.capacity):
            try:
                self.call(0, rows)
            except torch.OutOfMemoryError:
                return False
            return True

    def feasible(self) -> int:
        """The largest number of rows that run at once, 0 where not one does."""
        return largest(self.fits, self.rows)


def run_case(numbers: tuple[int, int]) -> dict[str, Any]:
    """One case under every tool: (failed attempts, rows) each, None where it gave up."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case = make_case(*numbers)
    trial = Trial(case)
    feasible = trial.feasible()
    return {**case, "feasible": feasible, "capacity": trial.capacity, **tried(trial, feasible)}


def main() -> None:
    used, left_out = used_cases(__doc__, 240, run_case)
    print(f"{len(used)} cases with {', '.join(FAMILIES)}; {left_out} left out")
    line, met = told(used)
    conclude(line, met=met)


if __name__ == "__main__":
    main()
