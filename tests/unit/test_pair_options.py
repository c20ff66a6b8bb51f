"""Options that describe a pair and a card: what no plan can be made with is refused at once."""

from __future__ import annotations

import pytest

from sglang_dflash.__main__ import make_parser

# by option: what is refused, and what the message asks for
REFUSED = {
    "--tp-size": (["0", "-2", "two", "1.5"], "pass 1 or more"),
    "--mem-fraction-static": (["nan", "7", "0", "1", "-0.5", "most"], "between 0 and 1"),
    "--swa-full-tokens-ratio": (["-5", "0", "nan", "inf", "half"], "pass more than 0"),
    "--kv-cache-dtype": (["banana", "nvfp4"], "auto, bf16, bfloat16, fp8_e4m3, fp8_e5m2"),
}
CASES = [(option, text, told) for option, (texts, told) in REFUSED.items() for text in texts]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(list(words))
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.replace("'", "").split())


@pytest.mark.parametrize("command", ["doctor", "serve", "tune"])
@pytest.mark.parametrize(("option", "text", "told"), CASES)
def test_a_value_that_no_plan_can_be_made_with_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, option: str, text: str, told: str
) -> None:
    """A server would refuse it after minutes, or divide by zero."""
    message = refusal(capsys, command, f"{option}={text}")
    assert option in message and text in message and told in message


@pytest.mark.parametrize("text", ["abc", "nan", "0", "-3", "1e308", "1000001"])
def test_a_size_that_no_card_has_is_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    message = refusal(capsys, "doctor", f"--gpu-memory-gb={text}")
    assert f"{text} is not a size: pass more than 0 and at most 1000000 GiB" in message


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["report", "--interval", "soon"], "soon is not a time to wait: pass more than 0 seconds"),
        (["report", "--looks", "-3"], "-3 is not a count: pass 0 or more"),
        (["tune", "--requests", "many"], "many is not a count: pass 1 or more"),
    ],
)
def test_a_word_in_place_of_a_number_is_told_what_to_pass(
    capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    """Not the name of the function that could not read it."""
    assert told in refusal(capsys, *words)


def test_usual_values_pass() -> None:
    asked = ["--tp-size", "2", "--mem-fraction-static", "0.9", "--kv-cache-dtype", "fp8_e4m3"]
    found = make_parser().parse_args(["doctor", *asked, "--swa-full-tokens-ratio", "1.5"])
    assert (found.tp_size, found.mem_fraction_static, found.kv_cache_dtype) == (2, 0.9, "fp8_e4m3")
    assert found.swa_full_tokens_ratio == 1.5


def test_the_help_says_which_size_of_a_card_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """An "80 GB" card leaves less to programs, and so to the plan."""
    with pytest.raises(SystemExit):
        make_parser().parse_args(["doctor", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert 'GiB as the driver reports them (an "80 GB" card has 79.1)' in told
    assert told.endswith("--gpu-memory-gb 79.1")
