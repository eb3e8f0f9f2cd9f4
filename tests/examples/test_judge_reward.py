"""Tests examples/judge_reward.py against a small server in this process: requests, retries, limits, cache, a run."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import train_grpo
from examples import judge_reward
from rlhf.checkpoints.run_record import RunRecord
from rlhf.data.prompts import Prompt
from rlhf.data.row import Example
from rlhf.rewards.rewards import Rewards
from rlhf.utils import system
from rlhf.utils.errors import RunError
from tests.documents import ROOT

KEY = "sk-secret-7261"


def reply(*scores: object) -> tuple[int, str]:
    """Return the status and the body of a reply with these scores."""
    return of_text(json.dumps({"scores": scores}))


def of_text(content: object) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


class Server(ThreadingHTTPServer):
    """Answers with `answer(body)`, a status and a text. Stores the requests: path, headers, body."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.requests: list[tuple[str, dict, dict]] = []
        self.times: list[float] = []
        self.answer = lambda body: reply(7)
        self.lock = threading.Lock()
        self.running = self.most = 0

    def in_turn(self, *answers: tuple[int, str]) -> None:
        """Give these answers, one per request; then the last one."""
        left = list(answers)
        self.answer = lambda body: left.pop(0) if len(left) > 1 else left[0]

    @property
    def bodies(self) -> list[dict]:
        return [body for _, _, body in self.requests]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append((self.path, dict(self.headers), body))
            server.times.append(time.monotonic())
            server.running += 1
            server.most = max(server.most, server.running)
        status, text = server.answer(body)
        with server.lock:
            server.running -= 1
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass  # prints each request otherwise


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Return a server that is the judge's, with a new cache and short waits."""
    found = Server()
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    settings = {"URL": found.url, "MODEL": "small", "CACHE": str(tmp_path / "cache.sqlite"), "BACKOFF_S": 0.01}
    for name, value in settings.items():
        monkeypatch.setattr(judge_reward, name, value)
    monkeypatch.setattr(judge_reward, "accepted", 0)
    monkeypatch.delenv(judge_reward.API_KEY, raising=False)
    yield found
    found.shutdown()
    found.server_close()


def judge(*completions: object, prompts: list | None = None, group: list | None = None):
    """Return the scores of completions of one prompt, and the logged metrics."""
    metrics = {}
    given = {"prompts": prompts or ["2 + 2?"] * len(completions), "completions": list(completions)}
    function = judge_reward.judge if group is None else judge_reward.ruler
    scores = asyncio.run(function(**given, group=group, log_metric=metrics.__setitem__, ended=None))
    return scores, metrics


def content(body: dict) -> str:
    (message,) = body["messages"]
    assert message["role"] == "user"
    return message["content"]


# --- one request -----------------------------------------------------------------------------------------------------


def test_the_request_and_the_score(server):
    assert judge("It is 4.") == ([0.7], {"judge_no_score": 0})
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions" and "Authorization" not in headers
    assert (body["model"], body["temperature"], body["seed"]) == ("small", 0, 0)
    assert all(part in content(body) for part in (judge_reward.RUBRIC, "2 + 2?", "It is 4."))
    schema = body["response_format"]["json_schema"]["schema"]
    scores = schema["properties"]["scores"]
    assert (scores["minItems"], scores["maxItems"], scores["items"]["enum"]) == (1, 1, list(range(11)))


def test_chats_and_texts_with_braces(server):
    prompt = [{"role": "system", "content": "Be {kind}."}, {"role": "user", "content": "Hi"}]
    judge([{"role": "assistant", "content": "{Hello}"}], prompts=[prompt])
    (body,) = server.bodies
    assert all(part in content(body) for part in ("system: Be {kind}.", "user: Hi", "assistant: {Hello}"))


def test_thoughts_and_a_fence_around_the_json(server):
    server.answer = lambda body: of_text('<think>{"scores": [1]}?</think>\n```json\n{"scores": [2.5]}\n```')
    assert judge("4")[0] == [0.25]


@pytest.mark.parametrize("refusal", [(422, "no such format"), (400, ""), (500, "in 'body', 'response_format'")])
def test_the_format_of_the_reply_is_the_strictest_that_the_server_accepts(server, refusal):
    """llama-cpp-python refuses OpenAI's form, with status 500; other servers know none. Each is tried once."""

    def answer(body):
        return reply(3) if body.get("response_format", {}).get("type") in known else refusal

    known = ["json_object"]
    server.answer = answer
    assert judge("4")[0] == [0.3]
    assert judge("5")[0] == [0.3]
    kinds = [body.get("response_format", {}).get("type") for body in server.bodies]
    assert kinds == ["json_schema", "json_object", "json_object"]
    assert server.bodies[1]["response_format"]["schema"]["required"] == ["scores"]
    known[:] = [None]
    assert judge("6")[0] == [0.3]
    assert "response_format" not in server.bodies[-1]


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failed", [(500, "broken"), (429, "slow down"), of_text("I like it"), (200, "<html>")])
def test_it_tries_again_after_longer_waits(server, monkeypatch, failed):
    monkeypatch.setattr(judge_reward, "BACKOFF_S", 0.05)
    server.in_turn(failed, failed, reply(9))
    assert judge("4") == ([0.9], {"judge_no_score": 0})
    first, second = (after - before for before, after in zip(server.times, server.times[1:], strict=False))
    assert first >= 0.05 and second >= 0.1
    assert [body["seed"] for body in server.bodies] == [0, 1, 2], "an equal request would get an equal reply"
    assert {body["response_format"]["type"] for body in server.bodies} == {"json_schema"}


NOT_SCORES = [
    *("good", "", None, "[7]", '{"score": 7}', '{"scores": 7}', '{"scores": [7}', '{"scores": []}'),
    *('{"scores": [7, 8]}', '{"scores": [11]}', '{"scores": [-1]}', '{"scores": ["7"]}', '{"scores": [true]}'),
    *('{"scores": [NaN]}', '{"scores": [null]}'),
]


@pytest.mark.parametrize("text", NOT_SCORES)
def test_a_reply_without_scores_gives_none_which_is_counted_and_not_stored(server, text):
    server.answer = lambda body: of_text(text) if "worse" in content(body) else reply(6)
    for _ in range(2):
        assert judge("better", "worse", "best") == ([0.6, None, 0.6], {"judge_no_score": 1})
    assert len(server.requests) == 2 + 2 * judge_reward.ATTEMPTS


def test_a_judge_that_never_gives_scores_ends_the_run(server, user_error):
    server.answer = lambda body: of_text("What a nice answer")
    with user_error("What a nice answer", server.url, "small", kind=RunError):
        judge("a", "b")


def test_a_server_that_is_away_ends_the_run_with_one_line(server, user_error):
    """It is called as a run calls it."""
    server.shutdown()
    server.server_close()
    row = Prompt((1,), Example(({"role": "user", "content": "2 + 2?"},)))
    with user_error(server.url, "ConnectionError", "JUDGE_URL", kind=RunError) as error:
        Rewards([judge_reward.judge], None, None, 20.0).score([row] * 2, ["4", "5"], [[5], [6]], [True, True])
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("status", "calls"), [(500, 4), (401, 1), (404, 1), (400, 3)])
def test_a_refusal_ends_the_run_and_is_not_repeated(server, user_error, status, calls):
    """400 may be the format of the reply, of which there are three."""
    server.answer = lambda body: (status, "no such\nmodel")
    with user_error(status, "no such", "small", "JUDGE_MODEL", kind=RunError) as error:
        judge("4")
    assert len(server.requests) == calls and len(str(error.value).splitlines()) == 1


def test_an_error_cancels_the_calls_that_wait(server, monkeypatch, user_error):
    monkeypatch.setattr(judge_reward, "CALLS_AT_ONCE", 2)
    server.answer = lambda body: (401, "no key")
    with user_error(401, kind=RunError):
        judge(*map(str, range(40)))
    assert len(server.requests) < 20


def test_calls_at_once_are_limited(server, monkeypatch):
    monkeypatch.setattr(judge_reward, "CALLS_AT_ONCE", 3)
    server.answer = lambda body: time.sleep(0.1) or reply(5)
    assert judge(*map(str, range(12)))[0] == [0.5] * 12
    assert len(server.requests) == 12 and server.most == 3


# --- groups ----------------------------------------------------------------------------------------------------------


def test_one_call_scores_a_group(server):
    """Longer answers are better for this judge. Groups need not be neighbours."""

    def answer(body):
        assert body["response_format"]["json_schema"]["schema"]["properties"]["scores"]["minItems"] == 2
        answers = content(body).split("<answer ")[1:]
        return reply(*(part.count("x") for part in answers))

    server.answer = answer
    scores, metrics = judge("x", "xxx", "xx", "xxxx", prompts=["p", "q", "p", "q"], group=[4, 9, 4, 9])
    assert scores == [0.1, 0.3, 0.2, 0.4] and metrics == {"judge_no_score": 0}
    assert len(server.requests) == 2
    assert sorted("\nq\n" in content(body) for body in server.bodies) == [False, True]


def test_a_group_without_the_right_number_of_scores_has_none(server):
    server.answer = lambda body: reply(1, 2) if "zebra" not in content(body) else reply(1)
    scores, metrics = judge("a", "b", "zebra", "c", group=[0, 0, 1, 1])
    assert scores == [0.1, 0.2, None, None] and metrics == {"judge_no_score": 2}


# --- the cache -------------------------------------------------------------------------------------------------------


def test_what_was_scored_is_not_requested_again(server, monkeypatch):
    assert judge("4", "5", "4")[0] == [0.7] * 3
    assert len(server.requests) == 2, "equal completions share a call"
    assert judge("5", "4")[0] == [0.7] * 2
    assert len(server.requests) == 2
    server.answer = lambda body: reply(1)
    changes = {"MODEL": "large", "RUBRIC": "A good answer is short.", "MAX_TOKENS": 100, "HIGHEST": 5}
    for name, value in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(judge_reward, name, value)
            assert judge("4")[0] == [1 / judge_reward.HIGHEST], name
    assert judge("4", prompts=["3 + 1?"])[0] == [0.1]
    assert len(server.requests) == 2 + len(changes) + 1
    assert judge("4")[0] == [0.7]


def test_without_a_cache_nothing_is_stored(server, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(judge_reward, "CACHE", "")
    assert judge("4")[0] == judge("4")[0] == [0.7]
    assert len(server.requests) == 2 and list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_used_is_one_line(server, monkeypatch, tmp_path, user_error):
    file = tmp_path / "not_a_cache"
    file.write_text("a text, long enough to be no database " * 100)
    monkeypatch.setattr(judge_reward, "CACHE", str(file))
    with user_error(file, "JUDGE_CACHE", kind=RunError):
        judge("4")


WRITER = """
import itertools, sys, time
from examples import judge_reward
for i in itertools.count():
    judge_reward.in_cache("INSERT OR REPLACE INTO judge VALUES (?, ?)", f"{sys.argv[1]} {i % 50}", "[0.5]")
    time.sleep(0.005)  # a waiting process gets its turn
    if i == 20:
        print("ready", flush=True)
"""


@pytest.mark.skipif(system.WINDOWS, reason="Windows has no SIGKILL")
def test_the_cache_survives_kills_of_several_processes_that_write(server):
    env = {"JUDGE_CACHE": judge_reward.CACHE, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITER]
    processes = [subprocess.Popen([*command, str(i)], env=env, stdout=subprocess.PIPE) for i in range(3)]
    try:
        for process in processes:
            assert process.stdout.readline() == b"ready\n"
    finally:
        for process in processes:
            process.kill()
    assert [process.wait() for process in processes] == [-signal.SIGKILL] * 3
    with closing(sqlite3.connect(judge_reward.CACHE)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert database.execute("SELECT count(*) FROM judge WHERE scores = '[0.5]'").fetchone()[0] >= 60
    assert judge("4")[0] == [0.7]


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def flags(server, run_flags, monkeypatch, tmp_path):
    """Return a function that makes the flags of a tiny run with the judge, loaded anew with its variables."""
    variables = {"JUDGE_URL": server.url, "JUDGE_MODEL": "small", "JUDGE_CACHE": judge_reward.CACHE, "NO_PROXY": "*"}
    for name, value in (variables | {judge_reward.API_KEY: KEY}).items():
        monkeypatch.setenv(name, value)
    file = shutil.copy(ROOT / "examples" / "judge_reward.py", tmp_path)
    return lambda name, *more: run_flags("--rm-model", "none", "--reward-func", f"{file}:{name}", "--K", 2, *more)


@pytest.mark.parametrize("name", ["judge", "ruler"])
def test_a_run(server, flags, tmp_path, name):
    """The score is the number of different letters of the completions; an evaluation has groups of one."""

    def answer(body):
        answers = content(body).split("<answer ")[1:]
        return reply(*(len({*part}) % 11 for part in answers))

    server.answer = answer
    train_grpo.main(flags(name))
    assert RunRecord.read(tmp_path / "run").status == "finished"
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    counts = [row["rewards/logged/judge_no_score"] for row in logged if "rewards/logged/judge_no_score" in row]
    assert counts == [0, 0], "one per update"
    sizes = {
        body["response_format"]["json_schema"]["schema"]["properties"]["scores"]["minItems"] for body in server.bodies
    }
    assert sizes == {1} if name == "judge" else sizes >= {1, 2}
    assert {headers["Authorization"] for _, headers, _ in server.requests} == {f"Bearer {KEY}"}
    stored = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert stored == []


def test_a_server_that_goes_away_ends_the_run(server, flags, tmp_path, monkeypatch, user_error):
    """The evaluation at the start and the first update have scores, the second update has none."""
    calls = iter(range(10**6))
    first = 6 + 8  # evaluation prompts, and completions of an update
    server.answer = lambda body: (
        reply(next(calls) % 11) if len(server.requests) <= first else (401, f"the key {KEY} is wrong")
    )
    with user_error(server.url, "401", kind=RunError):
        train_grpo.main(flags("judge"))
    assert RunRecord.read(tmp_path / "run").status == "failed"
    stored = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert stored == []
