"""A set of starts is checked against the fit before it is called unseen; ``python benchmarks/unseen_starts.py`` does it."""

from unseen_starts import seen

KNOWN = [
    {
        "id": "known",
        "printed": {
            "weights_gib": 2.89,
            "available_kv_gib": 2.36,
            "kv_tokens": 88304,
            "graph_gib": 0.17,
        },
    }
]


def start(**printed):
    return {"id": "new", "printed": printed}


def test_a_start_is_seen_that_printed_three_of_the_same_figures():
    assert seen([start(weights_gib=2.89, available_kv_gib=2.36, kv_tokens=88304)], KNOWN) == {
        "new": "known"
    }


def test_a_start_of_the_same_model_with_another_pool_is_unseen():
    assert not seen(
        [start(weights_gib=2.89, available_kv_gib=3.36, kv_tokens=99999, graph_gib=0.17)], KNOWN
    )


def test_round_figures_that_many_starts_print_tell_nothing():
    many = {"available_kv_gib": 10, "graph_gib": 1, "max_concurrency": 2, "kv_tokens": 4096}
    assert not seen([start(**many)], [{"id": "known", "printed": many}])


def test_a_row_of_the_fit_is_seen_as_itself():
    from support.published import published

    rows = published(campaign=False)
    assert seen([{**rows[0], "id": "copy"}], rows) == {"copy": rows[0]["id"]}
