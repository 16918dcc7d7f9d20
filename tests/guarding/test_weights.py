"""Weights that do not fit on the device: loaded with layers on the host, or in fewer bits where that is permitted."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
from oomguard.testing import limit_memory  # noqa: E402

LAYERS, VOCAB = 8, 256
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module", params=["sharded", "tied"])
def checkpoint(request, tmp_path_factory):
    """The folder of a model of random weights in float32, and its bytes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        pad_token_id=0,
        eos_token_id=None,
        tie_word_embeddings=request.param == "tied",
        **SIZES,
    )
    model, folder = transformers.LlamaForCausalLM(config).eval(), tmp_path_factory.mktemp("model")
    model.save_pretrained(folder, max_shard_size="200KB" if request.param == "sharded" else "1GB")
    return str(folder), sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCAB, pad_token_id=0, eos_token_id=None, **SIZES)
    model, folder = transformers.LlamaForCausalLM(config).eval(), tmp_path_factory.mktemp("plain")
    model.save_pretrained(folder)
    return str(folder), sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def loaded(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def tokens(model):
    ids = torch.randint(3, VOCAB, (1, 16), generator=torch.Generator().manual_seed(1))
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=3
    )


def changes(g):
    return {patch.setting: patch.new for attempt in g.attempts for patch in attempt.patches}


def test_layers_on_the_host_give_the_same_answers(checkpoint):
    (folder, size), share = checkpoint, 0.6
    whole = tokens(loaded(folder))
    with limit_memory(int(share * size)) as device, oomguard.guard() as g:
        model = loaded(folder)
        held = device.live_bytes
        answer = tokens(model)
        peak = device.peak_bytes

    assert torch.equal(answer, whole)
    assert held < share * size
    assert peak <= device.capacity_bytes
    assert [attempt.error for attempt in g.attempts][:2] == ["OutOfMemoryError", ""]
    assert set(changes(g)) == {"weights_on_device_bytes"}
    assert g.attempts[1].patches[0].effect.name == "REDUCES_CAPACITY"


def test_bytes_that_stay_on_the_device_are_within_the_solution(plain):
    folder, size = plain
    with limit_memory(int(0.7 * size)) as device, oomguard.guard() as g:
        model = loaded(folder)
        held = device.live_bytes

    share = changes(g)["weights_on_device_bytes"]
    layer = max(
        sum(tensor.nbytes for tensor in module.parameters())
        for module in loaded(folder).model.layers
    )
    assert share - 2 * layer < held <= share
    assert set(model.hf_device_map.values()) == {0, "cpu"}


def test_a_model_that_fits_is_loaded_as_it_is_and_is_no_attempt(plain):
    folder, size = plain
    with limit_memory(2 * size) as device, oomguard.guard() as g:
        model = loaded(folder)
        assert device.live_bytes == size

    assert g.attempts == ()
    assert not hasattr(model, "hf_device_map")


def test_a_device_that_the_program_names_needs_permission(plain):
    folder, size = plain
    with (
        limit_memory(int(0.7 * size)),
        oomguard.guard() as g,
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        loaded(folder, device_map="cpu")
    notes = "\n".join(raised.value.__notes__)
    assert "weights_do_not_fit" in notes
    assert ': device_map="sequential", max_memory={0: ' in notes
    assert "you set it; --allow reduces-capacity permits it" in notes
    assert not changes(g)

    with limit_memory(int(0.7 * size)), oomguard.guard(allow="reduces-capacity") as g:
        loaded(folder, device_map="cpu")
    assert set(changes(g)) == {"weights_on_device_bytes"}


def test_sixteen_bits_need_permission_and_are_solved(plain):
    folder, size = plain
    pinned = ["weights_on_device_bytes"]
    with (
        limit_memory(int(0.95 * size)),
        oomguard.guard(pin=pinned),
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        loaded(folder)
    (line,) = [
        line
        for line in "\n".join(raised.value.__notes__).splitlines()
        if "dtype=" in line and "not automatic" in line
    ]
    assert '(changes-outputs): dtype="bfloat16"' in line
    assert "--allow changes-outputs permits it" in line

    with (
        limit_memory(int(0.95 * size)) as device,
        oomguard.guard(pin=pinned, allow="changes-outputs") as g,
    ):
        model = loaded(folder)
        assert device.live_bytes < 0.6 * size
    assert model.dtype == torch.bfloat16
    assert changes(g) == {"dtype": "bfloat16"}


def test_no_way_is_tried_that_does_not_fit_by_the_headers(plain):
    folder, _ = plain
    with (
        limit_memory("40 KiB"),
        oomguard.guard(allow="changes-outputs") as g,
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        loaded(folder)

    notes = "\n".join(raised.value.__notes__)
    assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError"]
    assert "the largest layer alone needs" in notes
    assert "the weights then need" in notes


def test_a_pipeline_loads_its_model_under_the_guard(plain, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {
        word: number
        for number, word in enumerate(["[PAD]", "[UNK]", "the", "quick", "brown", "fox"])
    }
    own = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]"
    )
    folder, size = plain
    ask = {"max_new_tokens": 3, "do_sample": False, "return_tensors": True}
    whole = transformers.pipeline("text-generation", model=folder, tokenizer=tokenizer)(
        "the quick fox", **ask
    )
    with limit_memory(int(0.7 * size)), oomguard.guard() as g:
        pipe = transformers.pipeline("text-generation", model=folder, tokenizer=tokenizer)
        answer = pipe("the quick fox", **ask)

    assert answer == whole
    assert "weights_on_device_bytes" in changes(g)


def test_moved_model_keeps_layers_on_the_host_if_permitted(plain):
    folder, size = plain
    model = loaded(folder)
    whole = tokens(model)
    with limit_memory(int(0.7 * size)), oomguard.guard(), pytest.raises(torch.OutOfMemoryError):
        model.to("cpu")
    with limit_memory(int(0.7 * size)), oomguard.guard(allow="reduces-capacity") as g:
        moved = model.to("cpu")
        answer = tokens(moved)

    assert moved is model
    assert torch.equal(answer, whole)
    assert set(changes(g)) == {"weights_on_device_bytes"}


def test_what_is_no_memory_failure_comes_out_as_it_is(tmp_path):
    with (
        limit_memory("1 GiB"),
        oomguard.guard() as g,
        pytest.raises(OSError, match="no file named") as raised,
    ):
        transformers.LlamaForCausalLM.from_pretrained(str(tmp_path))

    assert not getattr(raised.value, "__notes__", [])
    assert g.diagnosis is None
