"""`status` and `top` against small HTTP servers; real ones are in integration/test_cli.py."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from integration.listener import QuietHandler, listening, url_of
from sglang_epd.cli import runs, status
from sglang_epd.cli.checks import Verdict
from sglang_epd.cli.checks.servers import servers
from sglang_epd.cli.main import app
from sglang_epd.cli.probes import ServerView, Target, ask, target
from sglang_epd.cli.processes import free_port
from sglang_epd.cli.status import _since
from sglang_epd.errors import ConfigError

ENCODER = {
    "/health": (200, ""),
    "/v1/status": (
        200,
        json.dumps(
            {
                "encoder": "e1",
                "namespace": "a" * 64,
                "state": "ready",
                "utilisation": 0.25,
                "queue": dict(looking=1, waiting=2, preparing=0, ready=1, running=3, dormant=9),
            }
        ),
    ),
    "/metrics": (
        200,
        'sglang:epd_encoder_lookups_total{source="computed"} 6.0\n'
        'sglang:epd_encoder_lookups_total{source="cached"} 2.0\n',
    ),
}
PREFILL = {
    "/health": (200, ""),
    "/metrics": (
        200,
        'sglang:num_running_reqs{engine_type="prefill",tp_rank="0"} 1.0\n'
        'sglang:num_queue_reqs{engine_type="prefill",tp_rank="0"} 2.0\n'
        'sglang:num_prefill_bootstrap_queue_reqs{engine_type="prefill"} 3.0\n'
        'sglang:epd_dispatch_namespace{namespace="abc"} 1.0\n'
        'sglang:epd_dispatch_items_total{source="kv"} 3.0\n'
        'sglang:epd_dispatch_items_total{source="computed"} 1.0\n'
        'sglang:epd_dispatch_encoders{state="ready"} 2.0\n'
        'sglang:epd_dispatch_encoders{state="open"} 0.0\n',
    ),
}
Serve = Callable[[dict], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that gives these answers to these paths."""
    with ExitStack() as stack:

        def start(answers: dict[str, tuple[int, str]]) -> str:
            class Handler(QuietHandler):
                def do_GET(self) -> None:
                    code, text = answers.get(self.path, (404, ""))
                    self.send_response(code)
                    self.send_header("Content-Length", str(len(text.encode())))
                    self.end_headers()
                    # One who reads no further has hung up.
                    with suppress(BrokenPipeError, ConnectionResetError):
                        self.wfile.write(text.encode())

            return url_of(stack.enter_context(listening(Handler)))

        yield start


def test_each_kind_of_server_is_recognised(serve):
    plain = {"/health": (200, "")}
    urls = [serve(ENCODER), serve(PREFILL), serve(plain), f"http://127.0.0.1:{free_port()}"]
    encoder, prefill, router, nobody = ask([target(url) for url in urls])
    assert (encoder.role, encoder.state, encoder.namespace) == ("encoder", "ready", "a" * 64)
    assert (encoder.queued, encoder.running, encoder.hit_rate) == (4, 3, 0.25)
    assert (prefill.role, prefill.queued, prefill.running) == ("prefill", 5, 1)
    assert (prefill.hit_rate, prefill.namespace) == (0.75, "abc")
    assert prefill.encoders == {"ready": 2}
    assert (router.role, router.state, router.queued) == ("server", "ready", None)
    assert "--enable-metrics" in router.hint
    assert not encoder.hint + prefill.hint + nobody.hint
    assert nobody.state == "unreachable"
    assert nobody.problem


def test_a_server_before_its_first_request_tells_what_it_is(serve):
    lines = PREFILL["/metrics"][1].splitlines(keepends=True)
    young = [line for line in lines if "_reqs" not in line]
    young += ['sglang:cache_config_info{engine_type="prefill"} 1.0\n']
    (view,) = ask([target(serve({**PREFILL, "/metrics": (200, "".join(young))}))])
    assert (view.role, view.namespace, view.running, view.queued) == ("prefill", "abc", None, None)


def test_a_server_that_has_nothing_to_do_makes_no_tokens(serve):
    told = PREFILL["/metrics"][1] + "sglang:gen_throughput 7.0\n"
    idle = told.replace('tp_rank="0"} 1.0', 'tp_rank="0"} 0.0')
    views = ask([target(serve({**PREFILL, "/metrics": (200, text)})) for text in (told, idle)])
    assert [(view.running, view.tokens_per_s) for view in views] == [(1, 7.0), (0, 0.0)]


def test_an_encoder_that_drains_is_draining(serve):
    told = json.loads(ENCODER["/v1/status"][1]) | {"state": "draining"}
    draining = {**ENCODER, "/health": (503, ""), "/v1/status": (200, json.dumps(told))}
    (view,) = ask([target(serve(draining))])
    assert (view.state, view.problem) == ("draining", "")


@pytest.mark.parametrize(
    "changed",
    [
        {"/v1/status": (200, "not json")},
        {"/v1/status": (200, '{"encoder": 1}')},
        {"/v1/status": (200, '{"encoder": 1, "state": "ready", "queue": 3}')},
        {"/metrics": (200, "sglang:epd_encoder_lookups_total{source=")},
    ],
)
def test_answers_that_make_no_sense_are_a_problem_and_no_crash(serve, changed):
    (view,) = ask([target(serve({**ENCODER, **changed}))])
    assert "cannot be understood" in view.problem


def test_towers_that_do_not_work_are_a_problem(serve):
    told = json.loads(ENCODER["/v1/status"][1]) | {"towers": [{"alive": True}, {"alive": False}]}
    url = serve({**ENCODER, "/v1/status": (200, json.dumps(told))})
    (view,) = ask([target(url)])
    assert (view.state, view.problem) == ("ready", "1 of 2 vision towers do not work")
    assert CliRunner().invoke(app, ["status", url]).exit_code == 1
    (found, *_) = servers([target(url)], "")
    assert found.verdict is Verdict.FAIL
    assert "started again by itself" in found.mend


@pytest.mark.parametrize(
    ("states", "told", "verdicts"),
    [
        ({"ready": 2}, "", [Verdict.OK]),
        ({"ready": 1, "misfit": 1}, "", [Verdict.OK, Verdict.WARN]),
        ({"misfit": 1, "open": 1}, "(misfit: 1, open: 1)", [Verdict.FAIL, Verdict.WARN]),
        ({"draining": 1}, "(draining: 1)", [Verdict.FAIL]),
        ({"ready": 0}, "(it knows none)", [Verdict.FAIL]),
    ],
)
def test_a_language_server_that_sees_no_encoder_is_found(serve, states, told, verdicts):
    lines = [f'sglang:epd_dispatch_encoders{{state="{one}"}} {n}.0' for one, n in states.items()]
    head, _, _ = PREFILL["/metrics"][1].partition("sglang:epd_dispatch_encoders")
    url = serve({**PREFILL, "/metrics": (200, head + "\n".join(lines) + "\n")})
    found = [one for one in servers([target(url)], "") if one.subject == url]
    assert [one.verdict for one in found] == verdicts
    shown = CliRunner().invoke(app, ["status", url])
    assert shown.exit_code == (Verdict.FAIL in verdicts)
    assert told in shown.stdout
    assert told in found[0].found


def test_what_a_server_does_not_tell_is_said(serve):
    found = [*servers([target(serve({"/health": (200, "")}))], "")]
    assert [one.verdict for one in found] == [Verdict.OK, Verdict.NOTE]
    assert "--enable-metrics" in found[1].found


def test_a_stranger_cannot_write_to_the_terminal(serve):
    told = json.loads(ENCODER["/v1/status"][1]) | {"namespace": "\x1b]0;owned\x07", "state": "\x1b"}
    (view,) = ask([target(serve({**ENCODER, "/v1/status": (200, json.dumps(told))}))])
    assert view.namespace.isprintable()
    assert view.state == "ready"


def test_an_endless_answer_is_not_read(serve, monkeypatch):
    monkeypatch.setattr("sglang_epd.cli.probes._MAX_BYTES", 100)
    (view,) = ask([target(serve({**ENCODER, "/metrics": (200, "#" * 200_000)}))])
    assert (view.state, "more than 100 bytes" in view.problem) == ("unreachable", True)


@pytest.mark.parametrize("url", ["http://", "ftp://x", "http://user:secret@x", "http://x/y", ""])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError):
        target(url)
    assert target("encoder:30000") == Target("http://encoder:30000")


def test_status_of_urls_as_json_and_its_exit_code(serve):
    shown = CliRunner().invoke(app, ["status", "--json", serve(ENCODER)])
    assert shown.exit_code == 0
    (server,) = json.loads(shown.stdout)["servers"]
    assert (server["role"], server["hit_rate"], server["utilisation"]) == ("encoder", 0.25, 0.25)
    down = f"http://127.0.0.1:{free_port()}"
    shown = CliRunner().invoke(app, ["status", "--json", serve(PREFILL), down])
    assert shown.exit_code == 1
    states = [server["state"] for server in json.loads(shown.stdout)["servers"]]
    assert states == ["ready", "unreachable"]


def test_the_table_of_urls_names_each_server_once_and_says_what_is_missing(serve):
    told = json.loads(ENCODER["/v1/status"][1])
    told["namespace"] = "Qwen2_5_VLForConditionalGeneration/float32/e6d18d874ea69ec8"
    encoder = {**ENCODER, "/v1/status": (200, json.dumps(told))}
    urls = [serve(encoder), serve({"/health": (200, "")})]
    shown = CliRunner().invoke(app, ["status", *urls], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    head, *rows, told = shown.stdout.splitlines()
    assert head.split() == ["role", "state", "queue", "running", "hits", "namespace", "url"]
    assert [row.split()[-1] for row in rows] == urls
    assert rows[0].split()[-2] == "e6d18d874ea6"
    assert told.startswith(f"{urls[1]}: ")
    assert "--enable-metrics" in told


def test_status_finds_the_run_of_up(serve, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    nobody = CliRunner().invoke(app, ["status"])
    assert "by their URLs" in str(nobody.exception)
    told = {"state": "ready", "pid": 7, "restarts": 2}
    servers = [
        {"name": "encoder-0", "role": "encoder", "url": serve(ENCODER), **told},
        {"name": "prefill", "role": "prefill", "url": serve(PREFILL), **told, "state": "down"},
    ]
    run = runs.Run(runs.root())
    run.write(
        {"pid": 1, "started_at": 5.0, "model": "m", "api_url": "http://x", "servers": servers}
    )
    try:
        shown = CliRunner().invoke(app, ["status", "--json"])
        table = CliRunner().invoke(app, ["status"], env={"COLUMNS": "200"})
    finally:
        run.close(keep=False)
    told = json.loads(shown.stdout)
    assert told["run"]["model"] == "m"
    encoder, prefill = told["servers"]
    assert (encoder["name"], encoder["pid"], encoder["restarts"]) == ("encoder-0", 7, 2)
    assert (prefill["state"], prefill["running"]) == ("down", None)
    assert shown.exit_code == table.exit_code == 1
    assert "ready (2 restarts)" in table.stdout


def test_rates_are_of_the_time_between_two_looks():
    old = ServerView("e", "encoder", "u", items=10, hits=5)
    new = ServerView("e", "encoder", "u", items=30, hits=20)
    assert _since(new, (100.0, old), 110.0) == (2.0, 0.75)
    assert _since(old, (100.0, old), 110.0) == (0.0, None)
    # Started again meanwhile, or never seen.
    assert _since(old, (100.0, new), 110.0) == (None, None)
    assert _since(new, None, 110.0) == (None, None)


def test_top_shows_until_it_is_told_to_leave(serve, monkeypatch):
    pauses = []

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        pauses.append(seconds)
        if len(pauses) == 2:
            signal.raise_signal(signal.SIGINT)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr(status, "time", clock)
    # A shell has what it runs in the background ignore Ctrl-C.
    interrupted = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        shown = CliRunner().invoke(
            app, ["top", "--interval", "0.2", serve(ENCODER)], env={"COLUMNS": "120"}
        )
    finally:
        signal.signal(signal.SIGINT, interrupted)
    assert shown.exit_code == 0, shown.output
    assert "items/s" in shown.stdout
    assert "25%" in shown.stdout
