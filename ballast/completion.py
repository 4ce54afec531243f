"""`eval "$(ballast completion)"`: Tab completion of commands, options and settings in bash and zsh."""

from collections.abc import Sequence

SCRIPT = """\
[ -n "$ZSH_VERSION" ] && autoload -U +X bashcompinit && bashcompinit
_ballast() {{
  local words="{commands}"
  [ "$COMP_CWORD" -gt 1 ] && words="{options}"
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
  [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace 2>/dev/null
}}
complete -o default -F _ballast ballast
"""
OPTIONS = (
    "--config",
    "--dry-run",
    "--cluster",
    "--all",
    "--settings",
    "--output",
    "--help",
)


def main(arguments: Sequence[str] | None = None) -> int:
    from ballast.commands import COMMANDS
    from ballast.settings import known_keys
    from controller.config import Config

    settings = (f"{key}=" for key in sorted(known_keys(Config)))
    print(
        SCRIPT.format(commands=" ".join(COMMANDS), options=" ".join([*OPTIONS, *settings])),
        end="",
    )
    return 0
