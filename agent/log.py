"""What the daemon says while it works: one line an event, key=value, to stderr.

`log.info("layout in force", gpu=uuid, phase="converged")`. Imports nothing heavy, as every start of
the command pays for it. `setup()` picks the level; the journal form is added by `agent.host`
through `set_sink`, so that fields reach journald as fields.
"""

import sys

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_threshold = 20


def _quote(value: object) -> str:
    text = str(value)
    if text and not any(c in text for c in ' "=\n\t'):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _to_stderr(level: str, event: str, fields: dict[str, object]) -> None:
    words = [f"level={level}", f"msg={_quote(event)}"]
    words += [f"{key}={_quote(value)}" for key, value in fields.items() if value is not None]
    try:
        sys.stderr.write(" ".join(words) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # a closed stderr must not end the daemon


_sink = _to_stderr


def setup(*, verbose: bool = False, quiet: bool = False) -> None:
    """Say from which level on lines are written: debug if `verbose`, warnings only if `quiet`."""
    global _threshold
    _threshold = 10 if verbose else 30 if quiet else 20


def set_sink(sink: "object | None") -> None:
    """Send lines to `sink(level, event, fields)` instead of stderr; None goes back to stderr."""
    global _sink
    _sink = _to_stderr if sink is None else sink  # type: ignore[assignment]


def _emit(level: str, event: str, fields: dict[str, object]) -> None:
    if _LEVELS[level] >= _threshold:
        _sink(level, event, fields)


def debug(event: str, **fields: object) -> None:
    """Write a line for somebody who is looking for a fault."""
    _emit("debug", event, fields)


def info(event: str, **fields: object) -> None:
    """Write a line about something that was done or changed."""
    _emit("info", event, fields)


def warning(event: str, **fields: object) -> None:
    """Write a line about something that will hurt if nobody looks."""
    _emit("warning", event, fields)


def error(event: str, **fields: object) -> None:
    """Write a line about something that failed."""
    _emit("error", event, fields)
