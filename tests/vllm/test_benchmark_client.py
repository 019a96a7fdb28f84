"""The benchmark's client, against a server made by hand that says exactly what comes and when."""

from __future__ import annotations

import contextlib
import importlib
import json
import socketserver
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/vllm"
TOKEN = b'data: {"choices": [{"text": "t5"}]}\n\n'
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 512}}}\n\n'


@pytest.fixture(scope="module")
def client() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("client")
    for name in ("client", "workload"):
        sys.modules.pop(name, None)


@contextlib.contextmanager
def serving(
    *pieces: bytes, status: bytes = b"200 OK", whole: bool = True
) -> Iterator[tuple[str, list[object]]]:
    """A server that answers every request with `pieces`, chunked; without `whole`, the end never comes."""
    asked: list[object] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            nbytes = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    nbytes = int(line.split(b":")[1])
            asked.append(json.loads(self.rfile.read(nbytes)))
            self.wfile.write(b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in pieces:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            if whole:
                self.wfile.write(b"0\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def ask(client: ModuleType, url: str) -> object:
    [answer] = client.ask_in_turn(url, "m", [client.Prompt([3, 4], 2)])
    return answer


def test_an_answer_is_its_tokens_and_what_the_server_had_cached(client: ModuleType) -> None:
    with serving(TOKEN, TOKEN, TOKEN, USAGE, DONE) as (url, asked):
        answer = ask(client, url)
    assert (answer.error, answer.cached_tokens, len(answer.itl_s)) == ("", 512, 2)
    assert 0 < answer.ttft_s <= answer.end_s
    assert [(body["prompt"], body["max_tokens"], body["stream"]) for body in asked] == [([3, 4], 2, True)]


def test_a_stream_without_a_token_is_an_error(client: ModuleType) -> None:
    with serving(USAGE, DONE) as (url, _):
        assert ask(client, url).error


def test_a_refusal_is_an_error_that_says_so(client: ModuleType) -> None:
    with serving(b"too long", status=b"400 Bad Request") as (url, _):
        assert ask(client, url).error == "400: too long"


def test_a_stream_that_breaks_off_is_an_error(client: ModuleType) -> None:
    with serving(TOKEN, TOKEN, whole=False) as (url, _):
        assert ask(client, url).error


def test_a_server_that_is_gone_is_an_error(client: ModuleType) -> None:
    with serving() as (url, _):
        pass
    assert ask(client, url).error


def test_an_error_told_after_the_first_token_is_an_error(client: ModuleType) -> None:
    with serving(TOKEN, b'data: {"error": {"message": "engine died"}}\n\n', DONE) as (url, _):
        assert "engine died" in ask(client, url).error


@pytest.mark.parametrize("line", [b": ping\n\n", b"event: token\n", b"retry: 10\n\n"])
def test_lines_of_a_stream_that_carry_no_data_are_passed_over(client: ModuleType, line: bytes) -> None:
    with serving(line, TOKEN, line, TOKEN, DONE) as (url, _):
        answer = ask(client, url)
    assert (answer.error, len(answer.itl_s)) == ("", 1)


def answers(client: ModuleType, *times: tuple[float, float]) -> Sequence[object]:
    return [client.Answer(ttft_s=ttft, end_s=end, itl_s=[end - ttft], cached_tokens=8) for ttft, end in times]


def test_figures_are_of_the_answered_requests_alone(client: ModuleType) -> None:
    good = answers(client, (1.0, 2.0), (3.0, 4.0))
    row = client.figures([*good, client.Answer(ttft_s=99.0, error="gone")], [0.0, 1.0, 2.0])
    assert (row.num_requests, row.errors, row.ttft_s, row.ttft_p99_s) == (3, 1, 2.0, 3.0)
    assert row.cached_tokens == 8
    assert row.requests_per_s == 2 / 5.0  # two answers, until the second one's end


def test_figures_of_nothing_say_what_came_instead(client: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="gone"):
        client.figures([client.Answer(error="gone")], [0.0])


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (50, 50), (50.5, 51), (99, 99), (100, 100)])
def test_a_percentile_is_the_smallest_value_that_so_many_are_not_above(
    client: ModuleType, percent: float, value: int
) -> None:
    assert client.percentile(list(range(100, 0, -1)), percent) == value


def test_the_percentile_of_one_value_is_that_value(client: ModuleType) -> None:
    assert client.percentile([7.0], 99) == client.percentile([7.0], 50) == 7.0
