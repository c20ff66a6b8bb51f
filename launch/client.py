"""Ask a server on port 30000 through the `openai` client, streaming, and show its acceptance.

    python launch/client.py "Why is the sky blue?"
    python launch/client.py "Why is the sky blue?" --no-thinking --url http://127.0.0.1:30001

Acceptance is counted over the server, so it is this answer's only if nobody else asks meanwhile.
"""

from __future__ import annotations

import sys
from typing import Any

import openai
import requests

from sglang_dflash.command_help import parser_of
from sglang_dflash.commands.ask import NoReport, ask, full_url, understanding
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.metrics import together


def stream_answer(
    client: openai.OpenAI, question: str, *, thinking: bool, max_tokens: int | None
) -> str:
    """Stream an answer to stdout and return it; reasoning, if any, comes first.

    Without `max_tokens` it may fill the server's context.
    """
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        stream=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
    )
    text = ""
    for chunk in stream:
        if not chunk.choices:
            continue
        delta: Any = chunk.choices[0].delta
        piece = (getattr(delta, "reasoning_content", None) or "") + (delta.content or "")
        text += piece
        print(piece, end="", flush=True)
    print()
    return text


def acceptance(url: str) -> dict[str, Any]:
    """Return the acceptance counters over all replicas. Raise NoReport if there are none."""
    replicas = ask(url).replicas
    with understanding(url):
        return together(replicas)["acceptance"]


def acceptance_or_reason(url: str) -> dict[str, Any] | NoReport:
    """Return the acceptance counters, or why there are none. Raise SystemExit with advice if no
    server can answer. One without acceptance can, and so can a router, which has no
    /server_info."""
    try:
        return acceptance(url)
    except NoReport as error:
        if error.state == "unreachable":
            raise SystemExit(f"No server answers at {url}. Start one, or pass its --url.") from None
        if error.state != "not sglang":
            return error
        if not lists_models(url):
            raise SystemExit(str(error)) from None
        return NoReport(
            error.state,
            f"{url} has no /server_info of SGLang's. If it is a router, pass the --url of one of "
            "its servers.",
        )


def in_words(before: dict[str, Any] | NoReport, after: dict[str, Any] | NoReport) -> str:
    """Return what an answer added to the counters of its server, or why that is not known."""
    if isinstance(before, NoReport):
        return f"no acceptance to show: {before}"
    if isinstance(after, NoReport):
        return f"no acceptance to show: {after}"
    steps = after["verify_steps"] - before["verify_steps"]
    tokens = after["committed_tokens"] - before["committed_tokens"]
    return f"accept length {tokens / max(steps, 1):.2f}: {tokens} tokens in {steps} verify steps"


def lists_models(url: str) -> bool:
    """Return whether a server has the API that OpenAI clients ask first."""
    try:
        return bool(requests.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"])
    except (requests.RequestException, LookupError, TypeError):
        return False


def refusal(url: str, error: openai.APIError) -> str:
    """Return the server's own error message in one line."""
    status = getattr(error, "status_code", None)
    reason = error.body.get("message") if isinstance(error.body, dict) else None
    what = "ended the answer" if status is None else f"refused the request (HTTP {status})"
    return f"{url} {what}: {' '.join((reason or str(error)).split())}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("question", help="what to ask")
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="the server; default: %(default)s"
    )
    parser.add_argument(
        "--no-thinking", action="store_true", help="disable thinking in the chat template"
    )
    parser.add_argument(
        "--max-tokens", type=int, help="limit for the answer; default: the rest of the context"
    )
    options = parser.parse_args()
    url = full_url(options.url)
    before = acceptance_or_reason(url)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    try:
        stream_answer(
            client,
            options.question,
            thinking=not options.no_thinking,
            max_tokens=options.max_tokens,
        )
    except openai.APIError as error:
        raise SystemExit(refusal(url, error)) from None
    print(f"\n{in_words(before, acceptance_or_reason(url))}")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("client", main))
