"""Draw docs/dashboards/raykv.json without Grafana: a real Prometheus answers its queries, matplotlib draws the answers.

    .venv/bin/python scripts/board.py ask /usr/bin/prometheus answers.json [--seconds 240]
    python scripts/board.py draw answers.json docs/dashboards/raykv.svg    # where matplotlib is

The first runs the store and the load of scripts/pictures.py, and Prometheus beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

BOARD = Path(__file__).resolve().parents[1] / "docs/dashboards/raykv.json"
SCRAPE_S, STEP_S = 5, 5
#: What Grafana puts into the queries: all stores and nodes, and four times the interval in which Ray reports.
VARIABLES = {"$store": ".*", "$node": ".*", "$__rate_interval": "40s"}
SHORT_DIGITS = 8


def ask(prometheus: str, output: str, seconds: float) -> None:
    """Run the load and Prometheus, and write what it answers to each query of the board."""
    import ray
    from pictures import demo

    with demo() as it, tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
        jobs = [{"job_name": "ray", "static_configs": [{"targets": targets}]}]
        config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}
        Path(folder, "config.yml").write_text(json.dumps(config))  # JSON is YAML, too.
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        files = [f"--config.file={folder}/config.yml", f"--storage.tsdb.path={folder}/data"]
        with subprocess.Popen(
            [prometheus, *files, f"--web.listen-address={where}"], stderr=subprocess.DEVNULL
        ) as server:
            try:
                begin_s = time.time()
                time.sleep(10)
                for query in queries():  # One that it refuses is known at once.
                    answer(where, query, begin_s, time.time())
                time.sleep(seconds - 70)
                it.store.drain(it.store.node_ids()[0], 1.0)  # Something to see for the panel of nodes.
                time.sleep(60)
                answers = [answer(where, query, begin_s, time.time()) for query in queries()]
            finally:
                server.terminate()
    Path(output).write_text(json.dumps(answers))
    for each in answers:
        print(f"{len(each['result']):3} series: {each['title']}: {each['query']}")


def queries() -> list[dict[str, str]]:
    """Return the title, the legend and the query of each target of the board, as Grafana would ask."""
    found = []
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            unit = panel["fieldConfig"]["defaults"].get("unit", "")
            found.append({"title": panel["title"], "legend": target["legendFormat"], "query": query, "unit": unit})
    return found


def answer(where: str, asked: dict[str, str], begin_s: float, end_s: float) -> dict[str, Any]:
    """Ask Prometheus over its HTTP API."""
    options = {"query": asked["query"], "start": begin_s, "end": end_s, "step": STEP_S}
    url = f"http://{where}/api/v1/query_range?{urllib.parse.urlencode(options)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as said:
            return {**asked, "result": json.load(said)["data"]["result"]}
    except urllib.error.HTTPError as error:
        raise SystemExit(f"Prometheus refuses {asked['query']}: {error.read()!r}") from error


def draw(answers: str, output: str) -> None:
    """Draw a panel for each title."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "raykv", "font.size": 7, "axes.titlesize": 8, "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    asked = json.loads(Path(answers).read_text())
    titles = list(dict.fromkeys(each["title"] for each in asked))
    began_s = min(float(series["values"][0][0]) for each in asked for series in each["result"])
    figure, axes = plt.subplots(-(-len(titles) // 3), 3, figsize=(15, 2.1 * -(-len(titles) // 3)), layout="constrained")
    for axis, title in zip(axes.flat, titles, strict=False):
        units = {each["unit"] for each in asked if each["title"] == title}
        axis.set_title(f"{title} ({', '.join(filter(None, units))})" if any(units) else title, loc="left")
        for each in (each for each in asked if each["title"] == title):
            for series in each["result"]:
                tags = {
                    name: value[:SHORT_DIGITS] if name == "node" else value for name, value in series["metric"].items()
                }
                legend = re.sub(r"{{(\w+)}}", lambda tag, tags=tags: tags.get(tag[1], ""), each["legend"])
                times, values = zip(
                    *((float(at) - began_s, float(value)) for at, value in series["values"]), strict=True
                )
                axis.plot(times, values, label=legend, linewidth=1)
        if axis.lines:
            axis.legend(loc="upper left", fontsize=6, framealpha=0.6)
        else:
            axis.text(0.5, 0.5, "nothing happened", ha="center", va="center", transform=axis.transAxes, color="gray")
        axis.set_xlabel("s")
        axis.margins(y=0.2)
    for axis in axes.flat[len(titles) :]:
        axis.set_visible(False)
    figure.savefig(output, metadata={"Date": None})
    text = Path(output).read_text()
    Path(output).write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def main() -> None:
    """Ask, or draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=["ask", "draw"])
    parser.add_argument("source", help="the program Prometheus, or the answers")
    parser.add_argument("output")
    parser.add_argument("--seconds", type=float, default=240.0)
    given = parser.parse_args()
    if given.verb == "draw":
        draw(given.source, given.output)
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        ask(given.source, given.output, given.seconds)


if __name__ == "__main__":
    main()
