"""Names from files are made harmless: one function for each place that they are shown in."""

from __future__ import annotations

import json

import pytest

from memo_sim.contract.errors import BadInput
from memo_sim.contract.plain_text import encodable, in_csv, in_markdown, json_text, one_line, printable

BIDI = "".join(map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C]))


@pytest.mark.parametrize("text", ["\x1b[31m", "\x9b31m", "\x00\x07\x08\x7f\r", BIDI, "\u2028\u2029\ufeff", "\udcff"])
def test_what_a_terminal_obeys_is_escaped(text: str) -> None:
    assert one_line(f"a{text}\nb").isprintable()
    assert printable(f"a{text}\n\tb").replace("\n", "").replace("\t", "").isprintable()
    assert one_line(text) == printable(text) == text.encode("unicode_escape").decode()


def test_other_text_stays_as_it_is() -> None:
    for text in ("gpt-7b", "C:\\new", "MÜNCHEN 層 µs ·", "a  b"):
        assert one_line(text) == printable(text) == text
    assert printable("one\n\ttwo") == "one\n\ttwo"
    assert one_line("one\ntwo") == "one\\ntwo"


def test_a_document_is_printed_as_an_equal_document() -> None:
    document = {"name": f"\x1b[31m\x7f\x9b{BIDI}\U000e0041\n層", "n": [1, 2]}
    text = json_text((json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode())
    assert json.loads(text) == document
    assert text.replace("\n", "").isprintable()
    assert "層" in text


def test_markdown_shows_a_name_as_it_is() -> None:
    assert in_markdown("a|b") == r"a\|b"
    assert in_markdown("<img src=x> & co") == "&lt;img src=x&gt; &amp; co"
    assert in_markdown("[x](y) `c` *e* _f_ $m$ ~s~ \\|") == r"\[x\](y) \`c\` \*e\* \_f\_ \$m\$ \~s\~ \\\|"
    assert in_markdown("a\n# b") == r"a\\n# b"
    assert in_markdown("gpu_oom, send_recv 2%") == "gpu_oom, send_recv 2%"


def test_no_cell_of_a_table_is_a_formula() -> None:
    for cell in ("=1+1", "+x", "-x", "@SUM(A1)", "\t=1", "\r=1", "-1+cmd"):
        assert in_csv(cell) == f"'{cell}"
    for cell in ("", "a=b", "5", "-5", "+1.5e-3", "l0.fwd"):
        assert in_csv(cell) == cell


def test_what_an_encoding_lacks_is_escaped() -> None:
    assert encodable("µs \udcff", "ascii") == r"\xb5s \udcff"
    assert encodable("µs \udcff", "utf-8") == r"µs \udcff"
    assert encodable("µs", None) == "µs"


def test_a_message_shows_the_beginning_of_what_is_long() -> None:
    text = str(BadInput("what", got="\x00" * 5000))
    assert len(text) < 1100
    assert text.endswith("... (20,000 characters)")


def test_a_message_keeps_each_part_on_its_line() -> None:
    error = BadInput("a\nb", where="x\nnext: rm", got="\x1b[2J", wanted="\u202e", hint="h\r")
    assert str(error).splitlines() == [
        r"a\nb",
        r"  where: x\nnext: rm",
        r"  got: \x1b[2J",
        r"  wanted: \u202e",
        r"  next: h\r",
    ]
