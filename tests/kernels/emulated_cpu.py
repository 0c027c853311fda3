"""A pytest plugin: the compiled module that EMULATED_CPU names takes the place of chunkserve.kernels._cpu."""

import importlib.util
import os
import sys

_NAME = "chunkserve.kernels._cpu"

_spec = importlib.util.spec_from_file_location(_NAME, os.environ["EMULATED_CPU"])
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

import chunkserve.kernels  # noqa: E402 - a package whose modules have not been imported yet

sys.modules[_NAME] = _module
chunkserve.kernels._cpu = _module  # type: ignore[attr-defined]
