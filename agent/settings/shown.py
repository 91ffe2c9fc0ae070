"""Settings as people and scripts are shown them: every key, its value, and where it came from."""

from __future__ import annotations

from agent.settings import model

Value = dict[str, object]


def values(settings: model.Settings, *, secret: bool = False) -> dict[str, Value]:
    """Return for each key its `value`, and `source`, `file`, `line` and `from` (in words) of where it was said; the
    layout is told by its kind. `secret` leaves out what may be nobody else's business: the arguments
    of commands."""
    return {
        key: {
            "value": _value(settings, key, secret=secret),
            "source": origin.source,
            "file": origin.file,
            "line": origin.line,
            "from": str(origin),
        }
        for key, origin in settings.provenance.items()
    }


def words(value: object) -> str:
    """Return a value as a table holds it."""
    match value:
        case None:
            return "-"
        case bool():
            return "true" if value else "false"
        case list():
            return "[" + ", ".join(words(v) for v in value) + "]"
        case _:
            return str(value)


def _value(settings: model.Settings, key: str, *, secret: bool) -> object:
    """Return the value of a key as JSON can hold it."""
    if key == "layout":
        match settings.declaration:
            case None:
                return None
            case model.BottlerocketDeclaration():
                return "bottlerocket"
            case model.LayoutDeclaration():
                return "gpunode"
            case declared:
                return f"mig-parted:{declared.label}"
    value = getattr(settings, key.replace("-", "_"))
    if isinstance(value, tuple):
        shown = slice(1) if secret else slice(None)
        return [list(v.command[shown]) if isinstance(v, model.AfterChange) else v for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
