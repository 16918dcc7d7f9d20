"""The HTML page: self-contained, and nothing of the log becomes markup."""

from __future__ import annotations

from html.parser import HTMLParser

from oomguard.diagnosis import diagnose_lines
from oomguard.report.html import to_html
from oomguard.scan.source import Line

NONE_LEFT = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when starting."


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words += data


def page(*log: str, source: str = "error.log") -> Tags:
    return Tags(
        to_html(
            diagnose_lines([Line(number, 0, text) for number, text in enumerate(log, 1)], source)
        )
    )


def test_the_panel_is_on_the_page():
    assert "No available memory for the cache blocks" in " ".join(
        page(NONE_LEFT).words.replace("│", " ").split()
    )


def test_text_of_the_log_is_escaped():
    for text in [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "</pre><iframe>",
        "&lt;b&gt;",
    ]:
        plain, laden = page(NONE_LEFT), page(f"{NONE_LEFT} {text}")

        assert set(laden.names) == set(plain.names), text
        assert text.split(" ")[0] in laden.words, text


def test_the_name_of_the_log_is_escaped():
    for log in (NONE_LEFT, "all is well"):
        assert page(log, source="<script>.log").names == page(log).names


def test_nothing_is_loaded_from_elsewhere():
    found = page(NONE_LEFT)

    assert found.names.count("script") == 1
    assert not {"link", "img", "iframe", "object"} & set(found.names)
    assert "url(" not in found.words
    assert [
        name for name, _ in found.attributes if name in {"src", "href"} or name.startswith("on")
    ] == []


def test_a_healthy_log_is_a_page_too():
    assert "no memory failure found" in page("all is well").words
