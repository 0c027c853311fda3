"""The command line: chunkserve serve | doctor | bench | top."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .bench import BenchError, BenchResult, BenchSettings, run_bench
from .config import DEFAULT_FILE, ConfigError
from .doctor import examine, rendered
from .launcher import assigned_knobs, run_blocking
from .small_model import SmallModelError
from .top import TopError, fetch, frame, watch

app = typer.Typer(
    help="LLM serving for requests that begin alike.", no_args_is_help=True, pretty_exceptions_show_locals=False
)
_err = Console(stderr=True)


def main() -> None:
    app()


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="Serve config file; see deploy/config.yaml.")] = DEFAULT_FILE,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Port to listen on.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder, or the small model's name.")] = None,
    num_replicas: Annotated[int | None, typer.Option(help="Copies of the model.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="Any other knob of the file; repeatable.")
    ] = None,
    until_stdin_closes: Annotated[
        bool, typer.Option("--until-stdin-closes", help="Stop when standard input ends, as it does when a parent dies.")
    ] = False,
) -> None:
    """Serve a model over HTTP until interrupted. Options replace values of the file."""
    overrides = {"host": host, "port": port, "model": model, "num_replicas": num_replicas}
    try:
        overrides = {name: value for name, value in overrides.items() if value is not None} | assigned_knobs(set_ or [])
        status = run_blocking(config, overrides, typer.echo, until_stdin_closes=until_stdin_closes)
    except (ConfigError, SmallModelError) as error:
        raise _refusal(str(error)) from None
    raise typer.Exit(status)


@app.command()
def doctor(json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine has, and which attention backends work on it and why others do not."""
    report = examine()
    if json_:
        typer.echo(json.dumps(report, indent=2))
    else:
        Console().print(rendered(report))


@app.command()
def bench(
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name; by default the server's first.")] = None,
    endpoint: Annotated[
        Literal["chat", "completions", "token-ids"], typer.Option(help="token-ids: /v1/completions with exact counts.")
    ] = "chat",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    rate: Annotated[
        float | None, typer.Option(min=1e-3, help="Arrivals per second (Poisson), in place of --concurrency.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Measured requests.")] = 64,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Tokens that begin every prompt.")] = 1024,
    own_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt's own.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Generate --new-tokens whatever the model says.")] = True,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the measured ones; 0 is a cold start.")] = 1,
    share: Annotated[bool, typer.Option(help="--no-share gives each request a cache_salt of its own.")] = True,
    seed: Annotated[int, typer.Option(help="Chooses the words; seeds share nothing.")] = 0,
    api_key: Annotated[str | None, typer.Option(help="Bearer token.")] = None,
    label: Annotated[str, typer.Option(help="`system` in the JSON row.")] = "chunkserve",
    json_: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write one flat row.")] = None,
) -> None:
    """Load a server with requests that begin alike, and measure throughput and latency."""
    settings = BenchSettings(
        url=url,
        model=model,
        api_key=api_key,
        endpoint=endpoint,
        concurrency=concurrency,
        rate_rps=rate,
        num_requests=num_requests,
        shared_tokens=shared_tokens,
        own_tokens=own_tokens,
        new_tokens=new_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        warmup=warmup,
        share=share,
        seed=seed,
        label=label,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=_err) as progress:
            task = progress.add_task("requests", total=num_requests)
            result = asyncio.run(run_bench(settings, lambda: progress.advance(task)))
    except BenchError as error:
        raise _refusal(str(error)) from None
    Console().print(_bench_table(result))
    if json_ is not None:
        json_.write_text(json.dumps([result.row()], indent=2) + "\n")
    for message, count in result.errors.most_common(10):
        _err.print(f"{count} x {message}", style="red", markup=False)
    if result.errors:
        raise typer.Exit(1)


@app.command()
def top(
    url: Annotated[str, typer.Option(help="Base URL of a chunkserve server.")] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    period: Annotated[float, typer.Option(min=0.1, help="Seconds between frames.")] = 1.0,
) -> None:
    """Show what each replica does: load, backlog, KV memory, hit rate, and the prefixes that most sequences share."""
    try:
        if once:
            Console().print(frame(fetch(url)))
        else:
            watch(url, Console(), period)
    except TopError as error:
        raise _refusal(str(error)) from None
    except KeyboardInterrupt:
        return


def _bench_table(result: BenchResult) -> Table:
    row = result.row()
    load = f"concurrency {row['concurrency']}" if row["rate_rps"] is None else f"{row['rate_rps']:g} requests/s"
    title = f"{result.model}, {load}\n{len(result.samples)} answers, {row['errors']} errors, {row['wall_s']:.1f} s"
    table = Table("", "mean", "p50", "p90", "p99", title=Text(title), title_justify="left")
    table.add_row("output tokens/s", _figure(row["output_tokens_per_s"]))
    table.add_row("requests/s", _figure(row["requests_per_s"]))
    for name, text in (("ttft", "time to first token, ms"), ("tpot", "time per token, ms"), ("latency", "latency, ms")):
        table.add_row(text, "", *(_figure(row[f"{name}_ms_p{percent}"]) for percent in (50, 90, 99)))
    table.add_row("prompt tokens", _figure(row["prompt_tokens_mean"]))
    table.add_row("new tokens", _figure(row["completion_tokens_mean"]))
    share = row["cached_share"]
    table.add_row("prompt tokens cached", "-" if share is None else f"{share:.1%}")
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _refusal(message: str) -> typer.Exit:
    _err.print(message, style="red", markup=False, highlight=False)
    return typer.Exit(2)


if __name__ == "__main__":
    main()
