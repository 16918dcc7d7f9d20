"""The page of a rule: every section, real rendered text, and Markdown that stays whole whatever a rule file holds."""

from __future__ import annotations

from rich.markdown import Markdown

from oomguard.core.facts import REGISTRY
from oomguard.diagnosis import assess, incident_from
from oomguard.remedy.policy import Policy
from oomguard.report.explanation import PAGE_MARK, Example, index_page, rule_page, signature_page
from oomguard.rules.rule_files import Rule, RuleSet, load_rules

RULES = load_rules()
SECTIONS = (
    "What it means",
    "When it applies",
    "Confidence",
    "How to confirm it",
    "What to change, and what it costs",
)


def examples(rule: Rule) -> list[Example]:
    alone = RuleSet((), (rule,))
    return [
        Example(
            t["kind"], t["facts"], assess(incident_from(t["kind"], t["facts"]), alone, Policy())
        )
        for t in rule.tests
    ]


def page(rule: Rule, **changes: object) -> str:
    changed = rule._replace(**changes)
    return rule_page(
        changed, examples(changed), file="rules/x.toml", solvers={"printed_estimate": "in words"}
    )


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_shipped_rule_has_every_section_in_order():
    for rule in RULES.rules:
        text = page(rule)
        places = [text.index(f"\n## {title}\n") for title in (*SECTIONS, "References")]

        assert places == sorted(places), rule.code
        assert text.startswith(f"# {rule.code}: {rule.title}\n"), rule.code
        assert PAGE_MARK in text, rule.code
        assert text.count("```") % 2 == 0, rule.code
        assert "{" not in section(text, "What it means").replace("`", ""), rule.code


def test_every_fix_is_there_with_its_effect_and_its_cost():
    for rule in RULES.rules:
        fixes = section(page(rule), "What to change, and what it costs")

        for fix in rule.fixes:
            assert f"`{fix.setting}` ({fix.effect}" in fixes, rule.code
            assert " ".join(fix.tradeoff.split()) in fixes, rule.code


def test_meaning_and_example_come_from_the_rules_own_test():
    text = page(RULES.rule("OG201"))

    said = "One request of 32768 tokens needs 20.48 MiB of KV cache, but 0.95 MiB is available, enough for 1792 tokens."
    assert said in section(text, "What it means")
    first = section(text, "Example 1")
    assert "- `kv_cache_needed_bytes = 21474836 (20.48 MiB)`" in first
    assert "1. max_model_len: 32768 -> 1792  [reduces-capacity]" in first
    assert "instead: --kv-cache-memory-bytes 18285715 (a byte count you set)" in first


def test_a_test_that_does_not_match_is_listed_as_such():
    assert section(page(RULES.rule("OG201")), "When it does not apply").strip() == (
        "- `kv_cache_too_small_for_max_len` with `max_model_len_tokens = 32768`, `num_gpu_blocks_override = 8`\n"
        "- `kv_cache_none_left` with `max_model_len_tokens = 32768`"
    )


def test_the_steps_of_the_confidence_are_in_words():
    assert section(page(RULES.rule("OG201")), "Confidence").strip().splitlines() == [
        "- 0.97 at first",
        "- 0.25 less if `device_share_ratio <= 0.6 and max_model_len_tokens <= 16384`",
        "- 0.25 more if `kv_cache_is_fixed and device_share_ratio <= 0.6 and max_model_len_tokens <= 16384`",
        "- 0.30 less if `fitting_step_tokens > 0`",
        "- 0.30 less if `fitting_block_tokens > 0`",
        "- 0.30 less if `kv_cache_is_fixed and estimated_max_model_len_tokens == 0`",
        "- 0.30 less if `fits_without_cached_prefixes`",
        "- 0.02 more if `estimated_max_model_len_tokens < max_model_len_tokens`",
    ]


def test_the_facts_of_the_conditions_are_explained():
    meaning = REGISTRY["max_model_len_tokens"].meaning

    assert f"| `max_model_len_tokens` | {meaning} |" in page(RULES.rule("OG201"))


def test_a_solver_is_told_in_words_and_one_without_words_by_name():
    fixes = section(page(RULES.rule("OG201")), "What to change, and what it costs")

    assert "value: in words" in fixes
    assert "value: utilization_for_max_len" in fixes


def test_a_rule_without_tests_and_fixes_still_has_a_page():
    text = page(RULES.rule("OG201"), tests=(), fixes=())

    assert "> One request of `max_model_len_tokens` tokens needs `kv_cache_needed_bytes`" in text
    assert "oomguard cannot change anything for this cause." in text
    assert "## Example" not in text


def test_rule_file_text_cannot_break_terminal_or_page():
    for field in ["title", "why", "confirm", "since", "status"]:
        text = page(RULES.rule("OG201"), **{field: "\x1b[31mred\x1b[0m\n## Example\n```"})

        assert "\x1b" not in text, field
        assert text.count("\n## Example\n") == 0, field
        assert [line for line in text.splitlines() if line.startswith("```")].count(
            "```text"
        ) == 3, field


def test_a_reference_has_its_address():
    text = page(
        RULES.rule("OG201"), references=({"note": "the manual", "url": "https://example.org/a"},)
    )

    assert section(text, "References").strip() == "- the manual <https://example.org/a>"


def test_the_same_rule_gives_the_same_page():
    assert page(RULES.rule("OG203")) == page(RULES.rule("OG203"))


def test_the_index_links_each_rule_and_names_each_signature():
    text = index_page([RULES.rule("OG201")._replace(title="a | b")], RULES.signatures)

    assert (
        "| [OG201](OG201.md) | `max_model_len_too_large` | a \\| b | `kv_cache_too_small_for_max_len` |"
        in text
    )
    for signature in RULES.signatures:
        assert f"| {signature.name} | " in text


def test_every_signature_is_shown_with_wordings_and_tests():
    for signature in RULES.signatures:
        text = signature_page(signature, file="rules/x.toml", group_facts={})

        assert text.count("\n## Wording ") == len(signature.wordings), signature.path
        assert text.count("\n## Test ") == len(signature.tests), signature.path
        assert "\x1b" not in text, signature.path
        assert Markdown(text).parsed, signature.path


def test_pattern_groups_are_shown_as_the_facts_they_fill():
    signature = next(s for s in RULES.signatures if s.name == "vllm/kv_cache_too_small_for_max_len")
    text = signature_page(
        signature, file="x", group_facts={"kv_cache_needed": "kv_cache_needed_bytes"}
    )

    assert "- reads: `kv_cache_needed_bytes`" in text
