"""The sentences of every rule, with any of their figures missing: no empty slot, no half sentence, no internal name."""

from __future__ import annotations

import re
from itertools import combinations

from oomguard.core.facts import GIB, MIB, REGISTRY, Fact
from oomguard.core.incident import KINDS, Incident, headline
from oomguard.core.settings import SETTINGS, engines, surfaces
from oomguard.core.text import PLACEHOLDER, render
from oomguard.diagnosis import assess, default_rules
from oomguard.remedy.policy import Policy
from oomguard.remedy.solution import as_sentence
from oomguard.rules.rule_files import RuleSet, explain

HALF = re.compile(
    r"\bunknown\b|[\[\]{}]|\s[.,;:]|[,;:]\.|\.\.|\b(?:of|with|at|and|than) *(?:[.,;]|$)"
)
WORD = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)+")
# What engines, torch and the command line call by such a name themselves.
KNOWN = {*SETTINGS, *(kwarg for e in engines() for s in surfaces(e).values() if (kwarg := s.kwarg))}


def figures(text: str) -> list[str]:
    return sorted({name for names, _ in PLACEHOLDER.findall(text) for name in names.split("|")})


def value(name: str) -> Fact:
    kind = REGISTRY[name].type
    return Fact(
        name,
        "x"
        if kind == "str"
        else 0.5
        if kind == "float"
        else 5 * GIB
        if name.endswith("_bytes")
        else 7,
    )


def internal_names(text: str) -> set[str]:
    return {word for word in WORD.findall(text) if word in REGISTRY and word not in KNOWN}


def test_a_sentence_leaves_out_what_is_not_known(subtests):
    for rule in default_rules().rules:
        for text in (rule.summary, rule.why):
            names = figures(text)
            some = [
                chosen
                for count in range(min(3, len(names)) + 1)
                for chosen in combinations(names, count)
            ]
            for missing in [*some, names]:
                with subtests.test(code=rule.code, missing=missing):
                    shown = render(
                        text, {name: value(name) for name in names if name not in missing}
                    )
                    assert not HALF.search(shown), shown
                    assert not internal_names(shown), shown


def test_no_text_of_a_rule_has_an_internal_name(subtests):
    for rule in default_rules().rules:
        for text in (
            rule.title,
            rule.confirm,
            *(f"{f.lever} {f.missing} {f.tradeoff}" for f in rule.fixes),
        ):
            with subtests.test(code=rule.code, text=text):
                assert not internal_names(PLACEHOLDER.sub("", text))


def test_a_failure_without_figures_has_whole_sentences(subtests):
    for kind in KINDS:
        for framework in ["vllm", "sglang", "transformers", "unknown"]:
            with subtests.test(kind=kind, framework=framework):
                failed = assess(
                    Incident(kind, "boom", framework=framework), default_rules(), Policy()
                )
                assert not HALF.search(headline(kind, {}))
                for text in [
                    *(c.explanation for c in failed.causes),
                    *failed.unknown,
                    *(p.reason for p in failed.plan),
                ]:
                    assert not HALF.search(text), text
                    assert not internal_names(text), text
                assert all(entry.endswith(".") for entry in failed.unknown)


def test_an_explanation_without_any_of_its_figures_is_the_title():
    (whole,) = [rule for rule in default_rules().rules if rule.code == "OG319"]
    bare = whole._replace(why="{tried_bytes:GiB} was asked for.")
    failed = explain(Incident("cudagraph_capture_oom", "boom"), RuleSet((), (bare,)))

    assert failed.causes[0].explanation == "Memory ran out during the capture of CUDA graphs."


def test_sizes_that_are_compared_have_one_unit(subtests):
    text = "{tried_bytes:GiB} was asked for, {device_free_bytes:GiB} of {device_total_bytes:GiB} was free."
    for tried, free, shown in [
        (24 * MIB, 0.9 * GIB, "24.00 MiB was asked for, 921.60 MiB of 40.00 GiB was free."),
        (24 * MIB, 30 * GIB, "24.00 MiB was asked for, 30.00 GiB of 40.00 GiB was free."),
        (2 * GIB, 0.9 * GIB, "2.00 GiB was asked for, 0.90 GiB of 40.00 GiB was free."),
        (24 * MIB, 0, "24.00 MiB was asked for, 0 bytes of 40.00 GiB was free."),
        (2 * GIB, 64 * MIB, "2048.00 MiB was asked for, 64.00 MiB of 40.00 GiB was free."),
    ]:
        with subtests.test(tried=tried, free=free):
            sizes = {
                "tried_bytes": tried,
                "device_free_bytes": round(free),
                "device_total_bytes": 40 * GIB,
            }
            assert render(text, {name: Fact(name, size) for name, size in sizes.items()}) == shown


def test_brackets_without_a_placeholder_are_text():
    assert render("python -c 'print(a[0])'[ --size {tried_bytes}]", {}) == "python -c 'print(a[0])'"


def test_what_is_unknown_is_a_sentence(subtests):
    for entry, sentence in [
        ("batch_size: not measured", "The log does not show the batch size."),
        ("max_num_seqs: not known", "The log does not show the value of max_num_seqs."),
        ("max_model_len_set: not known", "The log does not show whether you set max_model_len."),
        ("cudagraph_bytes: not known", "The log does not show the memory of captured CUDA graphs."),
        ("prefix_caching: not known", "The log does not show the value of enable_prefix_caching."),
        ("what the pool holds: not printed", "The log does not show what the pool holds."),
        ("any other text", "any other text"),
    ]:
        with subtests.test(entry=entry):
            assert as_sentence(entry) == sentence
