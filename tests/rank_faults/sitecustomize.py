"""Faults in the process of one rank, done to it from inside while it runs the product as it is.

Python imports this file at its start where its folder is on PYTHONPATH. Files in the folder $RANK_FAULTS say what is to
happen, and are taken away as it does:

    at PHASE of rank N     the name of a signal that such a rank sends itself, or of a fault below
    in PID                 the name of a fault

A rank that has had a fault of its own writes into `happened` the first step in which it can be seen.
"""

import functools
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ.get("RANK_FAULTS", "/nonexistent"))


def take(name: str) -> str | None:
    """The text of a file, for one process only."""
    path = FOLDER / name
    if not path.exists():
        return None
    mine = path.with_name(f"taken by {os.getpid()}: {name}")
    try:
        path.rename(mine)
    except FileNotFoundError:
        return None
    return mine.read_text()


def reach(phase: str, rank: int) -> None:
    if (what := take(f"at {phase} of rank {rank}")) is not None:
        os.kill(os.getpid(), getattr(signal, what))


def happened(step: int) -> None:
    (FOLDER / "happened").write_text(str(step))


def once(owner: Any, name: str, instead: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> None:
    """The next call of a method that `when` accepts goes to instead(method, *args)."""
    method = getattr(owner, name)

    def call(*args: Any) -> Any:
        if not when(*args):
            return method(*args)
        setattr(owner, name, method)
        return instead(method, *args)

    setattr(owner, name, call)


# -- faults of a Follower, before a turn -------------------------------------------------------------------------------


def flip_token(follower: Any) -> None:
    chunk = next(node for node in follower.core.scheduler.tree.nodes() if node.num_refs == 0 and node.tokens)
    chunk.tokens[0] ^= 1
    happened(follower._sync._step + 1)


def lose_edit(follower: Any) -> None:
    def deaf(hear: Callable[[bytes], None], payload: bytes) -> None:
        happened(follower._sync._step + 1)

    once(follower._sync, "_hear", deaf, when=bool)


def sample_another(follower: Any) -> None:
    def settle(right: Callable[[Any], None], outcome: Any) -> None:
        happened(follower._sync._step + 1)
        sampled = {s: type(one)(token_id=one.token_id ^ 1) for s, one in outcome.sampled.items()}
        right(type(outcome)(batch=outcome.batch, sampled=sampled, ended=outcome.ended))

    once(follower.core, "settle", settle)


# -- where they come in ------------------------------------------------------------------------------------------------


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, wrapped)


def patch_rank_main(module: ModuleType) -> None:
    before(module, "run_rank", lambda host, rank, *_: reach("link", rank))


def patch_liveness(module: ModuleType) -> None:
    before(module.Liveness, "accept", lambda *_, **__: reach("link", 0))


def patch_rank_group(module: ModuleType) -> None:
    group = module.RankGroup
    before(group, "__init__", lambda self, *, rank, **_: reach("group", rank))
    before(group, "check_exact", lambda self, *_: reach("self-test", self.rank))
    smallest = group.smallest

    def smaller(self: Any, value: int) -> int:
        fault = take(f"at pool of rank {self.rank}")
        if fault is not None:
            happened(1)
        return smallest(self, value) - (4 if fault is not None else 0)

    group.smallest = smaller


def patch_model(module: ModuleType) -> None:
    before(module.Decoder, "_load_layer", lambda self, *_: reach("loading", self._rank))


def patch_follower(module: ModuleType) -> None:
    def act(self: Any) -> None:
        if (fault := take(f"in {os.getpid()}")) is not None:
            globals()[fault](self)

    before(module.Follower, "turn", act)


PATCHES = {
    "chunkserve.cluster.liveness": patch_liveness,
    "chunkserve.replica.rank_main": patch_rank_main,
    "chunkserve.cluster.rank_group": patch_rank_group,
    "chunkserve.replica.model": patch_model,
    "chunkserve.replica.follower": patch_follower,
}


class PatchingLoader:
    def __init__(self, loader: Any, patch: Callable[[ModuleType], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


class PatchingFinder:
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None)
        spec.loader = PatchingLoader(spec.loader, PATCHES[name])
        return spec


if "RANK_FAULTS" in os.environ:
    sys.meta_path.insert(0, PatchingFinder())
