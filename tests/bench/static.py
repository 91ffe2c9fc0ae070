"""The server that gpunode's is held against: aiohttp with one body, and nothing else to do.

`python -m tests.bench.static PORT FILE` serves the bytes of FILE at /metrics until it is ended.
"""

from __future__ import annotations

import sys
from pathlib import Path

from aiohttp import web


def main() -> None:
    """Serve until a signal."""
    body = Path(sys.argv[2]).read_bytes()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
