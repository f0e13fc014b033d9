"""`megafour verify`: every mesh against one process, on the user's own config at toy size."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from megafour.cli._arguments import location, positive
from megafour.config.errors import ConfigError
from megafour.config.load import load_config
from megafour.config.rules import resolve, smallest_world

if TYPE_CHECKING:
    from megafour.verify.full import Skipped
    from megafour.verify.shrink import Case

DESCRIPTION = """Shrinks the config to the same architecture at toy size, trains a few steps on one process and on every
mesh asked for, from one seed, and compares the loss, the gradient of every parameter and the weights. Without --mesh:
each axis, each pair of axes and the whole grid, and two meshes with masks and dropout. Each mesh also skips a step
whose gradient is not finite, evaluates, and saves what another mesh goes on from and one process continues a prompt
with. In fp64 every deviation must be at most 1e-9."""


def add_parser(subparsers: Any) -> None:
    """Adds the verb and its options."""
    parser = subparsers.add_parser("verify", help="every mesh against one process", description=DESCRIPTION)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="section.key=value", help="values over the config's")
    add("--config", type=location, metavar="FILE", help="the YAML file; the defaults without it")
    add("--mesh", action="append", metavar="MESH", help="a mesh in words, as dp2-tp2; may be repeated")
    add("--options", choices=["all"], help="all: a covering array of every option, instead of the config's own")
    add("--full-size", type=positive, metavar="LAYERS",
        help="keep the config's hidden size, heads, vocabulary and sequence length, with LAYERS layers; "
             "meshes that would not fit into memory are skipped, with the numbers")
    add("--steps", type=positive, default=3, metavar="K", help="training steps to compare (default: 3)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where to run (default: cpu)")
    add("--dtype", choices=["fp64", "fp32", "bf16"],
        help="precision of the meshes (default: fp64; with --full-size fp32 where fp64 does not fit). fp32 and bf16 "
             "are held against an fp32 process that starts from the same rounded weights, at the tolerances that are "
             "printed")
    add("--json", action="store_true", help="one JSON document instead of the table")


def run(args: argparse.Namespace) -> int:
    """Runs the verb: 0 when every mesh passes, 1 when one does not, ConfigError for a wrong argument."""
    config = load_config(args.config, args.overrides)
    cases, skipped = _full_cases(config, args) if args.full_size else (_cases(config, args), [])
    world = max(case.degrees.world for case in cases)
    if args.device == "cuda":
        _enough_gpus(world)
    from megafour.verify.compare import TOLERANCES
    from megafour.verify.pool import Pool
    from megafour.verify.run import check
    from megafour.verify.table import Table, as_json

    tolerance = TOLERANCES[args.dtype]
    table = None if args.json else Table(cases, args.steps, args.dtype, args.device, tolerance)
    outcomes = []
    with Pool(world) as pool:
        pool.start()
        for case in cases:
            outcome = check(pool, case, args.steps, precision=args.dtype, device=args.device,
                            timeout=3600 if args.full_size else 300)
            outcomes.append(outcome)
            if table is not None:
                table.row(outcome)
    if table is None:
        print(json.dumps(as_json(outcomes, args.steps, args.dtype, args.device, tolerance, skipped), indent=1))
    else:
        table.end(outcomes, skipped)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _cases(config: Any, args: argparse.Namespace) -> list[Case]:
    from megafour.verify.matrix import DEFAULT_MESHES, OPTION_MESHES, covering_array, parse_mesh
    from megafour.verify.shrink import option_case, other_cases, user_cases

    args.dtype = args.dtype or "fp64"
    words = list(dict.fromkeys(args.mesh or (OPTION_MESHES if args.options == "all" else DEFAULT_MESHES)))
    meshes = [parse_mesh(word) for word in words]
    if args.options == "all":
        resolve(config, smallest_world(config), data=False)     # the user's own must be sound as well
        rows = covering_array([mesh.words for mesh in meshes])
        return [option_case(config, row, args.steps, args.dtype, args.device, thorough=True) for row in rows]
    cases = user_cases(config, meshes, args.steps, args.dtype, args.device, thorough=True)
    return cases if args.mesh else [*cases, *other_cases(config, args.steps, args.dtype, args.device)]


def _full_cases(config: Any, args: argparse.Namespace) -> tuple[list[Case], list[Skipped]]:
    """What fits: in fp64, or where more meshes do in fp32 and the user has not said it, in that."""
    from megafour.verify.full import available_memory, full_cases
    from megafour.verify.matrix import DEFAULT_MESHES, parse_mesh

    if args.options:
        raise ConfigError("--full-size walks the config's own options; leave --options out")
    meshes = [parse_mesh(word) for word in dict.fromkeys(args.mesh or DEFAULT_MESHES)]
    available = available_memory(args.device)
    found = {dtype: full_cases(config, meshes, args.full_size, args.steps, dtype, args.device, available)
             for dtype in ([args.dtype] if args.dtype else ["fp64", "fp32"])}
    args.dtype = max(found, key=lambda dtype: len(found[dtype][0]))
    if not found[args.dtype][0]:
        args.dtype = list(found)[-1]
    cases, skipped = found[args.dtype]
    if args.mesh and skipped or not cases:
        raise ConfigError(f"--full-size {args.full_size}, {skipped[0].why}")
    return cases, skipped


def _enough_gpus(world: int) -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < world:
        raise ConfigError(f"--device cuda: the largest mesh needs {world} GPUs, one per rank, and this machine has "
                          f"{count}; ask for smaller meshes with --mesh, or take --device cpu")
