"""Arguments that nobody has listed are taken for rows only where the model's code, and its rows, say that they are."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import assert_same, ordinary, padded, whole_and_in_parts  # noqa: E402

from oomguard.engines.transformers.forward import ForwardCall  # noqa: E402
from oomguard.engines.transformers.generate import GenerateCall  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ROWS = 16


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decision():
    """Every argument but the mask has a name of its own."""
    config = transformers.DecisionTransformerConfig(
        state_dim=5, act_dim=3, hidden_size=32, max_ep_len=64, n_layer=1, n_head=4, n_inner=64, n_positions=128
    )
    model = transformers.DecisionTransformerModel(config).eval()
    given = {"states": random(ROWS, 24, 5), "actions": random(ROWS, 24, 3), "rewards": random(ROWS, 24, 1)}
    given |= {"returns_to_go": random(ROWS, 24, 1), "timesteps": torch.arange(24).repeat(ROWS, 1)}
    return lambda: model(**given, attention_mask=torch.ones(ROWS, 24))


def vjepa():
    """Masks are lists with one tensor a mask."""
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "mlp_ratio": 2,
        "num_pooler_layers": 1,
    }
    sizes |= {"pred_hidden_size": 16, "pred_num_attention_heads": 4, "pred_num_hidden_layers": 1, "frames_per_clip": 4}
    config = transformers.VJEPA2Config(patch_size=8, crop_size=32, tubelet_size=2, pred_num_mask_tokens=2, **sizes)
    model = transformers.VJEPA2Model(config).eval()
    given = {"context_mask": [torch.arange(20).repeat(ROWS, 1)], "target_mask": [torch.arange(20, 32).repeat(ROWS, 1)]}
    return lambda: model(pixel_values_videos=random(ROWS, 4, 3, 32, 32), **given)


class Own(transformers.BertModel):
    """Bert, whose states a function changes by one more argument."""

    def __init__(self, change):
        super().__init__(transformers.BertConfig(**SIZES, vocab_size=64), add_pooling_layer=False)
        self.change = change

    def forward(self, input_ids, attention_mask=None, offsets=None):
        states = super().forward(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.change(states.mean(1), offsets)


def own(change, offsets=None):
    torch.manual_seed(0)
    model, given = Own(change).eval(), random(ROWS, 32) if offsets is None else offsets
    return lambda: model(**padded(ROWS), offsets=given)


@pytest.mark.parametrize("made", [decision, vjepa, lambda: own(torch.add)], ids=["decision", "vjepa", "own"])
def test_they_are_cut_where_all_have_as_many_entries_and_rows_are_apart(made):
    torch.manual_seed(0)
    call = made()

    def without_gradients():
        with torch.no_grad():
            return call()

    whole, parts, g = whole_and_in_parts(without_gradients, 0.7, pin=["attn_implementation"])

    assert_same(whole, ordinary(parts))
    assert g.attempts[-1].patches[0].setting == "batch_size"


HALVES = {
    "pairs halves": lambda x, y: torch.cat([sum((x + y).chunk(2))] * 2),
    "a table that tokens look up": lambda x, y: x + y[x.argmax(1) % len(y)],
    "tokens that are looked for in all": lambda x, y: x + torch.isin(x.round(), y[:, 0].round()),
    "limits of classes": lambda x, y: x + torch.bucketize(x, y[:, 0].contiguous()),
    "an average": lambda x, y: x + y.mean(0),
    "every row against every": lambda x, y: x @ y.T,
    "numbers of rows by numpy": lambda x, y: x + torch.from_numpy(y.numpy().cumsum(0)),
    "half a batch, twice": lambda x, y: torch.cat([x[: len(x) // 2]] * 2) + y,
}


@pytest.mark.parametrize("change", HALVES.values(), ids=HALVES)
def test_a_call_that_does_more_with_them_is_raised_without_a_line_to_paste(change):
    call = own(change)

    def without_gradients():
        with torch.no_grad():
            return call()

    with pytest.raises(torch.OutOfMemoryError) as raised:
        whole_and_in_parts(without_gradients, pin=["attn_implementation"])

    notes = "".join(raised.value.__notes__)
    assert "not done by itself" in notes
    assert "(changes-outputs)" in notes
    assert "above def" not in notes
    assert not hasattr(raised.value, "partial")


def git():
    sees = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.GitConfig(
        vision_config={**sees, "image_size": 32, "patch_size": 8}, **SIZES, vocab_size=64, num_image_with_embedding=4
    )
    torch.manual_seed(0)
    return transformers.GitForCausalLM(config).eval()


def test_frames_beside_a_prompt_without_a_token_for_them_go_with_its_row():
    model, ids = git(), torch.randint(3, 64, (ROWS, 5), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": random(ROWS, 4, 3, 32, 32)}

    whole, parts, g = whole_and_in_parts(lambda: model.generate(**given, max_new_tokens=6, do_sample=False), 0.7)

    assert_same(whole, ordinary(parts))
    assert g.attempts[-1].patches[0].setting == "batch_size"


def towers(name):
    """A model that sees and reads, and as many images as texts."""
    sees = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
    }
    text = {**SIZES, "vocab_size": 64, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    more = {"extract_layers": [0, 1], "reduce_dim": 16} if name == "CLIPSegForImageSegmentation" else {}
    config = getattr(transformers, name.split("For")[0].removesuffix("Model") + "Config")
    torch.manual_seed(0)
    made = config(text_config=text, vision_config={**sees, "patch_size": 8}, projection_dim=32, **more)
    model, ids = getattr(transformers, name)(made).eval(), torch.randint(3, 64, (ROWS, 12))

    def call():
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=random(ROWS, 3, 32, 32))

    return call


def test_an_image_that_is_held_against_every_text_is_not_cut():
    with pytest.raises(torch.OutOfMemoryError) as raised:
        whole_and_in_parts(towers("CLIPModel"), 0.7, pin=["attn_implementation"])
    assert "a row depends on those beside it: the model takes mm over all rows" in "".join(raised.value.__notes__)


def test_a_text_that_is_looked_for_in_its_own_image_goes_with_it():
    whole, parts, g = whole_and_in_parts(towers("CLIPSegForImageSegmentation"), 0.7, pin=["attn_implementation"])
    assert_same(whole, ordinary(parts))
    assert g.attempts[-1].patches[0].setting == "batch_size"


def test_a_list_with_as_many_tensors_as_rows_and_one_of_other_sizes_are_not_taken():
    model = own(torch.add).__closure__[1].cell_contents
    for value in ([torch.ones(ROWS, 2)] * ROWS, torch.ones(ROWS + 1, 2), torch.ones(())):
        assert not ForwardCall.of(model, (), {**padded(ROWS), "offsets": value}).taken


@pytest.mark.parametrize("name", ["eos_token_id", "begin_suppress_tokens"])
def test_tokens_of_an_option_that_are_as_many_as_rows_are_not_taken(name):
    model, ids = git(), torch.randint(3, 64, (2, 5))
    call = GenerateCall.of(model, (), {"input_ids": ids, name: torch.tensor([3, 4]), "max_new_tokens": 4})
    assert not call.taken
    assert f"the argument {name} is not known to hold one row per input" in call.not_splittable


def test_beside_images_that_tokens_stand_for_nothing_else_is_taken():
    from beside_text import idefics3

    model, call = idefics3()
    given = call.__closure__[0].cell_contents
    assert not GenerateCall.of(model, (), {**given, "adapter": torch.zeros(len(given["input_ids"]), 3)}).taken
