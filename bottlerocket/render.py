#!/usr/bin/env python3
"""Render Bottlerocket user data that runs gpunode on a node: containers, their user data, host settings.

    bottlerocket/render.py --image IMAGE --gpu hopper  layout.toml     > user-data.toml
    bottlerocket/render.py --image IMAGE --gpu ampere  layout.toml     (a100: see below)
    bottlerocket/render.py --image IMAGE --gpu any --uniform a100.40gb=2g.10gb
    bottlerocket/render.py --image IMAGE --gpu any --variant ecs

What comes out, by who decides the layout:

    hopper (and later)  gpunode: a bootstrap container applies the layout before kubelet starts, at every
                        boot, as neither mode nor instances outlive one. Bottlerocket's own device plugin is
                        off (1.63 and later), since it knows no mixed layout.
    ampere              Bottlerocket's nvidia-migmanager turns the mode on (strategy "mig"; it reboots once);
                        the bootstrap container then makes the instances. Needs --accept-single-plugin: the
                        built-in device plugin stays on, in strategy "single", and fails on a mixed node.
    uniform             Bottlerocket itself, by its settings. gpunode verifies and exports.
    ecs                 nobody: ECS has no MIG. gpunode watches.

Refused, with the reason: what would reboot for ever, and what a bootstrap container cannot do (reset a
GPU, stop or start units, refresh CDI, run after-change commands).
"""

from __future__ import annotations

import argparse
import base64
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

NAME = "gpunode"
MODEL = re.compile(r"[a-z][a-z0-9_-]*\.[0-9]{1,4}gb")
PROFILE = re.compile(r"[0-9]+g\.[0-9]+gb|[12347]")


class Refused(Exception):
    """What was asked cannot work on Bottlerocket; the text says why and what would."""


def refuse_what_cannot_be_done(document: dict[str, Any], gpu: str) -> None:
    """Raise Refused for settings that a bootstrap container cannot carry out, or that loop."""
    options = document.get("gpunode", {})
    change = options.get("mode-change", [])
    if "settings" in document:
        raise Refused("[settings]: Bottlerocket's own settings belong into the node's user data; use --uniform")
    if "reset" in change:
        raise Refused(
            'mode-change = ["reset"]: a bootstrap container cannot reset a GPU, as it cannot stop nvidia-persistenced,'
            " which holds it; set mode-change = []"
        )
    if "reboot" in change:
        loop = (
            "with its strategy not mig, nvidia-migmanager turns MIG off again at every boot: they would reboot in turns"
            if gpu == "ampere"
            else "Hopper and later GPUs need none, and lose the mode at every boot"
        )
        raise Refused(f'mode-change = ["reboot"]: {loop}; set mode-change = []')
    if options.get("after-change"):
        raise Refused(
            "after-change: a bootstrap container cannot start units, restart the device plugin or rewrite /etc/cdi;"
            " it runs before all of them, so there is nothing to tell yet: leave after-change out"
        )
    if "release-before-reset" in options:
        raise Refused("release-before-reset: a bootstrap container cannot stop units; leave it out")
    if options.get("enforcement") == "observe":
        raise Refused('enforcement = "observe": a bootstrap container that only looks does nothing; use --uniform')
    if options.get("enforcement") == "continuous":
        raise Refused(
            'enforcement = "continuous": a bootstrap container ends before the node serves, and the host container only'
            " watches; leave it out"
        )
    owner = options.get("owner", "auto")
    if owner not in ("auto", "gpunode"):
        raise Refused(f'owner = "{owner}": then gpunode only watches; use --uniform')
    if not options.get("layout"):
        raise Refused("no layout is declared: [[gpunode.layout]] says what the GPUs are to be split into")


def with_option(text: str, key: str, value: str) -> str:
    """Return gpunode TOML with `key = value` in [gpunode], the rest word for word."""
    wanted = tomllib.loads(text)
    wanted.setdefault("gpunode", {})[key] = tomllib.loads(f"x = {value}")["x"]
    line = f"{key} = {value}"
    within = re.search(r"^\[gpunode\][^\n]*\n(?:(?!\[).*\n?)*", text, re.MULTILINE)
    if within is None:
        changed = f"[gpunode]\n{line}\n\n{text}"
    else:
        block = within[0]
        present = re.compile(rf"^{re.escape(key)}\s*=[^\n]*$", re.MULTILINE)
        new = present.sub(line, block) if present.search(block) else block.replace("\n", f"\n{line}\n", 1)
        changed = text[: within.start()] + new + text[within.end() :]
    if tomllib.loads(changed) != wanted:
        raise Refused(f"{key} cannot be set without rewriting the document; write {line} into its [gpunode] table")
    return changed


def container(kind: str, image: str, user_data: str, **options: str) -> str:
    """Return the table of one container."""
    lines = [f"[settings.{kind}.{NAME}]", f'source = "{image}"']
    lines += [f"{key.replace('_', '-')} = {value}" for key, value in options.items()]
    encoded = base64.b64encode(user_data.encode()).decode()
    return "\n".join([*lines, f'user-data = "{encoded}"', ""])


def render(text: str, *, image: str, gpu: str, accept_single_plugin: bool = False) -> str:
    """Return user data for a node whose layout gpunode decides. Raises Refused."""
    document = tomllib.loads(text)
    refuse_what_cannot_be_done(document, gpu)
    own = with_option(text, "mode-change", "[]")
    if gpu == "ampere":
        if not accept_single_plugin:
            raise Refused(
                "an A100 takes a new MIG mode only with a reset or reboot, and Bottlerocket turns the mode off and reboots at"
                ' every boot unless its own strategy is "mig". Then its built-in device plugin stays on with strategy'
                ' "single", which fails on a mixed layout: run your own device plugin with strategy "mixed" and pass'
                " --accept-single-plugin, or declare one profile with --uniform"
            )
        own = with_option(own, "owner", '"gpunode"')
        host = 'device-partitioning-strategy = "mig"\n'
    else:
        host = 'enabled = false\ndevice-partitioning-strategy = "none"\n'
    watch = with_option(own, "enforcement", '"observe"')
    parts = [
        f"[settings.kubelet-device-plugins.nvidia]\n{host}",
        container("bootstrap-containers", image, own, mode='"always"', essential="false"),
        container("host-containers", image, watch, enabled="true", superpowered="true"),
    ]
    return "\n".join(parts)


def watch_only(*, image: str, profiles: dict[str, str]) -> str:
    """Return user data for a node that gpunode watches: Bottlerocket decides (`profiles`), or nobody."""
    parts = []
    if profiles:
        lines = [f'"{model}" = "{profile}"' for model, profile in profiles.items()]
        parts.append('[settings.kubelet-device-plugins.nvidia]\ndevice-partitioning-strategy = "mig"\n')
        parts.append("[settings.kubelet-device-plugins.nvidia.mig.profile]\n" + "\n".join(lines) + "\n")
    options = '[gpunode]\nenforcement = "observe"\n'
    parts.append(container("host-containers", image, options, enabled="true", superpowered="true"))
    return "\n".join(parts)


def uniform(words: list[str]) -> dict[str, str]:
    """Read MODEL=PROFILE words, as Bottlerocket's mig.profile takes them."""
    found = {}
    for word in words:
        model, _, profile = word.partition("=")
        if not MODEL.fullmatch(model) or not PROFILE.fullmatch(profile):
            raise Refused(
                f"--uniform {word}: Bottlerocket takes MODEL=PROFILE like a100.40gb=2g.10gb or a100.40gb=3 (one plain profile, or"
                " how many instances: 1, 2, 3, 4 or 7)"
            )
        found[model] = profile
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the user data, or why there is none (exit 2)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", nargs="?", type=Path, help="a gpunode TOML")
    parser.add_argument("--image", required=True, help="gpunode's image, best by digest")
    parser.add_argument("--gpu", choices=("hopper", "ampere", "any"), default="any", help="hopper: it and later")
    parser.add_argument("--variant", choices=("k8s", "ecs"), default="k8s")
    parser.add_argument("--uniform", action="append", default=[], metavar="MODEL=PROFILE")
    parser.add_argument("--accept-single-plugin", action="store_true")
    options = parser.parse_args(argv)
    try:
        if options.uniform and options.layout:
            raise Refused("--uniform and a layout: only one of Bottlerocket and gpunode can decide")
        if options.variant == "ecs":
            if options.uniform or options.layout:
                raise Refused(
                    "ECS has no MIG: it would hand out the names of whole GPUs that containers cannot use then"
                )
            text = watch_only(image=options.image, profiles={})
        elif options.uniform:
            text = watch_only(image=options.image, profiles=uniform(options.uniform))
        elif options.layout is None:
            raise Refused("say what the node is to be: a layout, --uniform or --variant ecs")
        elif options.gpu == "any":
            raise Refused(
                "say --gpu hopper (it and later) or --gpu ampere: the two need different settings of the host"
            )
        else:
            text = render(
                options.layout.read_text(),
                image=options.image,
                gpu=options.gpu,
                accept_single_plugin=options.accept_single_plugin,
            )
    except (Refused, OSError, ValueError) as error:
        sys.stderr.write(f"render: {error}\n")
        return 2
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
