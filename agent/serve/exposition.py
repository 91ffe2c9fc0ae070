"""Metrics as bytes ready to be sent: rendered at most once per version of the board and format.

Rendering 2,300 series costs tens of milliseconds, so it happens in a short worker thread when the
board changes, for the formats that somebody has asked for lately; a scrape only picks up the bytes.
The encoders are prometheus_client's. They work family by family here: a family whose rows are the
same as last time keeps its text, and most families (identity, shares, error counters) are.
"""

from __future__ import annotations

import array
import asyncio
import functools
import gzip
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client import core, exposition, platform_collector, process_collector
from prometheus_client.openmetrics import exposition as openmetrics

import agent
from agent import records, threads
from agent.serve import board as boards
from agent.serve import health, revision
from agent.serve.families import every, family

WANTED_FOR = 150.0
"""Seconds for which a format stays wanted after it was asked for (scrape intervals go up to 2 minutes)."""
OLDEST = 15.0
"""Seconds after which ready bytes are not served without rendering anew: the board then has stopped
changing, and health and process figures have moved on."""
_GZIP_LEVEL = 4


class _Collector(Protocol):
    def collect(self) -> Iterable[core.Metric]: ...


@records.dataclass(frozen=True, slots=True)
class Format:
    """A way to write metrics: its name here, content type, and how one metric becomes bytes."""

    name: str
    content_type: str
    encode: Callable[[_Collector], bytes]
    end: bytes = b""


def _openmetrics(collector: _Collector) -> bytes:
    return openmetrics.generate_latest(collector).removesuffix(b"# EOF\n")  # type: ignore[no-any-return,no-untyped-call]


TEXT = Format("text", "text/plain; version=0.0.4; charset=utf-8", exposition.generate_latest)
OPENMETRICS = Format(
    "openmetrics", "application/openmetrics-text; version=1.0.0; charset=utf-8", _openmetrics, end=b"# EOF\n"
)
FORMATS = (TEXT, OPENMETRICS)


def choose(accept: str) -> Format:
    """Return the format that an Accept header asks for most, plain text where it asks for neither."""
    best, best_weight = TEXT, 0.0
    for part in accept.lower().split(","):
        media, *parameters = (word.strip() for word in part.split(";"))
        if media == "application/openmetrics-text":
            found = OPENMETRICS
        elif media in ("text/plain", "text/*", "*/*"):
            found = TEXT
        else:
            continue
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        if weight > best_weight:
            best, best_weight = found, weight
    return best


@records.dataclass(frozen=True, slots=True)
class Page:
    """Ready bytes. `version` is the board's, `rendered` in the monotonic clock's seconds."""

    version: int
    rendered: float
    content_type: str
    plain: bytes
    gzipped: bytes


class _One:
    """A collector of exactly one metric, as the encoders take collectors."""

    def __init__(self, metric: core.Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[core.Metric]:
        yield self._metric


def metric_of(declared: family.Family, rows: Iterable[family.Row]) -> core.Metric:
    """Return a prometheus_client metric object with these rows."""
    metric: core.GaugeMetricFamily | core.CounterMetricFamily
    if declared.kind == "counter":
        metric = core.CounterMetricFamily(declared.full_name, declared.help, labels=declared.labels)
    else:
        metric = core.GaugeMetricFamily(declared.full_name, declared.help, labels=declared.labels)
    for labels, value in rows:
        metric.add_metric(labels, value)
    return metric


def _encode(declared: family.Family, rows: Iterable[family.Row], form: Format) -> bytes:
    text = form.encode(_One(metric_of(declared, rows)))
    if declared.kind == "counter" and not declared.name.endswith("_total"):
        # Others' names of counters lack the suffix that prometheus_client puts to each.
        text = text.replace(f"{declared.full_name}_total".encode(), declared.full_name.encode())
    return text


def build() -> family.Build:
    """Return what is running, and where."""
    return family.Build(
        version=agent.__version__,
        revision=revision.find(),
        python=platform.python_version(),
        hostname=platform.node(),
    )


def view_of(board: boards.Board, *, now: float, what: family.Build) -> family.View:
    """Return everything metrics are read from, judged at `now` (Unix seconds)."""
    return family.View(
        now=now,
        snapshot=board.snapshot,
        sample=board.sample,
        health=health.judge(
            board.snapshot, board.sample, now=now, loop_turned=board.loop_turned, noticed=board.findings
        ),
        build=what,
        cycles=board.tally.cycles,
        steps=board.tally.steps,
        advertised=board.advertised,
        given=board.given,
    )


_Mark = tuple[int, bytes]


def _mark(rows: Sequence[family.Row]) -> _Mark:
    """Return what tells rows from others: their values, and a hash of their labels.

    The rows themselves would be half a MiB of small strings, kept for nothing but this. Values are kept
    whole, as Python's numbers have colliding hashes (-1 and -2); those of strings are chance.
    """
    return hash(tuple(labels for labels, _ in rows)), array.array("d", [value for _, value in rows]).tobytes()


class Renderer:
    """Turns views into text, taking what has not changed from its last text. Use from one thread at a time."""

    def __init__(self, families: Sequence[family.Family] = every.FAMILIES, *, process: bool = True) -> None:
        self._families = families
        # By format: the last text, and where in it each family stands. A page holds that text anyway; one of its own
        # for each family would be the same bytes again.
        self._last: dict[str, tuple[bytes, dict[str, tuple[_Mark, int, int]]]] = {}
        self._own: tuple[_Collector, ...] = ()
        if process:
            self._own = (
                process_collector.ProcessCollector(registry=None),
                platform_collector.PlatformCollector(registry=None),
            )

    def render(self, view: family.View, form: Format) -> bytes:
        """Return the whole exposition of `view`."""
        last, before = self._last.get(form.name, (b"", {}))
        places: dict[str, tuple[_Mark, int, int]] = {}
        parts: list[bytes | memoryview] = []
        at = 0
        for declared in self._families:
            rows = list(declared.rows(view))
            if not rows:
                continue
            mark = _mark(rows)
            known = before.get(declared.name)
            if known is not None and known[0] == mark:
                part: bytes | memoryview = memoryview(last)[known[1] : known[2]]
            else:
                part = _encode(declared, rows, form)
            places[declared.name] = (mark, at, at + len(part))
            at += len(part)
            parts.append(part)
        parts += [form.encode(own) for own in self._own]
        parts.append(form.end)
        text = b"".join(parts)
        self._last[form.name] = (text, places)
        return text


class Exposition:
    """Keeps the metrics of a board ready in the formats that are asked for.

    `clock` gives Unix seconds. `work(job)` runs a job off the event loop. `renders` counts renderings.
    """

    def __init__(
        self,
        board: boards.Board,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        renderer: Renderer | None = None,
        formats: Sequence[Format] = FORMATS,
    ) -> None:
        self._board = board
        self._clock = clock
        self._monotonic = monotonic
        self._renderer = renderer or Renderer()
        self._formats = tuple(formats)
        self._build = build()
        self._pages: dict[str, Page] = {}
        self._asked: dict[str, float] = {}
        self._worker: asyncio.Task[None] | None = None
        self._again = False
        self._lock = threading.Lock()
        self._end = board.subscribe(self._changed)
        self.renders = 0

    def ready(self, form: Format) -> Page | None:
        """Return the bytes at hand when they may be served, None when they must be made first."""
        now = self._monotonic()
        self._asked[form.name] = now
        page = self._pages.get(form.name)
        if page is None or now - page.rendered > OLDEST:
            return None
        return page

    async def page(self, form: Format) -> Page:
        """Return the bytes of a format, waiting for them only where none are ready."""
        page = self.ready(form)
        while page is None:
            await self._work()
            page = self.ready(form)
        return page

    def _changed(self) -> None:
        """Render for those who asked lately; nobody asks, nothing is rendered."""
        if self._worker is not None:
            self._again = True
        elif self._wanted():
            self._start()

    def _wanted(self) -> list[Format]:
        now = self._monotonic()
        return [form for form in self._formats if now - self._asked.get(form.name, -WANTED_FOR) < WANTED_FOR]

    def _start(self) -> asyncio.Task[None]:
        self._again = False
        self._worker = asyncio.get_running_loop().create_task(self._render_wanted(), name="exposition")
        return self._worker

    async def _work(self) -> None:
        await asyncio.shield(self._worker or self._start())

    async def _render_wanted(self) -> None:
        try:
            while True:
                self._again = False
                wanted = self._wanted()
                board_version = self._board.version
                view = view_of(self._board, now=self._clock(), what=self._build)
                job = functools.partial(self._render, view, wanted, board_version)
                pages = await threads.run(job, name="render")
                self._pages.update(pages)
                if not self._again:
                    return
        finally:
            self._worker = None

    def _render(self, view: family.View, wanted: list[Format], version: int) -> dict[str, Page]:
        pages = {}
        with self._lock:
            for form in wanted:
                plain = self._renderer.render(view, form)
                self.renders += 1
                pages[form.name] = Page(
                    version=version,
                    rendered=self._monotonic(),
                    content_type=form.content_type,
                    plain=plain,
                    gzipped=gzip.compress(plain, _GZIP_LEVEL, mtime=0),
                )
        return pages

    async def close(self) -> None:
        """Stop rendering."""
        self._end()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
