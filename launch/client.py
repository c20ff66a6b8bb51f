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
from sglang_dflash.commands.ask import full_url
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.metrics import replicas_of, together


def ask(client: openai.OpenAI, question: str, *, thinking: bool, max_tokens: int | None) -> str:
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


def acceptance(url: str) -> dict[str, Any] | None:
    """Return the acceptance counters over all replicas; None without our DFLASH. Raise SystemExit
    with advice if no SGLang server answers."""
    try:
        response = requests.get(f"{url}/server_info", timeout=30)
        response.raise_for_status()
        replicas = replicas_of(response.json())
        return together(replicas)["acceptance"] if replicas else None
    except (requests.HTTPError, requests.JSONDecodeError) as error:
        found = str(error)
    except requests.RequestException:
        raise SystemExit(f"No server answers at {url}. Start one, or pass its --url.") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        found = "its /server_info has another format"
    raise SystemExit(f"{url} is not an SGLang server ({found}). Pass the --url of one.")


def refusal(url: str, error: openai.APIError) -> str:
    """Return the server's own error message in one line."""
    status = getattr(error, "status_code", None)
    reason = error.body.get("message") if isinstance(error.body, dict) else None
    what = "ended the answer" if status is None else f"refused the request (HTTP {status})"
    return f"{url} {what}: {' '.join((reason or str(error)).split())}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--no-thinking", action="store_true")
    parser.add_argument(
        "--max-tokens", type=int, help="limit for the answer; default: the rest of the context"
    )
    options = parser.parse_args()
    url = full_url(options.url)
    before = acceptance(url)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    try:
        ask(
            client,
            options.question,
            thinking=not options.no_thinking,
            max_tokens=options.max_tokens,
        )
    except openai.APIError as error:
        raise SystemExit(refusal(url, error)) from None
    after = acceptance(url)
    if before is None or after is None:
        print("\nnot served by our DFLASH: no acceptance to show")
        return
    steps = after["verify_steps"] - before["verify_steps"]
    tokens = after["committed_tokens"] - before["committed_tokens"]
    print(f"\naccept length {tokens / max(steps, 1):.2f}: {tokens} tokens in {steps} verify steps")


if __name__ == "__main__":
    sys.exit(end_on_interrupt("client", main))
