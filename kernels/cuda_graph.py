"""Capture of CUDA graphs as torch asks for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def captured(run: Callable[[], Tensor], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """`run` as a graph, and the result that its replays overwrite.

    Args:
        run: what it needs must be staged (`GraphBackend`); it runs once before, on a side stream, to warm up.
        pool: of torch.cuda.graph_pool_handle; graphs that share one must not run at the same time, and the result of
            one must be used before the next one runs.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run()
    return graph, out
