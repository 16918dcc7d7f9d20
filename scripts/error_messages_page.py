"""Write docs/how-to/my-error-message.md from oomguard/rules/error_messages.toml."""

from pathlib import Path

from oomguard.report.explanation import messages_page

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "my-error-message.md"


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(messages_page().rstrip() + "\n", encoding="utf-8")
    print(f"{PAGE.name}: written")


if __name__ == "__main__":
    main()
