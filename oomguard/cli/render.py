"""Turn one input into finished text, in this process or in a worker with the same result."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from oomguard.cli.options import read_policy, read_rules
from oomguard.core.errors import InputError
from oomguard.core.incident import Diagnosis, Incident
from oomguard.core.installation import extension
from oomguard.core.settings import parse_assignment
from oomguard.scan.source import damage_of, open_log, open_standard_input, printable_path

if TYPE_CHECKING:
    from rich.console import Console


_MAIN: Final = re.compile(r"<main[^>]*>\n?(.*)</main>", re.DOTALL)


class Screen(NamedTuple):
    """Describe a screen in plain values, because a worker has no terminal of its own."""

    width: int
    terminal: bool
    colors: str | None
    no_color: bool
    encoding: str

    @classmethod
    def of(cls, console: Console) -> Screen:
        """Return the screen of a console."""
        return cls(
            console.width,
            console.is_terminal,
            console.color_system,
            console.no_color,
            console.encoding,
        )

    def console(self, file: io.StringIO) -> Console:
        """Return a console with the same look that writes to ``file``."""
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
    """Hold text in memory, and name the encoding for writing it."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


class RenderOptions(NamedTuple):
    """Hold the options of the command line as plain values for any process.

    Attributes:
        in_folders: inputs that oomguard found in a folder, so that the user did not name them.
        summary: whether the result is plain incidents for a summary instead of text.
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


class RenderedInput(NamedTuple):
    """Hold one rendered input: text or summary data, the verdict, and read errors."""

    text: str = ""
    found: bool = False
    error: str = ""
    hint: str | None = None
    findings: tuple[Any, ...] = ()


class InputRenderer:
    """Render inputs with fixed options; policy, rules and given facts are read once.

    Raises:
        SettingError: if a setting, a size or a policy is invalid.
        RuleError: if a rule file cannot be used.
        InputError: if a model cannot be found.
    """

    def __init__(self, work: RenderOptions) -> None:
        self.work = work
        from oomguard.diagnosis import device_fact, user_settings

        self.policy = read_policy(work.allow, work.pinned, work.floors)
        self.rules = read_rules(work.rules)
        self.facts = device_fact(work.gpu_memory)
        self.settings = user_settings(dict(parse_assignment(text) for text in work.given))
        if work.model is not None:
            from oomguard.estimate.model.files import find_model

            find_model(work.model)  # raises now, not once for every log

    def diagnose(
        self,
        path: str,
        on_read: Callable[[int], None] | None = None,
        *,
        is_named: bool | None = None,
    ) -> RenderedInput:
        """Diagnose one input and render it; errors of the input are in the result.

        Args:
            path: the input.
            on_read: receives the number of bytes of each read; None for no progress.
            is_named: whether the user named the input; None to look it up in the options.
        """
        from oomguard.diagnosis import PASSED_OVER, diagnose_stream

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
                    error="" if damage is None else f"{printable_path(path)}: {damage}",
                    findings=_findings(diagnosis),
                )
            is_shown = (
                self.work.form == "json" or self.work.verbose or PASSED_OVER not in diagnosis.notes
            )
            if damage is not None and self.work.form != "json":
                # oomguard did not see all of it, so it cannot say that there is no failure
                is_shown = is_shown and bool(diagnosis.incidents)
            if is_shown:
                text = self.render(diagnosis)
            else:
                text = ""
        except InputError as error:
            return RenderedInput(error=str(error), hint=error.hint)
        except OSError as error:
            return RenderedInput(error=f"{printable_path(path)}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001
            # One failing input must not stop the others.
            import traceback

            if self.work.verbose:
                trace = traceback.format_exc()
            else:
                trace = "run it with --verbose to see where"
            return RenderedInput(
                error=f"{printable_path(path)}: internal error: {type(error).__name__}: {error}",
                hint=trace,
            )
        return RenderedInput(
            text,
            diagnosis.verdict == "oom",
            "" if damage is None else f"{printable_path(path)}: {damage}",
        )

    def render(self, diagnosis: Diagnosis) -> str:
        """Return the diagnosis in the chosen format; "" for a clean input under --quiet.

        JSON has an object for a clean input too.
        """
        if self.work.quiet and self.work.form != "json" and not diagnosis.incidents:
            return ""
        with unmasked_if(not self.work.masked):
            return self._render(diagnosis)

    def _render(self, diagnosis: Diagnosis) -> str:
        if self.work.form == "json":
            from oomguard.report.json import to_json

            return to_json(diagnosis) + "\n"
        if self.work.form == "md":
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

        print_diagnosis(console, diagnosis, full=self.work.verbose)
        if self.work.verbose:
            for incident in diagnosis.incidents:
                for line in details(incident):
                    console.print(line, markup=False, highlight=False, soft_wrap=True)


def text_of(screen: Screen, show: Callable[[Console], None]) -> str:
    """Return what ``show`` prints on a console of that screen."""
    file = _Text(screen.encoding)
    show(screen.console(file))
    return file.getvalue()


def _opened(path: str, on_read: Callable[[int], None] | None) -> IO[bytes]:
    if path == "-":
        return open_standard_input(on_read)
    if "://" in path:
        from oomguard.scan.inputs import is_url

        if is_url(path):
            from oomguard.scan.inputs import open_object

            return open_object(path, on_read)
    return open_log(path, on_read)


def _findings(diagnosis: Diagnosis) -> tuple[Any, ...]:
    """Return what a summary needs of one input."""
    fleet = extension("fleet_summary")
    if fleet is None or not diagnosis.incidents:
        return ()
    found: tuple[Any, ...] = fleet.findings_in(diagnosis)
    return found


def unmasked_if(is_unmasked: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context that shows secrets, prompts and home folders if ``is_unmasked``."""
    if not is_unmasked:
        return contextlib.nullcontext()
    from oomguard.core.redact import unmasked

    return unmasked()


def details(incident: Incident) -> Iterator[str]:
    """Yield the effective settings and the facts of an incident with their sources."""
    from oomguard.core.redact import mask

    if incident.settings:
        yield (
            "effective settings:"
            if incident.settings_complete
            else "effective settings, as far as they are known:"
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
    """Join HTML pages into one: the first page's head, style and script, all contents."""

    def __init__(self) -> None:
        self._end = ""

    def add(self, page: str) -> str:
        """Return the text to write for one more page."""
        main = _MAIN.search(page)
        if main is None:
            return page
        if self._end:
            return main[1]
        self._end = page[main.end(1) :]
        return page[: main.end(1)]

    def end(self) -> str:
        """Return the text to write at the end; "" if there was no page."""
        return self._end
