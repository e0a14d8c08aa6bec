"""Shell scripts are read as bash expands them, and nothing in them runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from memo_sim.contract.errors import BadInput
from memo_sim.interchange.shell_script import read_script, shown

SHOW = "show() { printf '<%s>' \"$@\"; echo; }\n"
"""Prints each field of a command in brackets; the reader leaves functions out."""

SCRIPTS = {
    "fields": 'A="x y"; B=z\nshow $A "$A" \'$A\' ${B}1 "${B}2"3',
    "defaults": 'A=\nshow ${A:-one} ${A-two} ${NONE:-"a b"} "${NONE:-a b}" ${B:=three} x${A:+no}x',
    "arrays": 'A=(--x 1 "p q" # note\n  --y)\nA+=(--z "1 2")\nshow ${A[@]} "${A[@]}" ${#A[@]}',
    "text": 'A=" \\\n  --a 1 \\\n  --b \\\n"\nB="$A --c"\nshow $B',
    "comments": '# a comment \\\nA=1 # more "\nshow $A "#no" a#b',
    "sums": "A=4; B=$((A * 2 + 6 / 4))\nshow $B $(($B%5)) $((2 * (3 + 1)))",
    "conditions": 'A=2\nif [ -z "$NONE" ]; then B=1; else B=2; fi\nif [[ $A == "3" ]]; then C=x\nelif [ $A -gt 1 ]'
    " && [[ -n $B ]]; then C=y; else C=z; fi\nshow $B $C",
    "nested": "A=1\nif [ $A = 1 ]; then if [ $A = 2 ]; then B=1; else B=2; fi; fi\nshow $B",
    "escapes": 'show a\\ b "a\\"b" "a\\nb" \\$A "\\$A"',
    "document": "cat <<EOF > /dev/null\nA=1 '\nEOF\nA=2\nshow $A",
    "declared": "export A=1 B='2 3'\nreadonly C=4\nshow $A $B $C",
    "empty": 'A=()\nB=\nshow x ${A[@]} $B "$B" "$@"',
}


def fields(text: str) -> list[str]:
    """Return the fields of the last command that the reader finds."""
    return read_script(text, {}, where="a script").commands[-1][1:]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
def test_fields_are_those_of_bash(name: str) -> None:
    done = subprocess.run(["bash", "-c", SHOW + SCRIPTS[name]], capture_output=True, text=True, check=True, env={})
    assert "".join(f"<{field}>" for field in fields(SHOW + SCRIPTS[name])) == done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", ["stages", "sharded"])
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
def test_exported_scripts_start_what_is_read_of_them(name: str, tmp_path: Path) -> None:
    text = (Path(__file__).parent / f"golden/megatron_lm_{name}.sh").read_text()
    (tmp_path / "torchrun").write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "torchrun").chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, env={"PATH": path})
    assert ["torchrun", *done.stdout.splitlines()] == read_script(text, {}, where="a script").commands[-1]


def test_nothing_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    found = fields(f"A=$(touch {mark}; echo 1)\nB=`touch {mark}`\nshow $A $B ${{C:-$(touch {mark})}} $1")
    assert not mark.exists()
    assert list(map(shown, found)) == ["$(...)", "$(...)", "$(...)", "$1"]


def test_given_values_win() -> None:
    script = read_script("TP=2\nshow $TP $1 ${2:-x}", {"TP": "4", "1": "one"}, where="a script")
    assert script.commands[-1] == ["show", "4", "one", "x"]


def test_what_is_left_out_is_said() -> None:
    text = 'for i in 1 2; do A=$i; done\nwhile true; do break; done\nf() { A=2; }\nif [ -d x ]; then A=3; fi\nshow "$A"'
    script = read_script(text, {}, where="a script")
    assert [shown(word) for word in script.commands[-1]] == ["show", "$A"]
    assert len(script.left_out) == 4
    assert script.undecided == []


def test_a_file_that_is_tested_for_is_taken_to_be_there() -> None:
    script = read_script(
        "if [ -f x ]; then A=1; else A=2; fi\nif [ ! -s y ]; then A=3; fi\nshow $A", {}, where="a script"
    )
    assert script.commands[-1] == ["show", "1"]
    assert [text.partition(":")[0] for text in script.left_out] == ["a condition, -f x", "a condition, -s y"]


@pytest.mark.parametrize("text", ['A="x', "A=(1", "show ${A", "show $(", "A=1\n" + "A=$A$A$A$A\n" * 40])
def test_what_never_ends_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        read_script(text, {}, where="a script")
