"""The reference page of all metrics, written from the families' own declarations.

`python -m agent.serve.reference` prints `docs/metrics.md`; a test compares the two.
"""

from __future__ import annotations

import sys

from agent import findings
from agent.serve import health
from agent.serve.families import (
    activity,
    agent,
    allocation,
    every,
    family,
    faults,
    gpu,
    layout,
    links,
    memory,
    mig,
    power,
    schedulers,
)

_LEFT_OUT = """
## What is not here, and why

- Power, energy, temperature, clocks, PCIe, NVLink, remapped rows and DRAM errors of an instance: the hardware measures them for
  the board. A share is an estimate, which a query can make and name so.
- Utilization of a GPU or process with MIG on: the driver does not tell it. `gpunode_mig_*_active_ratio` does for each
  instance on Hopper and later; on Ampere nothing does but DCGM's profiling, which takes a lock that profilers need too.
- A state of the enforcement beside the phase: `gpunode_phase` has one word for each, and `gpunode_mig_reconciles_total` counts
  how cycles ended.
- Figures by process: every new pid would be a new series. Processes are counted; `gpunode status` and `/status` name them.
- Pod, container or job on a figure: the series would change its name with every pod. Join with `*_allocation_info` and
  `*_task_info`. The resource's name does not matter: a device is known by its UUID.
- The host's name: Prometheus puts `instance` to each target. Only `/metrics/dcgm` has it, as others' dashboards need it.
- A list of XIDs to leave out: all are counted, which of them to alert on is the query's choice, and only fatal ones touch health.
- PCIe throughput: the call takes 20 ms a direction, and the byte counters give the same by `rate()`.
"""

_SECTIONS = (
    ("gpunode itself", agent.FAMILIES),
    ("Layout and health", layout.FAMILIES),
    ("GPUs", gpu.FAMILIES),
    ("Memory", memory.FAMILIES),
    ("Activity", activity.FAMILIES),
    ("Power, temperature, clocks", power.FAMILIES),
    ("Links", links.FAMILIES),
    ("Faults", faults.FAMILIES),
    ("MIG instances and devices", mig.FAMILIES),
    ("Who has which device", allocation.FAMILIES),
    ("Schedulers and surroundings", schedulers.FAMILIES),
)

_INTRODUCTION = """\
# Metrics

Written by `python -m agent.serve.reference` from the code; do not edit.

`/metrics` gives these in the Prometheus text format or OpenMetrics, as the client asks. Figures are
read on gpunode's own clock (5 s by default), never by a scrape; `gpunode_sample_timestamp_seconds`
tells their age. What a GPU does not support is absent, never 0 or NaN. A GPU and its instances are
both there; a figure that the hardware measures for the whole GPU only (power, temperature, clocks)
is never repeated on instances. Beside these there are `process_*` and `python_info`.

Labels: `gpu_uuid` and `mig_uuid` are NVML's own, so they equal the ids that Kubernetes and CUDA use;
`gpu_instance_id` belongs to one GPU. Names, profiles and places are on `*_info` metrics, to be joined:

```promql
gpunode_mig_memory_used_bytes
  * on (instance, gpu_uuid, gpu_instance_id) group_left (profile) gpunode_mig_gpu_instance_info
```

Pods stand only on `*_allocation_info`, which is the many side, as containers may share a device:

```promql
gpunode_mig_memory_used_bytes
  * on (instance, gpu_uuid, gpu_instance_id) group_right ()
    (gpunode_mig_device_allocation_info
      * on (instance, mig_uuid) group_left (gpu_uuid, gpu_instance_id) gpunode_mig_device_info)
```

That gives an instance's memory once for each holder, so do not sum it over pods.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(declared: family.Family) -> str:
    labels = " ".join(f"`{label}`" for label in declared.labels) or "–"
    unit = declared.unit or "–"
    return (
        f"| `{declared.full_name}` | {declared.kind} | {labels} | {unit} | {_cell(declared.help)} | "
        f"{_cell(declared.source)} | {_cell(declared.where)} |\n"
    )


def page() -> str:
    """Return the reference page as Markdown."""
    parts = [_INTRODUCTION]
    for title, families in _SECTIONS:
        parts.append(f"\n## {title}\n\n")
        parts.append(
            "| name | type | labels | unit | meaning | from | which have it |\n|---|---|---|---|---|---|---|\n"
        )
        parts += [_row(declared) for declared in families]
    parts.append(_LEFT_OUT)
    parts.append(
        "\n## Reasons\n\nCodes of `gpunode_health_reason`, `/healthz` and `/status`:\n\n| code | meaning |\n|---|---|\n"
    )
    parts += [f"| `{code}` | {_cell(meaning)} |\n" for code, meaning in health.CODES.items()]
    parts.append(
        "\nA cycle may give further codes of its own (hooks, the owner of the layout); they are passed on as they are.\n"
    )
    parts.append(
        "\n## Findings\n\nCodes of `gpunode_finding` and of `findings` in `/status`. Those that are critical are reasons too,"
        " and degrade the node:\n\n| code | meaning |\n|---|---|\n"
    )
    parts += [f"| `{code}` | {_cell(meaning)} |\n" for code, meaning in findings.CODES.items()]
    return "".join(parts)


def listed() -> set[str]:
    """Return the names of all families on the page."""
    return {declared.name for _, families in _SECTIONS for declared in families}


def complete() -> bool:
    """Whether the page lists every family that is served."""
    return listed() == {declared.name for declared in every.FAMILIES}


if __name__ == "__main__":
    sys.stdout.write(page())
