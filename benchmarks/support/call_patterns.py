"""Calls that users make of a model, by name: the head, the families that have it, the inputs, and
the call on them.

Each was chosen from the libraries' own pages before any case was run. A call is plain user code: it
knows nothing of a guard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from support.call_models import FAMILIES, SAMPLES_A_TOKEN

Inputs = dict[str, Any]
Call = Callable[[Any, Inputs, dict[str, Any]], Any]


@dataclass(frozen=True)
class Pattern:
    """One kind of call.

    Attributes:
        head: the class of transformers that makes the model.
        families: whose models it is for.
        inputs: what it takes: ``text``, ``images`` or ``sound``.
        call: makes it, on inputs of some rows.
        share: how often it stands among the cases.
    """

    head: str
    families: Sequence[str]
    inputs: str
    call: Call
    share: int = 2


def generated(**options: Any) -> Call:
    """Return a call of ``generate``."""

    def call(model: Any, inputs: Inputs, case: dict[str, Any]) -> Any:
        return model.generate(**inputs, max_new_tokens=case["new"], pad_token_id=0, **options)

    return call


def forward(**options: Any) -> Call:
    """Return a plain call of the model, all that it gives."""

    def call(model: Any, inputs: Inputs, case: dict[str, Any]) -> Any:
        return model(**inputs, **options)

    return call


def with_labels(model: Any, inputs: Inputs, case: dict[str, Any]) -> Any:
    return model(
        **inputs, labels=inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    )


def last_token(model: Any, inputs: Inputs, case: dict[str, Any]) -> Any:
    return model(**inputs).logits[:, -1].log_softmax(-1)


def mean_pooled(model: Any, inputs: Inputs, case: dict[str, Any]) -> Any:
    hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)


def decoded(model: Any, inputs: Inputs, case: dict[str, Any]) -> Any:
    return model(**inputs, decoder_input_ids=inputs["input_ids"][:, : case["new"]]).logits


CAUSAL_HEAD = "AutoModelForCausalLM"
CAUSAL, ENCODERS, ENCODER_DECODERS, VISION, SPEECH = FAMILIES.values()
PATTERNS: dict[str, Pattern] = {
    "greedy": Pattern(CAUSAL_HEAD, CAUSAL, "text", generated(do_sample=False), 6),
    "beams": Pattern(CAUSAL_HEAD, CAUSAL, "text", generated(do_sample=False, num_beams=3), 3),
    "sampled": Pattern(CAUSAL_HEAD, CAUSAL, "text", generated(do_sample=True, top_k=20), 3),
    "several sequences": Pattern(
        CAUSAL_HEAD, CAUSAL, "text", generated(do_sample=True, num_return_sequences=2)
    ),
    "penalties": Pattern(
        CAUSAL_HEAD,
        CAUSAL,
        "text",
        generated(do_sample=False, repetition_penalty=1.2, no_repeat_ngram_size=3),
    ),
    "scores": Pattern(
        CAUSAL_HEAD,
        CAUSAL,
        "text",
        generated(do_sample=False, return_dict_in_generate=True, output_scores=True),
    ),
    "logits": Pattern(CAUSAL_HEAD, CAUSAL, "text", forward(use_cache=False), 4),
    "logits and cache": Pattern(
        CAUSAL_HEAD, [f for f in CAUSAL if f != "mamba"], "text", forward(use_cache=True)
    ),
    "hidden states": Pattern(
        CAUSAL_HEAD, CAUSAL, "text", forward(use_cache=False, output_hidden_states=True)
    ),
    "tuple": Pattern(CAUSAL_HEAD, CAUSAL, "text", forward(use_cache=False, return_dict=False)),
    "loss": Pattern(CAUSAL_HEAD, CAUSAL, "text", with_labels, 3),
    "last token": Pattern(CAUSAL_HEAD, CAUSAL, "text", last_token, 3),
    "features of a decoder": Pattern("AutoModel", CAUSAL, "text", mean_pooled),
    "classification": Pattern("AutoModelForSequenceClassification", ENCODERS, "text", forward(), 4),
    "tokens": Pattern("AutoModelForTokenClassification", ENCODERS, "text", forward(), 2),
    "masked": Pattern("AutoModelForMaskedLM", ENCODERS, "text", forward(), 3),
    "embeddings": Pattern("AutoModel", ENCODERS, "text", mean_pooled, 4),
    "translation": Pattern(
        "AutoModelForSeq2SeqLM", ENCODER_DECODERS, "text", generated(do_sample=False), 4
    ),
    "translation with beams": Pattern(
        "AutoModelForSeq2SeqLM",
        ENCODER_DECODERS,
        "text",
        generated(do_sample=False, num_beams=3),
        2,
    ),
    "decoder logits": Pattern("AutoModelForSeq2SeqLM", ENCODER_DECODERS, "text", decoded, 3),
    "images": Pattern("AutoModelForImageClassification", VISION, "images", forward(), 4),
    "image features": Pattern("AutoModel", VISION, "images", forward(), 3),
    "speech": Pattern("AutoModelForCTC", SPEECH, "sound", forward(), 3),
    "speech features": Pattern("AutoModel", SPEECH, "sound", forward(), 2),
}


def make_inputs(kind: str, case: dict[str, Any]) -> Inputs:
    """Return a call's inputs: text is padded on the left for ``generate``, on the right for others,
    or not at all.
    """
    import torch

    generator = torch.Generator().manual_seed(case["number"])
    rows = case["rows"]
    length = case["prompt"]
    if kind == "images":
        return {
            "pixel_values": torch.randn(rows, 3, case["image"], case["image"], generator=generator)
        }
    if kind == "sound":
        return {"input_values": torch.randn(rows, length * SAMPLES_A_TOKEN, generator=generator)}
    ids = torch.randint(3, case["vocab"], (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows if case["padding"] else 0):
        padding = row * length // (2 * rows)
        if case["padding"] == "left":
            at = slice(0, padding)
        else:
            at = slice(length - padding, length)
        ids[row, at], mask[row, at] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}
