"""The dashboard in deploy/grafana asks for metrics that there are."""

import json
import re
from pathlib import Path

from chunkserve.deploy.fair_queue import FairQueue
from chunkserve.deploy.metrics import IngressMetrics
from chunkserve.router.route_metrics import HISTOGRAM_NAMES, METRIC_NAMES

from .conftest import LOAD

# Shown in other ways, or parts of what is shown.
NOT_SHOWN = {
    "chunkserve_route_hit_rate",
    "chunkserve_route_open_requests",
    "chunkserve_route_ttft_seconds",
    "chunkserve_route_time_per_output_token_seconds",
}
DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/chunkserve.json"


async def test_every_metric_of_the_dashboard_exists() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    wanted = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"(?:ray_)?chunkserve_\w+", target["expr"])
    }
    ingress = IngressMetrics("m")
    queue = FairQueue(capacity=1, max_waiting=1)
    async with queue.turn("tenant", sequences=1, tokens=10):
        pass
    ingress.watch_queue(queue)
    ingress.observe_first_token(0.1)
    ingress.count_rejected("tenant_queue")
    text = ingress.text({"replica-0": LOAD}).decode()
    served = set(re.findall(r"^(chunkserve_\w+)", text, re.MULTILINE))
    # Ray puts its name before those, and _total after those that count.
    ends = dict.fromkeys(METRIC_NAMES, ("", "_total")) | dict.fromkeys(HISTOGRAM_NAMES, ("_bucket",))
    served |= {f"ray_{name}{end}" for name in METRIC_NAMES for end in ends[name]}
    assert wanted - served == set()
    # What people judge the router by is all shown.
    shown = {name for name in METRIC_NAMES if any(f"ray_{name}{end}" in wanted for end in ends[name])}
    assert set(METRIC_NAMES) - shown == NOT_SHOWN
