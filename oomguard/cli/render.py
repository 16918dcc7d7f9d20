"""Turn one input into its finished text: the same work in this process and in a worker, so that
both print the same.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final

from oomguard.cli.options import read_policy, read_rules
from oomguard.core.errors import InputError
from oomguard.core.extensions import extension
from oomguard.core.incident import Diagnosis, Incident
from oomguard.core.setting_spellings import parse_assignment
from oomguard.scan.source import damage_of, open_log, open_standard_input, shown

if TYPE_CHECKING:
    from rich.console import Console


_MAIN: Final = re.compile(r"<main[^>]*>\n?(.*)</main>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Screen:
    """How a panel has to look, as plain values: a worker has no terminal of its own."""

    width: int
    terminal: bool
    colors: str | None
    no_color: bool
    encoding: str

    @classmethod
    def of(cls, console: Console) -> Screen:
        """Return the screen that a console writes to."""
        return cls(
            console.width,
            console.is_terminal,
            console.color_system,
            console.no_color,
            console.encoding,
        )

    def console(self, file: io.StringIO) -> Console:
        """Return a console that looks the same and writes to ``file``."""
        from rich.console import Console

        return Console(
            file=file,
            width=self.width,
            force_terminal=self.terminal,
            color_system=self.colors,  # type: ignore[arg-type]
            no_color=self.no_color,
            highlight=False,
            legacy_windows=False,
            force_jupyter=False,
        )


class _Text(io.StringIO):
    """Text in memory that names the encoding in which it will be written."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What the command line asks for, as plain values that can be sent to any process.

    ``in_folders`` are the inputs that the user did not name: they were met in a folder. ``summary``
    asks for the incidents of each input as plain values, not for its text.
    """

    form: str
    screen: Screen | None = None
    allow: str | None = None
    pinned: tuple[str, ...] = ()
    floors: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    gpu_memory: str | None = None
    given: tuple[str, ...] = ()
    model: str | None = None
    masked: bool = True
    quiet: bool = False
    verbose: bool = False
    in_folders: frozenset[str] = frozenset()
    summary: bool = False


@dataclass(frozen=True, slots=True)
class RenderedInput:
    """One input, rendered: its text or what a summary takes of it, whether it holds an
    out-of-memory, what went wrong while reading it.
    """

    text: str = ""
    found: bool = False
    error: str = ""
    hint: str | None = None
    findings: tuple[Any, ...] = ()


class InputRenderer:
    """Renders inputs as a ``Work`` asks for; policy, rules and given facts are read once.

    Raises:
        SettingError: a setting, a size or a policy that cannot be used.
        RuleError: a rule file that cannot be used.
        InputError: a model that cannot be found.
    """

    def __init__(self, work: RenderOptions) -> None:
        self.work = work
        from oomguard.diagnosis.diagnose import given_device, given_settings

        self.policy = read_policy(work.allow, work.pinned, work.floors)
        self.rules = read_rules(work.rules)
        self.facts = given_device(work.gpu_memory)
        self.settings = given_settings(dict(parse_assignment(text) for text in work.given))
        if work.model is not None:
            from oomguard.estimate.model.files import find_model

            find_model(work.model)  # raised now, not once for every log

    def diagnose(
        self,
        path: str,
        on_read: Callable[[int], None] | None = None,
        *,
        is_named: bool | None = None,
    ) -> RenderedInput:
        """Diagnose one input and render it; an input that cannot be read is told in the result, not
        raised.

        ``on_read`` is called with the number of bytes that each read took. ``is_named`` says that
        the user named it; None: as the work tells.
        """
        from oomguard.diagnosis.diagnose import PASSED_OVER, diagnose_stream

        try:
            with contextlib.closing(_opened(path, on_read)) as stream:
                diagnosis = diagnose_stream(
                    stream,
                    path,
                    rules=self.rules,
                    policy=self.policy,
                    given=self.facts,
                    settings=self.settings,
                    model=self.work.model,
                    is_named=path not in self.work.in_folders if is_named is None else is_named,
                )
                damage = damage_of(stream)
            if self.work.summary:
                return RenderedInput(
                    found=diagnosis.verdict == "oom",
                    error="" if damage is None else f"{shown(path)}: {damage}",
                    findings=_findings(diagnosis),
                )
            is_told = (
                self.work.form == "json" or self.work.verbose or PASSED_OVER not in diagnosis.notes
            )
            if is_told:
                text = self.render(diagnosis)
            else:
                text = ""
        except InputError as error:
            return RenderedInput(error=str(error), hint=error.hint)
        except OSError as error:
            return RenderedInput(error=f"{shown(path)}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001
            # one input that fails must not keep the others from being read
            import traceback

            if self.work.verbose:
                trace = traceback.format_exc()
            else:
                trace = "--verbose prints where"
            return RenderedInput(
                error=f"{shown(path)}: internal error: {type(error).__name__}: {error}", hint=trace
            )
        return RenderedInput(
            text, diagnosis.verdict == "oom", "" if damage is None else f"{shown(path)}: {damage}"
        )

    def render(self, diagnosis: Diagnosis) -> str:
        """Return the diagnosis in the form asked for; nothing for a clean input under --quiet,
        except in JSON.
        """
        if self.work.quiet and self.work.form != "json" and not diagnosis.incidents:
            return ""
        with unmasked_if(not self.work.masked):
            return self._render(diagnosis)

    def _render(self, diagnosis: Diagnosis) -> str:
        if self.work.form == "json":
            from oomguard.report.json import to_json

            return to_json(diagnosis) + "\n"
        if self.work.form == "markdown":
            from oomguard.report.markdown import to_markdown

            return to_markdown(diagnosis) + "\n"
        if self.work.form == "html":
            from oomguard.report.html import to_html

            return to_html(diagnosis)
        screen = self.work.screen or Screen(
            80, terminal=False, colors=None, no_color=True, encoding="utf-8"
        )
        return text_of(screen, lambda console: self._print(console, diagnosis))

    def _print(self, console: Console, diagnosis: Diagnosis) -> None:
        from oomguard.report.terminal import print_diagnosis

        print_diagnosis(console, diagnosis)
        if self.work.verbose:
            for incident in diagnosis.incidents:
                for line in details(incident):
                    console.print(line, markup=False, highlight=False, soft_wrap=True)


def text_of(screen: Screen, show: Callable[[Console], None]) -> str:
    """Return what ``show`` prints to a console of that screen."""
    file = _Text(screen.encoding)
    show(screen.console(file))
    return file.getvalue()


def _opened(path: str, on_read: Callable[[int], None] | None) -> IO[bytes]:
    if path == "-":
        return open_standard_input(on_read)
    if "://" in path:
        from oomguard.scan.inputs import is_url

        if is_url(path):
            from oomguard.scan.remote_inputs import open_object

            return open_object(path, on_read)
    return open_log(path, on_read)


def _findings(diagnosis: Diagnosis) -> tuple[Any, ...]:
    """Return what a summary needs of one input."""
    fleet = extension("fleet_summary")
    if fleet is None or not diagnosis.incidents:
        return ()
    found: tuple[Any, ...] = fleet.findings_in(diagnosis)
    return found


def unmasked_if(asked: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which secrets, prompts and home folders are shown, where that is asked
    for.
    """
    if not asked:
        return contextlib.nullcontext()
    from oomguard.report.redact import unmasked

    return unmasked()


def details(incident: Incident) -> Iterator[str]:
    """Yield the settings in force and the facts of an incident, each with its source,
    one a line.
    """
    from oomguard.report.redact import mask

    if incident.settings:
        yield (
            "settings in force:"
            if incident.settings_complete
            else "settings in force, as far as they are known:"
        )
    for name, setting in sorted(incident.settings.items()):
        whose = {True: ", set by the user", False: ", a default", None: ""}[setting.set_by_user]
        yield f"  {mask(f'{name} = {setting.value}')} ({setting.source}{whose})"
    if incident.facts:
        yield "facts:"
    for name, fact in sorted(incident.facts.items()):
        if fact.line is None:
            line = ""
        else:
            line = f", line {fact.line}"
        yield f"  {mask(f'{name} = {fact.value}')} ({fact.source}{line})"


class OnePage:
    """Joins whole HTML pages into one, page by page: the first one's head, style and script, the
    content of all.
    """

    def __init__(self) -> None:
        self._end = ""

    def add(self, page: str) -> str:
        """Return what to write for one more page."""
        main = _MAIN.search(page)
        if main is None:
            return page
        if self._end:
            return main[1]
        self._end = page[main.end(1) :]
        return page[: main.end(1)]

    def end(self) -> str:
        """Return what to write at the end; empty if no page was added."""
        return self._end
