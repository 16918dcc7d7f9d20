"""A model whose weights changed is another one, whatever its name."""

from __future__ import annotations

import os

import pytest
import torch

from oomguard.mapping.models import UnnamedModelError, is_model, model_name


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


def test_a_folder_that_was_overwritten_has_another_name_where_no_weights_can_be_read(tmp_path):
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
