"""Keys of agents' sessions: random, and with a form by which output can be searched for them.

gateway, front --new_session_key--> agent --prints it--> hide_session_keys --> the run's output
"""

import re
import secrets

PREFIX = "session-key-"
KEY = re.compile(PREFIX + r"[A-Za-z0-9_-]{43}")  # 256 bits in base64


def new_session_key() -> str:
    """Return a key with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hide_session_keys(text: str) -> str:
    """Replace keys in `text`, which an agent may print with its environment or in an error."""
    return KEY.sub(PREFIX + "...", text)
