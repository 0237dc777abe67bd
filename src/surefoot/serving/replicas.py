"""Several engines behind one address, by Ray Serve (extra `ray`): `surefoot serve --replicas N`.

Ray finds, starts, watches and restarts the replicas and carries requests to them; nothing here has a protocol of its own. A
request goes to the shorter of two queues. One that brings `X-Session-Id` goes to the replica that its session had before, where
its prefix is cached, unless that one is full.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from surefoot.errors import ConfigurationError
from surefoot.serving.settings import ServeSettings

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

APPLICATION = "surefoot"
HEALTH_S = 5.0
"""Seconds between two looks at a replica's health; one that has lost its engine is replaced."""


def require_ray() -> None:
    """Raise `ConfigurationError` unless the extra `ray` is installed."""
    if find_spec("ray") is None:
        raise ConfigurationError('--replicas needs ray, which is not installed: pip install "surefoot[ray]"')


class Replica:
    """One engine and its application, in a process of its own.

    Args:
        options: of the `LLM`, its model included.
        metrics_port: the first replica answers Prometheus there, the others on the ports after it; 0: none does, nor where
            metrics ask for a key.
        version: another one has Ray replace the replicas in turn.
    """

    def __init__(self, options: Mapping[str, Any], settings: ServeSettings, metrics_port: int, version: int) -> None:
        from ray import serve

        from surefoot.llm import LLM
        from surefoot.serving.middleware import log_to_stderr

        context = serve.get_replica_context()
        rank = getattr(context.rank, "rank", 0)
        self._settings = replace(settings, replica=f"{rank}")
        closed = bool(settings.api_keys) and settings.metrics_need_key  # these ports know no keys
        self._metrics_port = metrics_port + int(rank) if metrics_port and not closed else 0
        log_to_stderr()
        self.llm = LLM(**options)

    def __serve_build_asgi_app__(self) -> Any:
        from surefoot.async_llm import AsyncLLM
        from surefoot.serving.app import create_app
        from surefoot.serving.metrics import Metrics

        app = create_app(AsyncLLM(self.llm), self._settings)
        if self._metrics_port:
            from prometheus_client import start_http_server

            metrics = next(watcher for watcher in app.state.server.watchers if isinstance(watcher, Metrics))
            start_http_server(self._metrics_port, addr="127.0.0.1", registry=metrics.registry)
        return app

    def check_health(self) -> None:
        """Asked by Ray; raising has the replica replaced."""
        if self.llm.loop.failure is not None:
            raise RuntimeError(f"the engine has failed: {self.llm.loop.failure}")


def application(
    options: Mapping[str, Any],
    settings: ServeSettings,
    replicas: int,
    threads: int,
    metrics_port: int,
    version: int = 0,
) -> Any:
    """The Ray Serve application."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    deployment = serve.deployment(
        name="engine",
        num_replicas=replicas,
        max_ongoing_requests=settings.max_streams,
        health_check_period_s=HEALTH_S,
        graceful_shutdown_timeout_s=settings.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": threads},
        request_router_config=RequestRouterConfig(request_router_class="surefoot.serving.session_router.SessionRouter"),
    )(serve.ingress()(Replica))
    return deployment.bind(dict(options), settings, metrics_port, version)


def build(arguments: Mapping[str, Any]) -> Any:
    """The application for `serve run surefoot.serving.replicas:build` and configuration files (deploy/ray-serve.yaml).

    Args:
        arguments: `replicas`, `threads`, `metrics_port`, `settings` (those of `ServeSettings`), and options of `LLM`.
    """
    given = dict(arguments)
    settings = ServeSettings(**given.pop("settings", {}))
    replicas, threads, metrics_port = (
        int(given.pop(name, default)) for name, default in (("replicas", 1), ("threads", 1), ("metrics_port", 0))
    )
    return application({"threads": threads, **given}, settings, replicas, threads, metrics_port)


def run(
    options: Mapping[str, Any], settings: ServeSettings, replicas: int, threads: int, say: Callable[[str], None]
) -> int:
    """Serve with several replicas on this machine until a signal; SIGHUP restarts them one after the other.

    Returns:
        The exit code.
    """
    # Ray's own ports listen on every address; nobody speaks with them without this cluster's token. Read when ray is imported.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray
    from ray import serve

    leave, renew = threading.Event(), threading.Event()
    metrics_port = settings.port + 1 if settings.port else 0
    before: dict[int, Any] = {}
    try:
        ray.init(
            num_cpus=replicas * threads + 1,
            include_dashboard=False,
            log_to_driver=True,  # the lines of requests
            configure_logging=False,
            _node_ip_address="127.0.0.1",
        )
        serve.start(http_options={"host": settings.host, "port": settings.port})
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        for number, event in ((signal.SIGINT, leave), (signal.SIGTERM, leave), (signal.SIGHUP, renew)):
            before[number] = signal.signal(number, lambda *_, event=event: event.set())  # after Ray has set its own
        version = 0
        while True:
            app = application(options, settings, replicas, threads, metrics_port, version)
            serve.run(app, name=APPLICATION, route_prefix="/", _local_testing_mode=False)
            if not version:
                say(
                    f"replicas  {replicas}, {threads} threads each; sessions by X-Session-Id; SIGHUP restarts them in turn"
                )
                closed = bool(settings.api_keys) and settings.metrics_need_key
                open_at = f"http://127.0.0.1:{metrics_port} and the ports after it, one a replica"
                say(f"metrics   {'not without --open-metrics' if closed else open_at}")
                say(
                    f"serving   {settings.served_model_name or options.get('model')} at http://{settings.host}:{settings.port}"
                )
            while not leave.is_set() and not renew.is_set():
                time.sleep(0.1)
            if leave.is_set():
                break
            renew.clear()
            version += 1
            say("restarting the replicas one after the other")
        say("draining: answers under way may end")
        serve.delete(APPLICATION)
        return 0
    finally:
        serve.shutdown()
        ray.shutdown()
        for restored, handler in before.items():
            signal.signal(restored, handler)
        sys.stderr.flush()
