"""A tool that runs Python which the policy wrote, in a sandbox made by bubblewrap.

    python(code) --> a sandbox without network and without files of this machine --> what the code printed

Importing this file tries to break out of the sandbox. The import fails if that succeeds, or if bubblewrap is
missing.
"""

from workers.sandbox.bubblewrap import BubblewrapSandbox, find_interpreter
from workers.sandbox.protocol import SandboxLabel, SandboxLimits

__all__ = ["python"]

SECONDS = 5.0
LIMITS = SandboxLimits(
    cpus=1, memory_mib=256, processes=8, command_s=SECONDS, disk_mib=64, output_bytes=2**16
)
LONGEST_CODE = 2**16  # bytes
LABEL = SandboxLabel("examples", "code")
INTERPRETER = find_interpreter()


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program.
    """
    return run(code)


def run(code: str, seconds: float = SECONDS) -> str:
    """Return what a program printed and, unless it ended well, how it ended. Raises SandboxError."""
    program = code.encode(errors="replace")
    if len(program) > LONGEST_CODE:
        return f"[not run: more than {LONGEST_CODE:,} bytes]"
    with BubblewrapSandbox(LIMITS, LABEL, interpreter=INTERPRETER) as sandbox:
        result = sandbox.run([sandbox.python, "-I", "-"], stdin=program, timeout_s=seconds)
    lines = [result.text.rstrip("\n")]
    if result.cut:
        lines.append(f"[cut: printed more than {LIMITS.output_bytes:,} bytes]")
    if result.timed_out:
        lines.append(f"[stopped: took more than {seconds:g} s]")
    elif result.exit_code:
        lines.append(f"[exit code {result.exit_code}]")
    return "\n".join(lines).strip("\n")
