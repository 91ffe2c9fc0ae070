"""What sampling asks of the driver, counted by the driver: so many calls a cycle, and none by a scrape."""

from __future__ import annotations

import functools
import urllib.request

from agent import threads
from agent.mig import node as nodes
from agent.mig import plan as plans
from agent.mig import profile as profiles
from agent.serve import board as boards
from agent.serve import server
from tests.serve import simulated

CYCLES = 12
"""Cycles in a minute."""
SEVEN = tuple(("1g.10gb", start) for start in range(7))
WAITING = "nvmlEventSetWait_v2"
"""The watch for events waits in turns of real time, which do not belong to cycles: five a second, whatever the GPUs."""


async def a_minute(made: simulated.Sampled) -> float:
    """Return the calls of a cycle, as the mean over a minute in which each GPU's slow group came once."""
    for _ in range(CYCLES):
        await made.cycle()  # generations begin, slow groups get spread
    before = made.bench.counted()
    for _ in range(CYCLES):
        await made.cycle()
    spent = made.bench.counted() - before
    assert spent["nvmlDeviceGetPcieThroughput"] == 0, "these take 20 ms each"
    assert spent["nvmlDeviceGetUUID"] == 0
    assert not spent.keys() & made.node.mutating_calls().keys()
    return sum(count for name, count in spent.items() if name != WAITING) / CYCLES


async def test_calls_a_gpu_a_gpu_instance_and_a_compute_instance() -> None:
    async with simulated.sampled("p5.48xlarge", dict.fromkeys(range(8), SEVEN)) as made:
        full = await a_minute(made)
    async with simulated.sampled("p5.48xlarge", dict.fromkeys(range(8), ())) as made:
        bare = await a_minute(made)
    async with simulated.sampled("p5.48xlarge") as made:
        whole = await a_minute(made)
    shared = []
    for compute in ("3c.3g.40gb",), ("1c.3g.40gb",) * 3:
        async with simulated.sampled("h100.80gb:1", {0: ()}) as made:
            uuid, place = made.bench.uuids[0], nodes.Placement(0, 4)
            offer = (await made.gpus.observe_gpu(uuid)).offer(profiles.parse("3g.40gb"))
            assert offer is not None
            await made.gpus.perform(uuid, plans.CreateGpuInstance(offer.profile, offer.id, place))
            for name in compute:
                profile = profiles.parse("3g.40gb" if name.startswith("3c") else name)
                await made.gpus.perform(uuid, plans.CreateComputeInstance(place, profile))
            shared.append(await a_minute(made))
    of_compute = (shared[1] - shared[0]) / 2
    of_instance = (full - bare) / 56 - of_compute
    assert 5 <= whole / 8 <= 20
    assert bare / 8 <= 20
    assert 1 <= of_instance <= 5
    assert of_compute <= 2


async def test_a_scrape_asks_the_driver_nothing() -> None:
    async with simulated.sampled("p5.48xlarge", {0: SEVEN, 1: SEVEN}) as made:
        board = boards.Board(now=made.clock.now)
        board.publish_snapshot(await made.snapshot(wanted={0: SEVEN, 1: SEVEN}))
        await made.cycle()
        board.publish_sample(await made.cycle())
        serving = await server.start(board, listen=["127.0.0.1:0"], web_config=None, clock=made.clock, dcgm=True)
        try:
            await made.sampler.pause()  # the watch for events, too
            await made.gpus.release()
            before = made.bench.counted()
            host = serving.addresses[0].removeprefix("http://").rstrip("/")
            for path in ("metrics", "metrics/dcgm", "status", "healthz", "readyz", "livez", "", "metrics"):
                for accept in ("text/plain", "application/openmetrics-text"):
                    request = urllib.request.Request(f"http://{host}/{path}", headers={"Accept": accept})
                    assert await threads.run(functools.partial(_fetch, request))
            assert made.bench.counted() == before
        finally:
            await serving.close()


def _fetch(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=10) as answer:
        body: bytes = answer.read()
        return body
