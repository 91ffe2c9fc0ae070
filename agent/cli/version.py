"""`gpunode version`: quick without `-v`; with it, what a bug report asks for first."""

import argparse
import json
import sys

import agent
from agent import errors


def main(found: argparse.Namespace) -> int:
    """Print the version; with `-v` also those of libraries and (where there is one) the driver."""
    document: dict[str, object] = {"version": agent.__version__}
    if found.verbose:
        document |= {"python": sys.version.split()[0], "libraries": libraries(), **_driver(found)}
    if found.output == "json":
        print(json.dumps(document, indent=2))
        return errors.EXIT_OK
    print(f"gpunode {agent.__version__}")
    for name, value in document.items():
        if name == "libraries" and isinstance(value, dict):
            for library, version in value.items():
                print(f"{library} {version or 'not installed'}")
        elif name != "version":
            print(f"{name} {value}")
    return errors.EXIT_OK


def libraries() -> "dict[str, str | None]":
    """Return the versions of the libraries gpunode stands on, None for what is not installed."""
    from importlib import metadata

    found: dict[str, str | None] = {}
    for name in (
        "nvidia-ml-py",
        "prometheus-client",
        "aiohttp",
        "pydantic",
        "tomli",
        "ruamel.yaml",
        "systemd-python",
        "grpclib",
        "protobuf",
        "common-expression-language",
        "bcrypt",
    ):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _driver(found: argparse.Namespace) -> "dict[str, object]":
    from agent import app
    from agent.cli import node as nodes

    async def ask(node: app.Node) -> int:
        state = await app.observe(node)
        if node.simulated:
            told["simulated"] = node.simulated
        told.update(driver=state.driver_version, nvml=state.nvml_version, cuda=state.cuda_version)
        return errors.EXIT_OK

    told: dict[str, object] = {}
    try:
        nodes.work(found, ask, say_simulated=False)
    except errors.DriverError as cause:
        told["driver"] = f"none ({cause})"
    return told
