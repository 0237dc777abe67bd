"""`surefoot serve`: an OpenAI- and Anthropic-compatible server on one engine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.profile import measure_missing
from surefoot.cli.report import note
from surefoot.errors import ConfigurationError

if TYPE_CHECKING:
    from surefoot.llm import LLM
    from surefoot.serving.settings import ServeSettings
    from surefoot.serving.state import ServerState

_SERVER, _LIMITS, _CHAT = "Server", "Limits", "Chat"
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    name: Annotated[
        str | None,
        typer.Argument(help="The target, as for --model; the default target without one.", metavar="[MODEL]"),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    quantize: options.Quantize = None,
    trust_remote_code: options.TrustRemoteCode = False,
    drafter: options.Drafter = "auto",
    gamma: options.Gamma = None,
    width: options.Width = "auto",
    cost_table: options.CostTable = "auto",
    guard: options.Guard = True,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile/--no-profile",
            help="Measure a missing cost table before serving.",
            rich_help_panel="Speculation",
        ),
    ] = False,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", min=1, help="Answers that run at once.", rich_help_panel=_LIMITS)
    ] = 16,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on; 0.0.0.0 is every network.", rich_help_panel=_SERVER),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="0 takes a free one.", rich_help_panel=_SERVER)
    ] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            help="Keys that requests must bring, one a line; else those in SUREFOOT_API_KEY, separated by commas.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="What clients call the model.", rich_help_panel=_SERVER)
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            help="A web page's origin that may call; may be given several times.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    open_metrics: Annotated[
        bool,
        typer.Option(
            "--open-metrics", help="/metrics asks for no key, even where there are keys.", rich_help_panel=_SERVER
        ),
    ] = False,
    log_format: Annotated[
        str, typer.Option("--log-format", help="text or json, a line per request.", rich_help_panel=_SERVER)
    ] = "text",
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, help="Answers that may wait; more get 429.", rich_help_panel=_LIMITS)
    ] = 256,
    max_streams: Annotated[
        int, typer.Option("--max-streams", min=1, help="Requests under way at once.", rich_help_panel=_LIMITS)
    ] = 1024,
    max_body_mib: Annotated[
        float, typer.Option("--max-body-mib", min=0.001, help="Largest request body.", rich_help_panel=_LIMITS)
    ] = 8.0,
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", min=1, help="Longest prompt.", rich_help_panel=_LIMITS)
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option("--max-output-tokens", min=1, help="Longest answer.", rich_help_panel=_LIMITS)
    ] = None,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", help="Seconds after which a request ends.", rich_help_panel=_LIMITS)
    ] = 600.0,
    drain: Annotated[
        float,
        typer.Option("--drain", help="Seconds that answers have to end after SIGTERM.", rich_help_panel=_LIMITS),
    ] = 30.0,
    chat_template_kwargs: options.TemplateArguments = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            "--tool-parser",
            help="How the model writes tool calls: auto, none, hermes, llama3, pythonic, mistral, deepseek.",
            rich_help_panel=_CHAT,
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option("--reasoning-parser", help="How it writes reasoning: auto, none, think.", rich_help_panel=_CHAT),
    ] = "auto",
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas",
            min=1,
            help="Engines behind this address, each with its share of the threads; needs the extra ray.",
            rich_help_panel=_SERVER,
        ),
    ] = 1,
    trace: options.Trace = None,
) -> None:
    """Serve a model over HTTP: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /metrics and a live page.

    Listens on this machine only, unless --host says otherwise. Ctrl-C or SIGTERM lets answers end first.
    """
    require_extra()
    from surefoot.serving.settings import ServeSettings, read_api_keys

    settings = ServeSettings(
        host=host,
        port=port,
        api_keys=read_api_keys(api_key_file),
        served_model_name=served_model_name,
        max_body_bytes=round(max_body_mib * 2**20),
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
        max_queue=max_queue,
        max_streams=max_streams,
        request_timeout_s=request_timeout,
        drain_s=drain,
        cors_origins=tuple(cors_origin or ()),
        chat_template_kwargs=options.parse_template_arguments(chat_template_kwargs) or {},
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        metrics_need_key=not open_metrics,
        log_format=log_format,
    )
    if name is not None and model != options.DEFAULT_MODEL:
        raise ConfigurationError(f"the model is given twice, as {name} and --model {model}: give one")
    if replicas > 1:
        if profile or trace is not None:
            raise ConfigurationError(
                "--profile and --trace are for one engine: measure first with 'surefoot profile --threads N' "
                "(N: a replica's share)"
            )
        engine = {
            "model": name or model,
            "drafter": drafter,
            "gamma": gamma,
            "width": options.parse_width(width),
            "cost_table": cost_table,
            "guard": guard,
            "device": device,
            "dtype": dtype,
            "quantize": quantize,
            "trust_remote_code": trust_remote_code,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
        }
        raise typer.Exit(_run_replicas(engine, settings, replicas, threads, port))
    from surefoot.serving import runner

    listener = runner.bind(settings)
    try:
        llm = options.load_llm(
            name or model,
            drafter=drafter,
            gamma=gamma,
            width=width,
            cost_table=cost_table,
            guard=guard,
            device=device,
            dtype=dtype,
            threads=threads,
            quantize=quantize,
            trust_remote_code=trust_remote_code,
            max_num_seqs=max_num_seqs,
            trace=trace,
            max_model_len=max_model_len,
        )
        try:
            if profile:
                measure_missing(llm, cost_table)
            raise typer.Exit(_run(llm, settings, listener))
        finally:
            llm.close()
    finally:
        listener.close()


def _run_replicas(
    engine: dict[str, Any], settings: ServeSettings, replicas: int, threads: int | None, port: int
) -> int:
    from surefoot.machine import physical_cores
    from surefoot.serving import replicas as ray_replicas

    ray_replicas.require_ray()
    if port == 0:
        raise ConfigurationError("port is 0; with --replicas give the port")
    share = threads or max(1, physical_cores() // replicas)
    return ray_replicas.run({**engine, "threads": share}, settings, replicas, share, note)


def _run(llm: LLM, settings: ServeSettings, listener: socket) -> int:
    from surefoot.serving.middleware import log_to_stderr
    from surefoot.serving.runner import run, url_of
    from surefoot.serving.start_report import start_report

    log_to_stderr()

    def ready(state: ServerState) -> None:
        for line in start_report(llm, state, url_of(listener)):
            note(line)

    return run(llm, settings, listener, ready)


def require_extra() -> None:
    """Raise `ConfigurationError` unless the extra `serve` is installed."""
    if missing := [module for module in NEEDED if find_spec(module) is None]:
        raise ConfigurationError(
            f'serving needs {", ".join(missing)}, which is not installed: pip install "surefoot[serve]"'
        )
