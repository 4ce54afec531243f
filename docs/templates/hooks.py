"""What MkDocs does with every page beyond Markdown; `hooks` in mkdocs.yml. This folder is not published.

HTML of a page --drawings become part of it, keys and options stay whole--> HTML of a page
"""

import posixpath
import re
from typing import Any

from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

LONGEST_KEY = 40
"""Characters that stay on one line even of a telephone."""
LONGEST_WORD = 64
"""Characters that a table's column is made wide enough for; what is longer, such as a test's name, breaks anywhere."""
INLINE_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>(?P<text>[^<]+)</code>")
DRAWING = re.compile(r'<img [^>]*src="(?P<file>[^":]+\.svg)"[^>]*>')


def on_page_content(html: str, page: Page, files: Files, **_: Any) -> str:
    """The page with drawings that follow the reader's theme, and words of code that no browser breaks."""
    html = INLINE_CODE.sub(_whole, html)
    return DRAWING.sub(lambda found: _inlined(found["file"], page, files), html)


def _whole(code: re.Match[str]) -> str:
    """The code, with words marked that are too long for a line, or that browsers break at a hyphen or a slash."""
    return f"<code>{re.sub(r'[^ ]+', _marked, code['text'])}</code>"


def _marked(word: re.Match[str]) -> str:
    if len(word[0]) > LONGEST_WORD:
        return f'<span class="long">{word[0]}</span>'
    breaks = "-" in word[0] or "/" in word[0]
    return (
        f'<span class="whole">{word[0]}</span>'
        if breaks and len(word[0]) <= LONGEST_KEY
        else word[0]
    )


def _inlined(name: str, page: Page, files: Files) -> str:
    """The drawing itself: as an <img> it would see the system's light or dark, not the switch in the page's header."""
    address = posixpath.normpath(posixpath.join(posixpath.dirname(page.url), name))
    file = next(file for file in files if file.url == address)
    return f'<span class="wide-picture">{file.content_string.strip()}</span>'
