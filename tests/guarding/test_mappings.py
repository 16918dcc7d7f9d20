"""Mappings of columns that are no dict: what a tokenizer gives, what a library or a user made."""

from __future__ import annotations

from collections import ChainMap, UserDict
from collections.abc import Mapping
from types import MappingProxyType

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.testing import limit_memory  # noqa: E402


def use(rows: int) -> None:
    torch.zeros(rows, 2**18).exp()  # 2 MiB a row at the peak


class ReadOnly(Mapping):
    """A mapping of the user's own that is no dict."""

    def __init__(self, columns):
        self._columns = dict(columns)

    def __getitem__(self, name):
        return self._columns[name]

    def __iter__(self):
        return iter(self._columns)

    def __len__(self):
        return len(self._columns)


class Kept(UserDict):
    """One that keeps more than its columns, as a BatchEncoding keeps what the tokenizer found."""

    def __init__(self, columns, found):
        super().__init__(columns)
        self.found = found


def test_custom_mapping_is_split_and_keeps_its_type(subtests):
    def check(kind):
        columns = {"id": torch.arange(64), "text": [f"text {n}" for n in range(64)]}
        batch, sizes = kind(columns), []

        def embedded(batch):
            assert type(batch) is kind
            sizes.append(len(batch["id"]))
            use(len(batch["id"]))
            return kind({"double": batch["id"] * 2, "text": batch["text"]})

        with limit_memory("64 MiB"):
            whole = oomguard.guard(batch="batch")(embedded)(batch)
        assert min(sizes) < 64
        assert type(whole) is kind
        assert (whole["double"].tolist(), list(whole["text"])) == (
            list(range(0, 128, 2)),
            columns["text"],
        )
        assert all(batch[name] is column for name, column in columns.items())

    for kind in [
        UserDict,
        MappingProxyType,
        ReadOnly,
        ChainMap,
        transformers.BatchEncoding,
        transformers.BatchFeature,
    ]:
        with subtests.test(kind=kind):
            check(kind)


def test_mapping_values_per_row_go_with_the_rows():
    batch = Kept({"id": torch.arange(64)}, [f"found {n}" for n in range(64)])

    def same(batch):
        use(len(batch["id"]))
        assert batch.found == [f"found {n}" for n in batch["id"].tolist()]
        return batch

    with limit_memory("64 MiB"):
        whole = oomguard.guard(batch="batch")(same)(batch)
    assert (whole["id"].tolist(), whole.found) == (list(range(64)), batch.found)


def test_mapping_that_cannot_be_rebuilt_is_not_split():
    class Odd(ReadOnly):
        def __init__(self, columns, more):
            super().__init__(columns)

    def counted(batch):
        use(len(batch["id"]))

    with limit_memory("64 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        oomguard.guard(batch="batch")(counted)(Odd({"id": torch.arange(64)}, 1))
    assert (
        "the argument batch has the type Odd, which cannot be made with fewer rows: pass a dict"
        in caught.value.__notes__[0]
    )


def test_what_a_fast_tokenizer_found_of_each_text_goes_with_it():
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({f"w{n}": n for n in range(64)} | {"?": 64}, unk_token="?")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="?", pad_token="?"
    )
    sizes = []

    def tokens(batch):
        batch.to("cpu")
        sizes.append(len(batch.input_ids))
        use(len(batch.input_ids))
        return [batch.tokens(row) for row in range(len(batch.input_ids))]

    with limit_memory("64 MiB"):
        found = oomguard.guard(batch="batch")(tokens)(
            tokenizer([f"w{n}" for n in range(64)], return_tensors="pt")
        )
    assert found == [[f"w{n}"] for n in range(64)]
    assert min(sizes) < 64
