"""The flags that change a model's rotation of positions when it is loaded, with llama.cpp's names."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from graphrt.errors import SessionError

if TYPE_CHECKING:
    from graphrt.models.rope_options import RopeOptions

#: Flag -> field of RopeOptions, type, and what it is. The values are the file's own unless given.
FLAGS: dict[str, tuple[str, type, str]] = {
    "--rope-scaling": ("scaling", str, "how positions are stretched: none, linear or yarn"),
    "--rope-freq-scale": ("freq_scale", float, "positions are multiplied by it: 0.25 for four times the context"),
    "--rope-freq-base": ("freq_base", float, "base of the angles' frequencies"),
    "--yarn-orig-ctx": ("yarn_orig_ctx", int, "tokens of context that the model was trained on"),
    "--yarn-ext-factor": ("yarn_ext_factor", float, "1: YaRN's mix of stretched and plain angles, 0: stretched alone"),
    "--yarn-attn-factor": ("yarn_attn_factor", float, "q and k are multiplied by it beside YaRN's own factor"),
    "--yarn-beta-fast": ("yarn_beta_fast", float, "turns in the trained context from which angles are plain"),
    "--yarn-beta-slow": ("yarn_beta_slow", float, "turns in the trained context up to which they are stretched"),
}


def add_rope_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rotation of positions (default: as the model's file says)")
    for flag, (_, kind, what) in FLAGS.items():
        mark = {str: "KIND", int: "N", float: "X"}[kind]
        group.add_argument(flag, type=kind, metavar=mark, help=what)
    group.add_argument("--rope-scale", type=float, metavar="X", help="the inverse of --rope-freq-scale")


def rope_options(args: argparse.Namespace) -> RopeOptions | None:
    """What the flags ask for, None where none is given. Raises SessionError for values that can't be."""
    from graphrt.models.rope_options import RopeOptions

    given = {field: getattr(args, flag[2:].replace("-", "_"), None) for flag, (field, _, _) in FLAGS.items()}
    scale = getattr(args, "rope_scale", None)
    if scale is not None:
        if given["freq_scale"] is not None or not scale > 0:
            raise SessionError(
                f"--rope-scale must be over 0, and given without --rope-freq-scale, whose inverse it is, got {scale:g}"
            )
        given["freq_scale"] = 1 / scale
    return RopeOptions(**given) if any(value is not None for value in given.values()) else None
