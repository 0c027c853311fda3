"""The dashboard in deploy/grafana asks for metrics that there are."""

import json
import re
from pathlib import Path

from chunkserve.deploy.metrics import IngressMetrics
from chunkserve.router.route_metrics import METRIC_NAMES

from .conftest import LOAD

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/chunkserve.json"


def test_every_metric_of_the_dashboard_exists() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    wanted = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"(?:ray_)?chunkserve_\w+", target["expr"])
    }
    ingress = IngressMetrics("m")
    ingress.observe_first_token(0.1)
    text = ingress.text({"replica-0": LOAD}).decode()
    served = set(re.findall(r"^(chunkserve_\w+)", text, re.MULTILINE))
    # Ray puts its name before those, and _total after those that count.
    served |= {f"ray_{name}{end}" for name in METRIC_NAMES for end in ("", "_total")}
    assert len(panels) >= 8
    assert wanted - served == set()
