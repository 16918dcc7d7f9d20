# ruff: noqa: N818, PLR0133, BLE001 (these programs are wrong on purpose)
"""Small programs that work or fail for reasons other than memory; healthy_logs.py keeps what they
print.

As a test file for pytest it holds tests that fail on purpose.
"""

import json
import sys
import traceback
from pathlib import Path


class Own(Exception):
    """An exception of our own."""


def test_numbers():
    assert [1, 2, 3] == [1, 2, 4]


def test_texts():
    assert "the quick brown fox\njumps" == "the quick brown cat\njumps"


def test_dictionaries():
    assert {"memory": 1, "model": "bloom"} == {"memory": 2, "model": "room"}


def test_raises():
    json.loads("{")


def test_fixture_is_missing(no_such_fixture):
    assert no_such_fixture


def test_deep():
    def down(n: int) -> float:
        if n == 0:
            return 1 / n
        return down(n - 1)

    assert down(20)


def test_chain():
    try:
        int("x")
    except ValueError as error:
        raise Own("while reading the settings") from error


def tracebacks(folder: Path) -> None:
    """One real traceback of each kind of exception: built-in ones, the standard library's, chains
    and groups.
    """
    import builtins
    import configparser
    import decimal
    import socket
    import subprocess
    import tomllib
    import zipfile

    def raise_it(kind: type[BaseException]) -> None:
        if issubclass(kind, UnicodeDecodeError):
            b"\xff".decode()
        if issubclass(kind, UnicodeEncodeError):
            "\ud800".encode()
        if issubclass(kind, UnicodeTranslateError):
            raise UnicodeTranslateError("x", 0, 1, "no reason")
        if issubclass(kind, BaseExceptionGroup):
            raise kind("several", [ValueError("first"), OSError(28, "No space left on device")])
        if issubclass(kind, OSError):
            raise kind(5, "Input/output error", "/dev/nothing")
        raise kind(f"a {kind.__name__} on purpose")

    kinds = [
        k for k in vars(builtins).values() if isinstance(k, type) and issubclass(k, BaseException)
    ]
    calls = [
        (k.__name__, lambda k=k: raise_it(k))
        for k in kinds
        if k not in {MemoryError, BaseException}
    ]
    calls += [
        ("json", lambda: json.loads("[1,")),
        ("toml", lambda: tomllib.loads("a = ")),
        ("decimal", lambda: decimal.Decimal("x")),
        ("config", lambda: configparser.ConfigParser().get("a", "b")),
        ("zip", lambda: zipfile.ZipFile(__file__)),
        ("process", lambda: subprocess.run(["false"], check=True)),
        ("socket", lambda: socket.create_connection(("127.0.0.1", 9))),
        ("timeout", lambda: subprocess.run(["sleep", "5"], timeout=0.01, check=True)),
        ("own", lambda: raise_it(Own)),
        ("chain", test_chain),
        ("recursion", lambda: eval("f()", {"f": lambda: raise_it(RecursionError)})),
    ]
    for name, call in calls:
        try:
            call()
        except BaseException:
            text = traceback.format_exc()
        (folder / f"traceback_{name}.log").write_text(text)
        print(text)


def transformers(family: str) -> None:
    """A tiny random model of one family: its configuration, a few steps of training, a generation,
    its warnings.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
    )

    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "n_embd": 64,
        "d_model": 64,
        "num_hidden_layers": 2,
        "n_layer": 2,
        "num_layers": 2,
        "num_attention_heads": 4,
        "n_head": 4,
        "num_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "d_ff": 128,
        "ffn_dim": 128,
        "head_dim": 16,
        "d_kv": 16,
        "word_embed_proj_dim": 64,
    }
    base = AutoConfig.for_model(family)
    config = AutoConfig.for_model(family, **{k: v for k, v in sizes.items() if hasattr(base, k)})
    config.pad_token_id = 0
    config.bos_token_id = 1
    config.eos_token_id = 2
    print(config)
    kind = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}.get(
        family, AutoModelForCausalLM
    )
    model = kind.from_config(config)
    print(model)
    print(f"memory footprint {model.get_memory_footprint()} bytes")
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(3, 256, (4, 32))
    for step in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        print({"loss": float(loss), "step": step})
    if family != "bert":
        print(model.generate(ids, max_new_tokens=20, do_sample=True))
        print(model.generate(ids, max_length=8, num_beams=2))


def trainer(folder: Path) -> None:
    """The Trainer on the CPU, or the message that says what it needs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(64)]
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=20, logging_steps=1, use_cpu=True, report_to=[]
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()


def missing(_: Path) -> None:
    """A model that is not there."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained("bigscience/bloom-that-is-not-there")


def too_long(_: Path) -> None:
    """A prompt that is longer than the model's positions."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    )
    model.generate(torch.randint(0, 64, (1, 40)), max_new_tokens=8)


def main() -> None:
    name = sys.argv[1]
    argument = sys.argv[2]
    if name == "transformers":
        transformers(argument)
    else:
        {"tracebacks": tracebacks, "trainer": trainer, "missing": missing, "too_long": too_long}[
            name
        ](Path(argument))


if __name__ == "__main__":
    main()
