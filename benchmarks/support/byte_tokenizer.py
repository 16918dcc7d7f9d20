"""A tokenizer of single bytes for tiny models: what it takes to serve text, without a download."""

import json
from pathlib import Path
from typing import Any

SPECIALS = ("<unk>", "<s>", "</s>", "<pad>")
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write_tokenizer(folder: Path, *, entries: int = 0, image: bool = False) -> None:
    """Write tokenizer.json and tokenizer_config.json, filled up to so many entries, with a token
    for images if asked.
    """
    if image:
        specials = [*SPECIALS, "<image>"]
    else:
        specials = [*SPECIALS]
    words = [*specials, *_characters()]
    words += [f"tok{number}" for number in range(len(words), entries)]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {word: number for number, word in enumerate(words)},
        "merges": [],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(number, text) for number, text in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": 10**9,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT,
    }
    if image:
        about["extra_special_tokens"] = {"image_token": "<image>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def _characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary, as
    GPT-2 has them.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)
    ]


def _special(number: int, text: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **plain, "special": True}
