"""Which target each of the drafters that come with the package belongs to.

A target is known by its shape and by bits of its embedding, not by the name or the path it was loaded from: the same
weights under another name find their drafter, others under the same name do not. Nothing depends on the match but speed.
`python -m surefoot.drafters.shipped DRAFTER TARGET` puts a trained drafter here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from surefoot.drafters import locations
from surefoot.drafters.checkpoint import describe_checkpoint
from surefoot.drafters.config import fit_problems
from surefoot.drafters.locations import FORMAT, TARGET_FILE, ShippedDrafter, shipped_drafters
from surefoot.errors import DrafterError

if TYPE_CHECKING:
    from surefoot.targets.target import Target

log = logging.getLogger(__name__)

FILES = ("config.json", "model.safetensors", "calibration.json", "manifest.json")
LARGEST = 48 << 20  # bytes of one drafter in the package
SAMPLED_ROWS = 256


def target_identity(target: Target) -> str:
    """What makes a target that target, `sha256:...`: its shape, and rows of its embedding in bfloat16.

    It is the same whatever dtype, device or packing the target is served in, as long as bfloat16 survives it. Weights tuned
    without their embedding keep it, too: a drafter made for them before still drafts well.
    """
    config, table = target.config, target.embed_tokens.weight
    shape = [getattr(config, "model_type", ""), config.vocab_size, config.hidden_size, config.num_hidden_layers]
    count = min(SAMPLED_ROWS, len(table))
    rows = table[torch.arange(count, device=table.device) * len(table) // count].detach()
    digest = hashlib.sha256(json.dumps(shape).encode())
    digest.update(rows.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def shipped_for(target: Target, directory: Path | None = None) -> ShippedDrafter | None:
    """The drafter that was trained for this very target; None if none was, or if it cannot be used."""
    candidates = shipped_drafters(directory)
    identity = target_identity(target) if candidates else ""
    for drafter in candidates:
        if identity not in drafter.identities:
            continue
        try:
            problems = fit_problems(describe_checkpoint(drafter.path).config, target.config)
        except DrafterError as problem:
            problems = [str(problem)]
        if not problems:
            return drafter
        log.warning("the drafter shipped for %s cannot be used: %s", drafter.name, "; ".join(problems))
    return None


def ship(drafter: str | Path, target: Target, directory: Path | None = None) -> ShippedDrafter:
    """Copy a trained drafter into the package, as the one for `target`. Identities it had before stay.

    Raises:
        DrafterError: it does not fit the target, lacks a file, or is too large for the package.
    """
    source, home = Path(drafter), (directory or locations.DIRECTORY) / Path(target.name).name
    if problems := fit_problems(describe_checkpoint(source).config, target.config):
        raise DrafterError(f"{source} does not fit {target.name}: {'; '.join(problems)}: ship it for its own target")
    files = [source / name for name in FILES if (source / name).is_file()]
    size = sum(file.stat().st_size for file in files)
    if size > LARGEST:
        raise DrafterError(
            f"{source} takes {size / 2**20:.1f} MiB, the package has room for {LARGEST >> 20} MiB a drafter: store int8, or "
            "train a narrower one or one with a smaller vocabulary"
        )
    known = next((shipped.identities for shipped in shipped_drafters(directory) if shipped.path == home), ())
    identities = tuple(dict.fromkeys((*known, target_identity(target))))
    home.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (home / name).unlink(missing_ok=True)
    for file in files:
        shutil.copyfile(file, home / file.name)
    entry = {"format": FORMAT, "version": 1, "name": home.name, "identities": list(identities)}
    (home / TARGET_FILE).write_text(json.dumps(entry, indent=2) + "\n")
    return ShippedDrafter(home.name, home, identities)


if __name__ == "__main__":
    from surefoot.targets.loading import load_target

    if len(sys.argv) != 3:
        sys.exit("usage: python -m surefoot.drafters.shipped DRAFTER TARGET")
    print(ship(sys.argv[1], load_target(sys.argv[2])).path)
