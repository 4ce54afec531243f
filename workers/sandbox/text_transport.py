"""Bytes of a command through services that carry text: input by a file, output in base64."""

import base64
import shlex
from collections.abc import Sequence

from workers.sandbox.protocol import CommandResult

MARK = "-- ballast"
# A login shell's profile may print before the mark.
# Output goes to a file first: a process in the background that holds a pipe would hold up the answer.
SCRIPT = (
    "in=$1; longest=$2; shift 2; out=$(mktemp) || exit 1; "
    '"$@" < "$in" > "$out" 2>&1; code=$?; '
    f'echo "{MARK} $code $(wc -c < "$out")"; head -c "$longest" "$out" | base64; '
    'rm -f "$out"; [ "$in" = /dev/null ] || rm -f "$in"'
)
NO_INPUT = "/dev/null"


def encode_command(arguments: Sequence[str], input_file: str, longest: int) -> str:
    """Return a line for a shell. input_file: of the sandbox, which the command removes."""
    return shlex.join(["sh", "-c", SCRIPT, "sh", input_file, str(longest), *arguments])


def decode_result(text: str) -> CommandResult:
    """Read what the line prints. Raises ValueError for anything else."""
    _, mark, answer = text.rpartition(MARK)
    if not mark:
        raise ValueError(f"the command did not end: {text[-200:]!r}")
    header, _, content = answer.partition("\n")
    code, size = header.split()
    output = base64.b64decode(content)
    return CommandResult(output, int(code), int(size) > len(output))
