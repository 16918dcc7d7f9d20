"""Jobs on a GPU whose allocations are recorded, by name: what fills and fragments torch's allocator in inference and training.

A job is plain code and is run once in a process of its own. Models have random weights, in bfloat16 where nothing else is said.
"""

from collections.abc import Callable
from typing import Any

Job = Callable[[str], object]
JOBS: dict[str, Job] = {}
VOCAB = 8000
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16}


def job(function: Job) -> Job:
    """Register a job under its name."""
    JOBS[function.__name__] = function
    return function


def _llama(device: str, *, attention: str = "sdpa", dtype: str = "bfloat16", **more: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    fields = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 16384, "pad_token_id": 0, **more}
    config = LlamaConfig(eos_token_id=None, bos_token_id=1, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=getattr(torch, dtype))
    return model.eval().to(device)


def _ids(device: str, rows: int, tokens: int) -> Any:
    import torch

    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1)).to(device)


def _generate(model: Any, rows: int, tokens: int, new: int, **options: Any) -> Any:
    ids = _ids(model.device, rows, tokens)
    return model.generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=new, do_sample=False, **options)


@job
def generate_one_row(device: str) -> None:
    _generate(_llama(device), 1, 64, 48)


@job
def generate_a_batch(device: str) -> None:
    _generate(_llama(device), 64, 512, 32)


@job
def generate_a_batch_in_float32(device: str) -> None:
    _generate(_llama(device, dtype="float32"), 32, 256, 32)


@job
def generate_after_a_long_prompt(device: str) -> None:
    _generate(_llama(device), 2, 8192, 16)


@job
def generate_with_few_heads_of_keys(device: str) -> None:
    _generate(_llama(device, num_key_value_heads=2), 128, 256, 24)


@job
def generate_with_a_static_cache(device: str) -> None:
    _generate(_llama(device), 16, 256, 24, cache_implementation="static", disable_compile=True)


@job
def generate_with_beams(device: str) -> None:
    _generate(_llama(device), 8, 256, 24, num_beams=4)


@job
def generate_with_eager_attention(device: str) -> None:
    _generate(_llama(device, attention="eager"), 16, 512, 16)


@job
def generate_batches_that_grow(device: str) -> None:
    model = _llama(device)
    for rows in (1, 3, 6, 11, 17, 26, 40, 61):
        _generate(model, rows, 40 * rows, 4)


@job
def generate_batches_that_shrink(device: str) -> None:
    model = _llama(device)
    for rows in (61, 40, 26, 17, 11, 6, 3, 1):
        _generate(model, rows, 40 * rows, 4)


@job
def logits_of_long_prompts(device: str) -> None:
    import torch

    model = _llama(device)
    with torch.inference_mode():
        for tokens in (1024, 4096, 2048, 8192, 512):
            model(_ids(device, 2, tokens), use_cache=False).logits.float().log_softmax(-1)


@job
def logits_of_many_rows_kept(device: str) -> None:
    import torch

    model, rows = _llama(device), (4, 9, 5, 12, 7, 3, 10)
    with torch.no_grad():
        kept = [model(_ids(device, count, 300), use_cache=False).logits[:, -1].clone() for count in rows]
        torch.cat(kept)


@job
def classification(device: str) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**SIZES, vocab_size=VOCAB, num_labels=5)).eval().to(device)
    with torch.inference_mode():
        for rows, tokens in ((32, 512), (64, 128), (8, 384), (96, 256), (16, 500)):
            model(_ids(device, rows, tokens))


@job
def images(device: str) -> None:
    import torch
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(**SIZES)).eval().to(device)
    with torch.inference_mode():
        for rows in (8, 32, 64, 16):
            model(torch.rand(rows, 3, 224, 224, device=device))


@job
def speech(device: str) -> None:
    import torch
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    model = Wav2Vec2Model(Wav2Vec2Config(**{**SIZES, "num_hidden_layers": 3})).eval().to(device)
    with torch.inference_mode():
        for rows, seconds in ((4, 8), (8, 3), (2, 15), (6, 6)):
            model(torch.randn(rows, 16000 * seconds, device=device))


@job
def translation(device: str) -> None:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=VOCAB, d_model=768, d_ff=3072, num_layers=6, num_heads=12, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval().to(device)
    _generate(model, 32, 400, 24)


@job
def training_with_adamw(device: str) -> None:
    import torch

    model = _llama(device, dtype="float32").train()
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in (4, 6, 3, 6):
        ids = _ids(device, rows, 256)
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@job
def training_with_checkpoints(device: str) -> None:
    model = _llama(device, dtype="float32").train()
    model.gradient_checkpointing_enable()
    for rows in (6, 10, 8):
        ids = _ids(device, rows, 512)
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)


@job
def blocks_of_any_size_come_and_go(device: str) -> None:
    import random

    import torch

    draw, held = random.Random(0), {}
    for number in range(12_000):
        size = int(2 ** draw.uniform(9, 25))
        held[number] = torch.empty(size, dtype=torch.uint8, device=device)
        while len(held) > 150:
            del held[draw.choice([*held])]
        if number % 4000 == 3999 and device != "cpu":
            torch.cuda.empty_cache()


@job
def many_small_blocks(device: str) -> None:
    import torch

    held = [torch.empty(512 * (1 + number % 7), dtype=torch.uint8, device=device) for number in range(45_000)]
    del held[::2]
    held += [torch.empty(4096, dtype=torch.uint8, device=device) for _ in range(10_000)]


@job
def two_streams(device: str) -> None:
    import torch

    model, other = _llama(device), torch.cuda.Stream()
    with torch.inference_mode():
        for rows in (4, 8, 6):
            model(_ids(device, rows, 512), use_cache=False)
            with torch.cuda.stream(other):
                model(_ids(device, rows, 256), use_cache=False)
    torch.cuda.synchronize()


@job
def cache_on_the_host(device: str) -> None:
    _generate(_llama(device), 8, 512, 16, cache_implementation="offloaded")
