"""What a person sees of a bulk run: a bar on a terminal, a plain line every few seconds elsewhere. Problems are printed as they come."""
from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from types import FrameType, TracebackType
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from .bulk import Report
from .counted import counted
from .sources import Problem

PLAIN_SECONDS = 5.0
SHOWN_PROBLEMS, SHOWN_ALIKE = 50, 20      # in all, and of those that say the same of different documents


class Display:
    """A `bulk.Watcher` on a text stream; `total` documents are expected, None: unknown."""

    def __init__(self, stream: IO[str], total: int | None) -> None:
        self.stream, self.total = stream, total
        self._shown = 0
        self._alike: Counter[str] = Counter()
        self._next = time.monotonic() + PLAIN_SECONDS
        self._bar = _bar(stream) if stream.isatty() else None
        self._task = self._bar.add_task("", total=total, report=Report()) if self._bar else None

    def __enter__(self) -> Display:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
        alike = {said: count - SHOWN_ALIKE for said, count in self._alike.items() if count > SHOWN_ALIKE}
        for said, count in alike.items():
            self._print(f"... and {count:,} more like: {said}")
        if rest := self._alike.total() - self._shown - sum(alike.values()):
            self._print(f"... and {rest:,} more problems")

    def progress(self, report: Report) -> None:
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=report.done, total=self.total and max(self.total, report.done), report=report)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + PLAIN_SECONDS
            of = f"{report.done:,} of " if self.total else ""
            self._print(" · ".join([of + counted(self.total or report.done, "document"), *rates(report, self.total)]))

    def problem(self, problem: Problem) -> None:
        said = problem.message.replace(f"{problem.known!r}: ", "... ") if problem.known else problem.message
        self._alike[said] += 1
        if self._shown < SHOWN_PROBLEMS and self._alike[said] <= SHOWN_ALIKE:
            self._shown += 1
            self._print(f"{problem.position}: {problem.message}")

    def writing(self, now: bool) -> None:
        pass

    def _print(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self.stream, flush=True)


class Interruptible(Display):
    """Ctrl-C stops the run: at once between transactions, after the transaction within one. A second Ctrl-C does not wait."""

    def __init__(self, stream: IO[str], total: int | None) -> None:
        super().__init__(stream, total)
        self._writing = self._asked = False
        self._before: Any = None

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def writing(self, now: bool) -> None:
        self._writing = now
        if self._asked and not now:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._asked or not self._writing:
            raise KeyboardInterrupt
        self._asked = True


def rates(report: Report, total: int | None = None) -> list[str]:
    """Documents and tokens a second, and what is left."""
    seconds = max(report.seconds, 1e-9)
    speed = report.done / seconds
    shown = [f"{speed:,.{0 if speed >= 10 else 1}f} documents/s"] + ([f"{report.tokens / seconds:,.0f} tokens/s"] if report.tokens else [])
    if total and report.done:
        shown.append(f"{duration(max(total - report.done, 0) * seconds / report.done)} left")
    return shown


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:,.0f} of {task.total:,.0f}" if task.total else counted(int(task.completed), "document"))


class _Rates(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(" · ".join(rates(task.fields["report"], int(task.total) if task.total else None)), style="dim")


def _bar(stream: IO[str]) -> Progress:
    return Progress(_Count(), BarColumn(bar_width=30), _Rates(), console=Console(file=stream), refresh_per_second=5)
