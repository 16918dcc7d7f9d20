"""A model whose weights changed is another one, whatever its name."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import oomguard
from oomguard.mapping.computation import UnnamedModelError, computation_of, is_model, model_name


class Engine:
    def __init__(self, name):
        self.name_or_path = str(name)

    def generate(self, texts):
        return texts


class Tiny(torch.nn.Module):
    def __init__(self, name="./tiny", device=None):
        super().__init__()
        self.name_or_path = name
        self.head = torch.nn.Linear(300, 40, device=device)
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def made(**options):
    torch.manual_seed(0)
    return Tiny(**options)


def test_equal_weights_have_one_name_in_every_process_and_type():
    assert model_name(made()) == model_name(made())
    assert model_name(made().half()) != model_name(made())


def test_weights_that_were_trained_in_place_have_another_name():
    model = made()
    before = model_name(model)
    model.cache.add_(1)
    model.head.seen_cached = 5
    model.head.compute_type_is_set = True
    assert model_name(model) == before, "a cache is no weight"
    with torch.no_grad():
        model.head.bias.mul_(3)
    assert model_name(model) != before


def test_a_pipeline_is_known_by_its_model():
    class Pipeline:
        def __init__(self, model):
            self.model = model

    assert is_model(Pipeline(made()))
    assert model_name(Pipeline(made())) == model_name(made())
    assert not is_model(Pipeline("org/name"))


def test_overwritten_folder_without_weights_gets_another_name(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    for model in (Engine(tmp_path), Tiny(str(tmp_path), device="meta")):
        os.utime(weights, ns=(1, 1))
        before = model_name(model)
        assert model_name(model) == before
        os.utime(weights, ns=(2, 2))
        assert model_name(model) != before
    assert model_name(Engine("org/name")) == "org/name"


def test_a_model_without_a_name_is_none():
    with pytest.raises(UnnamedModelError, match="Tiny"):
        model_name(made(name=""))


def llama():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.name_or_path = "org/tiny"
    return model


def test_another_way_to_generate_is_another_computation():
    model = llama()
    model.generation_config.max_new_tokens = 3
    before = model_name(model)
    model.generation_config.transformers_version = "0.0"
    assert model_name(model) == before
    model.generation_config.max_new_tokens = 6
    assert model_name(model) != before


def test_a_call_leaves_the_name_as_it_was():
    model = llama()
    before = model_name(model)
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False)
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert model_name(model) == before == model_name(llama())


def test_a_plain_attribute_of_a_module_counts(subtests):
    for name, change in [
        ("attribute", lambda model: setattr(model.model.layers[1].self_attn, "scaling", 2.0)),
        ("dict", lambda model: setattr(model.model.layers[1].mlp, "factors", {"default": 0.5})),
        ("adapter", lambda model: setattr(model.model.layers[1].mlp, "_active_adapter", ["other"])),
        ("train", lambda model: model.train()),
    ]:
        with subtests.test(name):
            model = llama()
            before = model_name(model)
            change(model)
            assert model_name(model) != before


def test_a_model_with_a_hook_has_to_be_said(subtests):
    def check(register):
        model = llama()

        def ablate(*_):
            return None

        def answer(texts):
            return model(texts)

        handle = getattr(model.model.layers[1].mlp, register)(functools.partial(ablate))
        with pytest.raises(
            oomguard.UsageError, match=r"with a forward hook, .*ablate on model\.layers\.1\.mlp"
        ) as caught:
            computation_of(answer, None)
        assert "identity={" in caught.value.hint
        assert computation_of(answer, {"ablated": 1}).digest
        handle.remove()
        assert computation_of(answer, None).digest

    for register in ["register_forward_hook", "register_forward_pre_hook"]:
        with subtests.test(register=register):
            check(register)


def test_hooks_that_come_with_a_library_are_no_change():
    model = llama()
    before = model_name(model)
    model.enable_input_require_grads()
    assert model_name(model) == before
