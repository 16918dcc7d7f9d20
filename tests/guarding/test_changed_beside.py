"""What a call changes beside its result, in arguments and in variables of its module, keeps it whole."""

from __future__ import annotations

import array
import contextvars
import ctypes
import io
import logging
import random
import threading

import numpy as np
import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import padded, refused  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
ARRAY, CONTEXT, LOCAL = np.zeros(32), contextvars.ContextVar("rows", default=0), threading.local()
BYTES, NUMBERS, C_COUNT, TEXT, DRAWS = bytearray(), array.array("i"), ctypes.c_int(0), io.StringIO(), random.Random(1)
LOG = logging.getLogger(__name__)
IN_THREAD, DATA, calls_kept = [], torch.zeros(2), 0


class Collector:
    def __init__(self):
        self.inner = {"seen": [[]]}

    def add(self, states):
        self.inner["seen"][0].append(len(states))


class Own(transformers.BertPreTrainedModel):
    """Shows a function the mean over tokens of each row, and what else it is given."""

    rows = 0

    def __init__(self, function):
        super().__init__(transformers.BertConfig(vocab_size=64, **SIZES))
        self.numbers = np.zeros(1)
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


ARGUMENTS = {
    "object": (lambda _, mean, more: more.add(mean), Collector),
}


def test_an_argument_that_the_call_changes_keeps_it_whole(subtests):
    for kind, value in ARGUMENTS.items():
        with subtests.test(kind=kind):
            assert "the model writes to its argument more" in notes_of(*value)


def add_to_array(_, mean, __):
    ARRAY[:] += mean.sum(0).numpy()


OUTSIDE = {
    "ARRAY": add_to_array,
    "calls_kept": lambda _, mean, __: globals().__setitem__("calls_kept", calls_kept + 1),
}


def test_what_a_call_changes_outside_or_leaves_as_an_array_keeps_it_whole(subtests):
    for name, value in OUTSIDE.items():
        with subtests.test(name=name):
            assert name in notes_of(value).split("not automatic")[1]


def assert_split(model, **more):
    """The call runs in parts, with the result of the whole one."""

    def call():
        with torch.no_grad():
            return model(**padded(16), **more)

    with limit_memory("4 GiB") as device:
        whole = call()
    with limit_memory(int(device.peak_bytes * 0.6)), oomguard.guard(pin=["attn_implementation"]) as g:
        parts = call()
    assert torch.allclose(whole, parts, atol=1e-6)
    assert len(g.attempts) > 1


def test_a_line_for_a_log_is_no_reason():
    assert_split(Own(lambda _, mean, __: LOG.debug("%s", mean.shape)).eval())
