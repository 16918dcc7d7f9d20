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
    "llama whose rotary table follows the length": lambda: hf.LlamaConfig(
        **{
            **SMALL,
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4},
        }
    ),
    "mistral with a window": lambda: hf.MistralConfig(**SMALL, sliding_window=24),
    "gemma2": lambda: hf.Gemma2Config(**SMALL, sliding_window=24, query_pre_attn_scalar=16),
    "mixtral in float32": lambda: hf.MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "gpt2": lambda: hf.GPT2Config(vocab_size=500, n_embd=64, n_layer=2, n_head=4, n_positions=512),
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"padded": True, "max_new_tokens": 30}) for name in CONFIGS),
        ("llama", {}),
        ("llama", {"max_new_tokens": 60, "prompt": 8}),
        ("llama", {"num_beams": 3}),
        ("t5", {"max_new_tokens": 3}),
        ("llama", {**RECORD, "output_scores": True, "max_new_tokens": 30}),
        ("llama", {**RECORD, "output_attentions": True, "output_hidden_states": True, "max_new_tokens": 30}),
        ("t5", {**RECORD, "output_logits": True, "max_new_tokens": 30}),
    ],
    ids=str,
)
def test_the_traced_need_is_what_the_call_takes(name, options):
    call = a_call(make(name), **options)
    # A few tensors of one number a token are counted with the prompt or not: a KiB a row in so small a model.
    assert call.traced().need_bytes(4) == pytest.approx(measured(call, 4), rel=0.005, abs=4096)


def test_a_call_in_inference_mode_is_traced_as_any_other():
    call = a_call(make("llama"), padded=True)
    with torch.inference_mode():
        assert call.traced().need_bytes(4) == a_call(call.model, padded=True).traced().need_bytes(4) is not None


@pytest.mark.parametrize("name", CONFIGS)
def test_the_user_s_model_stays_as_it_is(name):
    model = make(name)
    before = {key: (value.data_ptr(), value.sum().item()) for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()

    assert a_call(model, max_new_tokens=40).traced().need_bytes(3) is not None

    assert {key: (value.data_ptr(), value.sum().item()) for key, value in model.state_dict().items()} == before
    assert not any(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_hooks_see_no_fake_tensor():
    model, seen = make("llama"), []

    def hook(_module: object, _inputs: object, output: object) -> None:
        seen.append(output)

    hook.__module__ = "accelerate.hooks"  # one of the user's own keeps the call whole: nothing is traced
    model.model.layers[0].register_forward_hook(hook)

    assert a_call(model).traced().need_bytes(3) is not None

    assert seen == []
    assert len(model.model.layers[0]._forward_hooks) == 1


def test_padding_without_a_mask_is_masked_as_transformers_does():
    model = make("llama")
    model.generation_config.pad_token_id = 7
    call = a_call(model)
    ids = call.kwargs["input_ids"].clone()
    ids[:, :5] = 7
    kwargs = {name: value for name, value in call.kwargs.items() if name not in {"attention_mask", "pad_token_id"}}
    padded = GenerateCall.of(model, (), {**kwargs, "input_ids": ids})
    with limit_memory("4 GiB") as device:
        device.adopt([*model.parameters(), *model.buffers(), ids])
        before = device.live_bytes
        model.generate(**padded.kwargs)
        real = device.peak_bytes - before

    assert padded.traced().need_bytes(6) == pytest.approx(real, rel=0.01, abs=4096)


def test_the_replayed_allocations_reach_the_traced_peak():
    from oomguard.memory.generate.fake_generate import rows_like, trace_call, twin_of

    call = a_call(make("t5"), rows=16)
    twin = twin_of(call.model)
    arguments = {**call.kwargs, "max_new_tokens": 60}
    arguments |= {name: rows_like(twin, arguments[name], 16) for name in ("input_ids", "attention_mask")}
    traced = trace_call(twin, arguments, 60, mask_is_full=True, keep_events=True)
    alive, most, sizes = 0, 0, {}
    for number, size in traced.all_events(60):
        alive += size - sizes.get(number, 0)
        sizes[number] = size
        most = max(most, alive)

    assert most == pytest.approx(traced.peak_bytes(60), rel=0.02)


def made_by(call, **options):
    """The sizes of what a traced call of five steps makes."""
    from oomguard.memory.generate.fake_generate import rows_like, trace_call, twin_of

    twin = twin_of(call.model)
    arguments = {**call.kwargs, "max_new_tokens": 5}
    arguments |= {name: rows_like(twin, arguments[name], 16) for name in ("input_ids", "attention_mask")}
    return {size for _, size in trace_call(twin, arguments, 5, keep_events=True, **options).own_events(5)}


def test_a_mask_that_hides_nothing_is_asked_by_its_number_and_made_no_larger():
    call = a_call(make("llama"), rows=16, prompt=40)
    of_all_rows = 16 * 40 * 40  # one entry for each pair of tokens

    assert of_all_rows not in made_by(call, mask_is_full=True)
    assert of_all_rows in made_by(call, mask_is_full=False)


def test_a_generation_config_and_positional_inputs_are_traced_alike():
    model = make("llama")
    call = a_call(model)
    config = hf.GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    positional = GenerateCall.of(
        model, (call.kwargs["input_ids"], config), {"attention_mask": call.kwargs["attention_mask"]}
    )

    assert positional.traced().need_bytes(4) == call.traced().need_bytes(4)


class ReadsValues(hf.LlamaForCausalLM):
    """Its code depends on values, which fake tensors do not have."""

    def forward(self, input_ids=None, **kwargs):
        if input_ids is not None:
            input_ids[input_ids > 3].unique().tolist()
        return super().forward(input_ids=input_ids, **kwargs)


def test_a_model_that_cannot_be_traced_is_not_known():
    model = ReadsValues(CONFIGS["llama"]()).eval()
    assert a_call(model).traced().need_bytes(2) is None


@pytest.mark.parametrize(
    "options", [{"streamer": object()}, {**RECORD, "num_beams": 2}], ids=["streamer", "a record of beams"]
)
def test_a_call_that_is_not_split_is_not_traced(options):
    assert a_call(make("llama"), **options).traced() is None


@pytest.mark.parametrize("asked", [{"output_scores": True}, {"output_attentions": True}], ids=["scores", "attentions"])
def test_the_results_of_a_record_are_what_its_call_leaves_and_a_step_s_own(asked):
    call = a_call(make("llama"), rows=8, **RECORD, **asked, max_new_tokens=60)
    traced = call.traced()
    traced.need_bytes(4)

    with limit_memory("4 GiB") as device:
        device.adopt([*call.model.parameters(), *call.model.buffers(), call.kwargs["input_ids"]])
        before = device.live_bytes
        held = call.model.generate(**call.kwargs)
        assert 1 <= traced.results_bytes() / (device.live_bytes - before) < 1.1
    assert held.sequences.shape == (8, 100)
