"""What a call changes beside its result, in arguments and in variables of its module, keeps it whole."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import functools
import io
import logging
import random
import threading
import typing
import weakref

import numpy as np
import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import model_calls  # noqa: E402
from model_calls import padded, refused  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ARRAY, CONTEXT, LOCAL = np.zeros(32), contextvars.ContextVar("rows", default=0), threading.local()
WEAK = weakref.WeakKeyDictionary()
BYTES, NUMBERS, C_COUNT, TEXT, DRAWS = bytearray(), array.array("i"), ctypes.c_int(0), io.StringIO(), random.Random(1)
LOG = logging.getLogger(__name__)
IN_THREAD, DATA, calls_kept = [], torch.zeros(2), 0


class Collector:
    def __init__(self):
        self.inner = {"seen": [[]]}

    def add(self, states):
        self.inner["seen"][0].append(len(states))


class Slots:
    __slots__ = ("rows",)


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


def by_default(mean, seen=[]):  # noqa: B006 - what users write
    seen.append(len(mean))


def by_keyword(mean, *, seen={"n": 0}):  # noqa: B006 - what users write
    seen["n"] += 1


def counted(mean):
    counted.calls = getattr(counted, "calls", 0) + 1


def in_thread(_, mean, __):
    thread = threading.Thread(target=lambda: IN_THREAD.append(1))
    thread.start()
    thread.join()


def at_its_address(_, mean, __):
    (ctypes.c_float * mean.numel()).from_address(mean.data_ptr())[0]


def add_to_its_array(model, mean, _):
    model.numbers += 1


class Total(type):
    rows = 0

    def add(cls):
        Total.rows += 1


class Counting(metaclass=Total):
    pass


OUTSIDE = {
    "CONTEXT": count_context,
    "LOCAL": count_local,
    "WEAK": keep_weakly,
    "ARRAY": add_to_array,
    "takes the values of rows out of torch": add_out,
    "cannot be followed: guarding/test_changed_beside.py": leave_array,
    "by_default's own": lambda _, mean, __: by_default(mean),
    "by_keyword's own": lambda _, mean, __: by_keyword(mean),
    "counted's own": lambda _, mean, __: counted(mean),
    "BYTES": lambda _, mean, __: BYTES.extend(b"x"),
    "NUMBERS": lambda _, mean, __: NUMBERS.append(1),
    "C_COUNT": lambda _, mean, __: setattr(C_COUNT, "value", C_COUNT.value + 1),
    "TEXT": lambda _, mean, __: TEXT.write("x"),
    "DRAWS": lambda _, mean, __: DRAWS.random(),
    "calls_kept": lambda _, mean, __: globals().__setitem__("calls_kept", calls_kept + 1),
    "model_calls": lambda _, mean, __: setattr(model_calls, "kept_here", len(mean)),
    "Total.rows": lambda _, mean, __: Counting.add(),
    "IN_THREAD": in_thread,
    "Own.rows": lambda _, mean, __: setattr(Own, "rows", Own.rows + 1),
    "counts those alike": lambda _, mean, __: torch.bincount(mean[:, 0].long().abs()),
    "mean.clone().apply_(abs)": lambda _, mean, __: mean.clone().apply_(abs),
    "from_address(mean.data_ptr())": at_its_address,
    "numbers of the model": add_to_its_array,
    "DATA": lambda _, mean, __: setattr(DATA, "data", DATA.data + 1),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_a_call_changes_outside_or_leaves_as_an_array_keeps_it_whole(name):
    assert name in notes_of(OUTSIDE[name]).split("not done by itself")[1]


def test_following_a_call_gives_an_argument_back_as_it_was():
    given = []
    notes_of(lambda _, __, more: more.inner["seen"][0].append(1), lambda: given.append(Collector()) or given[-1])
    assert given[-1].inner["seen"] in ([[]], [[1]])  # by the call that failed, once at most


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


def test_an_argument_that_is_only_read_is_no_reason():
    model = Own(lambda _, mean, more: mean.mul_(more["factor"][0])).eval()
    assert_split(model, more={"factor": [2.0]})


class OfClass(Own):
    """Its function is reached by the class, as a static method, a partial or a property."""

    seen: typing.ClassVar[list] = []

    def __init__(self):
        super().__init__(lambda model, mean, _: model.reached(mean))


def keep(seen, mean):
    seen.append(1)
    return mean


@pytest.mark.parametrize(
    "reached",
    [
        staticmethod(lambda mean: BYTES.extend(b"x")),
        staticmethod(functools.partial(keep, [])),
        staticmethod(Collector().add),
        classmethod(lambda cls, mean: BYTES.extend(b"x")),
        property(lambda self: BYTES.extend(b"x") or len),
    ],
    ids=["static", "partial", "method of an object", "of the class", "property"],
)
def test_what_a_class_reaches_otherwise_than_by_a_method_is_looked_at(reached):
    torch.manual_seed(0)
    model = type("Reached", (OfClass,), {"reached": reached})().eval()

    def call():
        with torch.no_grad():
            return model(**padded(16))

    error, _ = refused(call, pin=["attn_implementation"])
    assert "kept outside of it" in "".join(error.__notes__)


def test_code_that_only_reads_what_is_kept_outside_is_split():
    model = Own(
        lambda _, mean, __: mean.mul_(1 + len(BYTES) * 0 + Counting.rows * 0 + counted.__code__.co_argcount)
    ).eval()

    assert_split(model)
