"""A traced call needs what the real one takes, and leaves the user's model as it is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
hf = pytest.importorskip("transformers", reason="transformers is not installed")
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402

from oomguard.engines.transformers.generate import GenerateCall  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402

SMALL = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "mistral with a window": lambda: hf.MistralConfig(**SMALL, sliding_window=24),
    "t5": lambda: hf.T5Config(
        vocab_size=500, d_model=64, d_kv=16, d_ff=192, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
}
RECORD = {"return_dict_in_generate": True}


def make(name: str):
    torch.manual_seed(0)
    kind = hf.AutoModelForSeq2SeqLM if name == "t5" else hf.AutoModelForCausalLM
    model = kind.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def a_call(model, rows=6, prompt=40, *, padded=False, **options):
    ids = torch.randint(3, 500, (rows, prompt), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[:, :3] = 0
    kwargs = {
        "input_ids": ids,
        "attention_mask": mask,
        "pad_token_id": 0,
        "do_sample": False,
        "max_new_tokens": 12,
        **options,
    }
    return GenerateCall.of(model, (), kwargs)


def measured(call, rows):
    args, kwargs = call.part(0, rows)
    with limit_memory("4 GiB") as device:
        device.adopt([*call.model.parameters(), *call.model.buffers(), kwargs["input_ids"], kwargs["attention_mask"]])
        before = device.live_bytes
        call.model.generate(*args, **kwargs)
        return device.peak_bytes - before


def test_the_traced_need_is_what_the_call_takes(subtests):
    for name, options in [
        ("mistral with a window", {"padded": True, "max_new_tokens": 30}),
        ("llama", {"num_beams": 3}),
        ("t5", {"max_new_tokens": 3}),
        ("llama", {**RECORD, "output_scores": True, "max_new_tokens": 30}),
    ]:
        with subtests.test(name=name, options=options):
            call = a_call(make(name), **options)
            # A few tensors of one number a token are counted with the prompt or not: a KiB a row in so small a model.
            assert call.traced().need_bytes(4) == pytest.approx(measured(call, 4), rel=0.005, abs=4096)


def test_the_user_s_model_stays_as_it_is(subtests):
    for name in ("llama", "t5"):
        with subtests.test(name=name):
            model = make(name)
            before = {key: (value.data_ptr(), value.sum().item()) for key, value in model.state_dict().items()}
            random_state = torch.get_rng_state()

            assert a_call(model, max_new_tokens=40).traced().need_bytes(3) is not None

            assert {key: (value.data_ptr(), value.sum().item()) for key, value in model.state_dict().items()} == before
            assert not any(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers()))
            assert torch.equal(torch.get_rng_state(), random_state)


class ReadsValues(hf.LlamaForCausalLM):
    """Its code depends on values, which fake tensors do not have."""

    def forward(self, input_ids=None, **kwargs):
        if input_ids is not None:
            input_ids[input_ids > 3].unique().tolist()
        return super().forward(input_ids=input_ids, **kwargs)


def test_a_model_that_cannot_be_traced_is_not_known():
    model = ReadsValues(CONFIGS["llama"]()).eval()
    assert a_call(model).traced().need_bytes(2) is None


def test_a_call_that_is_not_split_is_not_traced(subtests):
    for name, options in [
        ("streamer", {"streamer": object()}),
        ("a record of beams", {**RECORD, "num_beams": 2}),
    ]:
        with subtests.test(name):
            assert a_call(make("llama"), **options).traced() is None
