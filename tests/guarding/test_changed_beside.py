"""What a call changes beside its result, in arguments and in variables of its module, keeps it whole."""

from __future__ import annotations

import collections
import contextvars
import functools
import threading
import weakref

import numpy as np
import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import padded, refused  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ARRAY, CONTEXT, LOCAL = np.zeros(32), contextvars.ContextVar("rows", default=0), threading.local()
WEAK = weakref.WeakKeyDictionary()


class Collector:
    def __init__(self):
        self.inner = {"seen": [[]]}

    def add(self, states):
        self.inner["seen"][0].append(len(states))


class Slots:
    __slots__ = ("rows",)


class Own(transformers.BertPreTrainedModel):
    """Shows a function the mean over tokens of each row, and what else it is given."""

    def __init__(self, function):
        super().__init__(transformers.BertConfig(vocab_size=64, **SIZES))
        self.bert, self.function = transformers.BertModel(self.config, add_pooling_layer=False), function
        self.post_init()

    def forward(self, input_ids, attention_mask=None, more=None):
        mean = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state.mean(1)
        self.function(self, mean, more)
        return mean


def notes_of(function, make=lambda: None):
    """Return the notes of a call that is raised."""
    torch.manual_seed(0)
    model = Own(function).eval()

    def call():
        with torch.no_grad():
            return model(**padded(16), more=make())

    error, _ = refused(call, pin=["attn_implementation"])
    return "".join(error.__notes__)


def named(given):
    given.rows = 1
    return given


ARGUMENTS = {
    "list": (lambda _, mean, more: more.append(len(mean)), list),
    "dict": (lambda _, mean, more: more.update(mean=mean), dict),
    "set": (lambda _, mean, more: more.add(len(mean)), set),
    "deque": (lambda _, mean, more: more.append(len(mean)), collections.deque),
    "object": (lambda _, mean, more: more.add(mean), Collector),
    "slots": (lambda _, mean, more: setattr(more, "rows", len(mean)), lambda: named(Slots())),
    "its method": (lambda _, mean, more: more(mean), lambda: Collector().add),
    "a list's method": (lambda _, mean, more: more(len(mean)), lambda: [].append),
    "partial": (lambda _, mean, more: more(mean), lambda: functools.partial(Collector.add, Collector())),
    "list of tensors": (lambda _, mean, more: more.append(mean), lambda: [torch.zeros(3)]),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_that_the_call_changes_keeps_it_whole(kind):
    assert "the model writes to its argument more" in notes_of(*ARGUMENTS[kind])


def count_context(_, mean, __):
    CONTEXT.set(CONTEXT.get() + len(mean))


def count_local(_, mean, __):
    LOCAL.rows = getattr(LOCAL, "rows", 0) + len(mean)


def keep_weakly(model, mean, _):
    WEAK.setdefault(model, []).append(len(mean))


def add_to_array(_, mean, __):
    ARRAY[:] += mean.sum(0).numpy()


def add_out(_, mean, __):
    np.add(ARRAY, mean.sum(0).numpy(), out=ARRAY)


def leave_array(model, mean, _):
    model.rows_seen = mean.numpy()


OUTSIDE = {
    "CONTEXT": count_context,
    "LOCAL": count_local,
    "WEAK": keep_weakly,
    "ARRAY": add_to_array,
    "something else in ARRAY": add_out,
    "something else in rows_seen": leave_array,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_a_call_changes_outside_or_leaves_as_an_array_keeps_it_whole(name):
    assert name in notes_of(OUTSIDE[name]).split("not done by itself")[1]


def test_following_a_call_gives_an_argument_back_as_it_was():
    given = []
    notes_of(lambda _, __, more: more.inner["seen"][0].append(1), lambda: given.append(Collector()) or given[-1])
    assert given[-1].inner["seen"] in ([[]], [[1]])  # by the call that failed, once at most


def test_an_argument_that_is_only_read_is_no_reason():
    model = Own(lambda _, mean, more: mean.mul_(more["factor"][0])).eval()

    def call():
        with torch.no_grad():
            return model(**padded(16), more={"factor": [2.0]})

    with limit_memory("4 GiB") as device:
        whole = call()
    with limit_memory(int(device.peak_bytes * 0.6)), oomguard.guard(pin=["attn_implementation"]) as g:
        parts = call()
    assert torch.allclose(whole, parts, atol=1e-6)
    assert len(g.attempts) > 1
