"""Groups, blocks and tokens by vLLM's own planning; tests/vllm holds the same against the real engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.estimate.model.layer_caches import LayerCache
from oomguard.estimate.start.kv_cache import KvLayout, KvSettings, LayerGroup, lay_out

SETTINGS = KvSettings(block_tokens=16, max_model_len=4096, in_flight_tokens=2048)


def full(index: int, width: int = 1024) -> LayerCache:
    return LayerCache(index, "full", token_bytes=width)


def sliding(index: int, width: int = 1024, window: int = 512) -> LayerCache:
    return LayerCache(index, "sliding", token_bytes=width, window_tokens=window)


def state(index: int, size: int = 100_000) -> LayerCache:
    return LayerCache(index, "state", state_bytes=size)


def test_layers_of_one_kind_share_one_table():
    layout = lay_out([full(i) for i in range(32)], SETTINGS)

    assert (len(layout.groups), layout.block_bytes()) == (1, 32 * 16 * 1024)
    assert layout.blocks(100 * layout.block_bytes() + 1) == 100
    assert layout.tokens(512) == 512 * 16
    assert layout.max_concurrency(512) == 2.0


def test_full_layers_of_two_widths_share_one_table_too():
    layout = lay_out([full(0, 1024), full(1, 512)], SETTINGS)

    assert (len(layout.groups), layout.block_bytes()) == (1, 16 * 1536)


def test_sliding_layers_hold_their_window_and_what_is_in_flight():
    layout = lay_out([sliding(0)], SETTINGS)

    assert layout.request_blocks() == -(-(512 - 1 + 2048) // 16) + 1


def test_a_window_longer_than_the_request_holds_the_request():
    assert lay_out([sliding(0, window=10**6)], SETTINGS).request_blocks() == 4096 // 16 + 1


def test_two_kinds_draw_equal_blocks_from_one_pool():
    layout = lay_out(
        [
            layer
            for i in range(0, 12, 6)
            for layer in (*(sliding(i + j) for j in range(5)), full(i + 5))
        ],
        SETTINGS,
    )

    assert sorted(len(group.layers) for group in layout.groups) == [2] * 6
    assert layout.block_bytes() == 2 * 16 * 1024


def test_kinds_that_are_nearly_as_many_are_padded_to_the_more():
    layout = lay_out(
        [*(sliding(i) for i in range(12)), *(full(12 + i) for i in range(13))], SETTINGS
    )

    assert sorted(len(group.layers) for group in layout.groups) == [12, 13]
    assert layout.block_bytes() == 13 * 16 * 1024


def test_a_narrower_page_holds_more_tokens_until_all_are_as_wide():
    layout = lay_out([full(0, 2048), sliding(1, 1024)], SETTINGS)

    assert {group.kind: group.block_tokens for group in layout.groups} == {
        "full": 16,
        "sliding": 32,
    }
    assert {page for group in layout.groups for page in group.pages_bytes} == {16 * 2048}


def test_blocks_of_a_hybrid_model_grow_until_they_hold_a_state():
    layout = lay_out([state(0), state(1), full(2)], SETTINGS)

    assert layout.settings.block_tokens == 16 * -(-100_000 // (16 * 1024))
    assert {page for group in layout.groups for page in group.pages_bytes} == {
        layout.settings.block_tokens * 1024
    }


def test_ranks_sharing_tokens_hold_a_part_of_its_blocks():
    alone, shared = (
        lay_out([full(0)], KvSettings(16, 4000, 2048, context_ranks=ranks)) for ranks in (1, 4)
    )

    assert (alone.request_blocks(), shared.request_blocks()) == (250, 63)  # 1000 tokens on each
    assert shared.tokens(630) == 40000
    assert shared.tokens_of_groups(630) == 4 * alone.tokens_of_groups(630)
    assert shared.longest(shared.block_bytes() * 64, 8000) == 4032


def test_a_request_keeps_more_states_where_prefixes_are_cached(subtests):
    for cached, checkpoints, states in [(False, 0, 1), (True, 0, 2), (True, 1, 3), (False, 1, 1)]:
        with subtests.test(cached=cached, checkpoints=checkpoints, states=states):
            layers = [LayerCache(0, "state", state_bytes=1000, checkpoints=checkpoints)]
            assert (
                lay_out(layers, KvSettings(16, 4096, 2048, cached_states=cached)).request_blocks()
                == states
            )


def test_draft_tokens_keep_a_state_each():
    assert lay_out([state(0)], KvSettings(16, 4096, 2048, draft_tokens=3)).request_blocks() == 4


def test_a_stage_pays_for_its_own_layers_only():
    layout = lay_out([full(i) for i in range(4)], SETTINGS)

    assert layout.block_bytes(range(3)) == 3 * 16 * 1024
    assert layout.blocks(6 * 16 * 1024, range(3)) == 2


def test_a_model_that_keeps_nothing_has_no_blocks():
    layout = lay_out([], SETTINGS)
    assert (
        layout.block_bytes(),
        layout.blocks(10**9),
        layout.max_concurrency(0),
        layout.tokens(0),
    ) == (0, 0, 0.0, 0)


LAYERS = st.lists(
    st.one_of(
        st.builds(full, st.integers(0, 40), st.sampled_from([512, 1024, 1152, 4096])),
        st.builds(
            sliding, st.integers(0, 40), st.sampled_from([512, 1024]), st.sampled_from([128, 4096])
        ),
        st.builds(state, st.integers(0, 40), st.sampled_from([5_000, 70_000])),
    ),
    min_size=1,
    max_size=40,
)


@given(LAYERS, st.integers(0, 10**9), st.sampled_from([16, 128]), st.integers(1, 10**6))
def test_no_layout_gives_out_more_bytes_than_the_pool_has(layers, pool, block, length):
    layout = lay_out(layers, KvSettings(block, length, 2048))
    blocks = layout.blocks(pool)

    assert blocks * layout.block_bytes() <= pool
    assert layout.tokens(blocks) <= layout.tokens(blocks + 1)
    assert sum(len(group.layers) for group in layout.groups) == len(
        layers
    )  # no layer is lost, none counted twice


@given(LAYERS, st.integers(0, 10**9), st.integers(1, 10**6))
def test_the_longest_request_fits_and_one_token_more_does_not(layers, pool, limit):
    layout = lay_out(layers, KvSettings(16, limit, 2048))
    longest = layout.longest(pool, limit)

    assert longest == 0 or layout.fits(pool, longest)
    assert longest == limit or not layout.fits(pool, longest + 1)


def test_encoder_output_is_kept_next_to_the_requests_tokens():
    """The real vLLM 0.32 starts a Whisper of two layers with 261 blocks at a step of 32768: 256, the decoder's 4 and its own."""
    caches = [LayerCache(i, kind, token_bytes=512) for i in range(2) for kind in ("full", "cross")]
    layout = lay_out(caches, KvSettings(128, 448, 32768, encoded_tokens=32768))
    assert layout.request_blocks() == 256 + 4
    assert layout.block_bytes() == 2 * 128 * 512


def test_earlier_versions_log_tokens_per_block_and_group():
    groups = (
        LayerGroup("full", (0,), (4096,), 16),
        LayerGroup("sliding", (1, 2), (4096, 4096), 16, 512),
    )
    layout = KvLayout(groups, SETTINGS)

    assert layout.tokens_of_groups(101) == 101 // 2 * 16
    assert KvLayout((), SETTINGS).tokens_of_groups(101) == 0
