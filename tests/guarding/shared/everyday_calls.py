"""What people call of a model every day, as they write it, on whatever device they have it: each takes more memory the more rows it has.

``CALLS`` makes of a device and a scale a function without arguments; a scale of 1 takes about a GiB beside the weights.
"""

from __future__ import annotations

import torch
import transformers as hf

VOCAB, IMAGE_TOKEN = 1024, 1000
CALLS = {}


def everyday(function):
    CALLS[function.__name__.replace("_", " ")] = function
    return function


def sizes(scale, **more):
    """Of any transformer: what a token takes is nearly all in the layers' inner width."""
    width = max(32, int(512 * scale))
    return {
        "vocab_size": VOCAB,
        "hidden_size": width,
        "intermediate_size": 8 * width,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        **more,
    }


def made(kind, config, device):
    torch.manual_seed(0)
    model = kind(config).eval().to(device)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model


def llama(device, scale):
    return made(
        hf.LlamaForCausalLM,
        hf.LlamaConfig(**sizes(scale, eos_token_id=None, bos_token_id=1)),
        device,
    )


def bert(kind, device, scale, **more):
    return made(kind, hf.BertConfig(**sizes(scale, **more)), device)


def batch(device, rows=64, tokens=256, side="left"):
    ids = torch.randint(3, 990, (rows, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, slice(0, row) if side == "left" else slice(tokens - row, tokens)] = 0
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def noise(device, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(device)


@everyday
def greedy_generate(device, scale):
    model, given = llama(device, scale), batch(device)
    return lambda: model.generate(**given, max_new_tokens=4, do_sample=False)


@everyday
def beams(device, scale):
    model, given = llama(device, scale), batch(device, rows=32)
    return lambda: model.generate(**given, max_new_tokens=4, do_sample=False, num_beams=2)


@everyday
def logits_of_a_forward_pass(device, scale):
    model, given = llama(device, scale), batch(device, side="right")
    return torch.no_grad()(lambda: model(**given, use_cache=False).logits)


@everyday
def loss_of_labels(device, scale):
    model, given = llama(device, scale), batch(device, side="right")
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    return torch.no_grad()(lambda: model(**given, labels=labels, use_cache=False).loss)


@everyday
def mean_pooled_embeddings(device, scale):
    model, given = bert(hf.BertModel, device, scale), batch(device, side="right")

    @torch.inference_mode()
    def call():
        hidden, mask = model(**given).last_hidden_state, given["attention_mask"].unsqueeze(-1)
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)

    return call


@everyday
def classification(device, scale):
    model = bert(hf.BertForSequenceClassification, device, scale, num_labels=5)
    given = batch(device, side="right")
    return torch.no_grad()(lambda: model(**given).logits)


@everyday
def images(device, scale):
    width = sizes(scale)["hidden_size"]
    config = hf.ViTConfig(
        image_size=128,
        patch_size=8,
        num_labels=5,
        **{name: size for name, size in sizes(scale).items() if name in hf.ViTConfig().to_dict()},
    )
    model = made(hf.ViTForImageClassification, config, device)
    pixels = noise(device, 64 if width > 32 else 32, 3, 128, 128)
    return torch.no_grad()(lambda: model(pixel_values=pixels).logits)


@everyday
def whisper(device, scale):
    width, frames = sizes(scale)["hidden_size"], 400
    config = hf.WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=width,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8 * width,
        decoder_ffn_dim=2 * width,
        max_source_positions=frames // 2,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(0)
    model, features = (
        hf.WhisperForConditionalGeneration(config).eval().to(device),
        noise(device, 96, 8, frames),
    )
    return lambda: model.generate(input_features=features, max_new_tokens=6, do_sample=False)


@everyday
def translation(device, scale):
    width = sizes(scale)["hidden_size"]
    config = hf.T5Config(
        vocab_size=VOCAB,
        d_model=width,
        d_ff=8 * width,
        d_kv=width // 4,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    model, given = made(hf.T5ForConditionalGeneration, config, device), batch(device, side="right")
    return lambda: model.generate(**given, max_new_tokens=4, do_sample=False)


@everyday
def images_beside_text(device, scale):
    text = sizes(scale, eos_token_id=None, bos_token_id=1)
    width = text["hidden_size"]
    seen = hf.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=8 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        projection_dim=32,
    )
    config = hf.LlavaConfig(
        vision_config=seen, text_config=hf.LlamaConfig(**text), image_token_index=IMAGE_TOKEN
    )
    config.pad_token_id = 0
    model, given = made(hf.LlavaForConditionalGeneration, config, device), batch(device)
    given["input_ids"][:, -80:-16] = IMAGE_TOKEN  # 64 patches an image
    pixels = noise(device, 64, 3, 64, 64)
    return lambda: model.generate(**given, pixel_values=pixels, max_new_tokens=4, do_sample=False)


@everyday
def text_generation_pipeline(device, scale):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {
        word: number
        for number, word in enumerate(["[PAD]", "[UNK]", "the", "quick", "brown", "fox"])
    }
    own = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]", padding_side="left"
    )
    pipe = hf.pipeline(
        "text-generation", model=llama(device, scale), tokenizer=tokenizer, device=device
    )
    texts = ["the quick brown fox " * (64 - row % 8) for row in range(64)]
    options = {"max_new_tokens": 4, "do_sample": False, "return_tensors": True, "batch_size": 64}
    return lambda: torch.tensor(
        [
            row[0]["generated_token_ids"][-4:] for row in pipe(texts, **options)
        ]  # a pipeline's lists differ in length
    )


@everyday
def trainer_evaluate(device, scale):
    model, given = (
        bert(hf.BertForSequenceClassification, device, scale, num_labels=5),
        batch("cpu", side="right"),
    )
    rows = [
        {"labels": row % 5, **{name: value[row] for name, value in given.items()}}
        for row in range(64)
    ]
    options = {
        "per_device_eval_batch_size": 64,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
    }
    trainer = hf.Trainer(model, hf.TrainingArguments("trainer_output", **options))
    return lambda: torch.tensor(trainer.evaluate(rows)["eval_loss"])
