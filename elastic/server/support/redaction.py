"""Text without secrets: those that are known by their value, and whatever looks like one."""

import json
import re
from collections.abc import Iterable
from urllib.parse import quote

REMOVED = "[removed]"
SHORTEST = 4
"""Characters of a known secret; what is shorter stands everywhere by chance."""
_NAMES = (
    r"(?:pass(?:word|wd|phrase)?|secret|token(?!s)|api[_-]?key|access[_-]?key|private[_-]?key|credential|authorization)"
)
SECRET_NAME = re.compile(_NAMES, re.IGNORECASE)
"""Names under which secrets stand: of environment variables, settings, headers, parameters."""
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REMOVED),
    # Passwords may have a "/" and an "@": up to the last one before the text or the next URL.
    (re.compile(r"(?<=://)(?:(?!://)[^\s\"'<>])*@"), f"{REMOVED}@"),
    # Also blanks and quotes, up to the last "@" of the line; what follows the colon is no port.
    (re.compile(r"(?<=://)[^\s:/@]*:(?!\d+(?:[/?#\s\"'<>]|$))(?:(?!://)[^\r\n])*@"), f"{REMOVED}@"),
    (re.compile(r"(?<![\w/.+-])[\w.+-]+:[^\s:@\"'<>]+@(?=[\w.-]+[:/])"), f"{REMOVED}@"),
    (re.compile(r"(?<=://)(hooks\.slack\.com|[\w.]*discord(?:app)?\.com/api/webhooks)/[^\s\"'<>]+"), rf"\1/{REMOVED}"),
    (re.compile(r"(?i)(cookie\\?[\"']?\s*[:=]\s*\\?[\"']?)[^\r\n\"'\\]+"), rf"\1{REMOVED}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]+"), rf"\1 {REMOVED}"),
    # As a list or a mapping, whose texts may be escaped, as a text in quotes, which may be escaped, and as bare words.
    (re.compile(rf"(?i)({_NAMES}[\w-]*\\?[\"']?\s*[=:]\s*)\[(?:[^\[\]]|\[[^\]]*\])*\]?"), rf"\1[{REMOVED}]"),
    (re.compile(r"(?i)(tokens\\?[\"']?\s*[=:]\s*)\[\s*\\?[\"'][^\[\]]*\]?"), rf"\1[{REMOVED}]"),
    (re.compile(rf"(?i)({_NAMES}[\w-]*\\?[\"']?\s*[=:]\s*){{(?:[^{{}}]|{{[^}}]*}})*}}?"), rf"\1{{{REMOVED}}}"),
    (
        re.compile(rf"(?i)({_NAMES}[\w-]*\\?[\"']?\s*[=:]\s*\\?([\"']))(?:(?!\\?\2).)*"),
        rf"\1{REMOVED}",
    ),
    # Of words in a row, which only passwords are, all that stand in the line.
    (re.compile(r"(?i)(pass(?:word|wd|phrase)?[\w-]*[ \t]*[=:][ \t]*)(?![\"'\\\[])[^\r\n,;&\"'}\\]+"), rf"\1{REMOVED}"),
    (re.compile(rf"(?i)({_NAMES}[\w-]*\s*[=:]\s*)(?![\"'\\\[])[^\s,;&\"'}}\\]+"), rf"\1{REMOVED}"),
    (re.compile(r"\b(?:elastic_|whsec_|hf_|sk-|gh[pousr]_|xox[a-z]-|AKIA|eyJ)[A-Za-z0-9_=+/.-]{8,}"), REMOVED),
    # Keys without a sign of their own: long, of letters and digits.
    (re.compile(r"(?<![A-Za-z0-9_-])(?=[A-Za-z_-]*[0-9])(?=[0-9_-]*[A-Za-z])[A-Za-z0-9_-]{40,}={0,2}"), REMOVED),
)


class Redaction:
    """Removes these secrets, however they are written, and what looks like one."""

    def __init__(self, known: Iterable[str]) -> None:
        forms = {form for secret in known for form in _forms(secret) if len(form) >= SHORTEST}
        self._known = sorted(forms, key=len, reverse=True)

    def text(self, text: str) -> str:
        for form in self._known:
            text = text.replace(form, REMOVED)
        for pattern, instead in _SHAPES:
            text = pattern.sub(instead, text)
        return text


def _forms(secret: str) -> set[str]:
    """How a secret may be written: as it is, a line of it, in JSON, in a URL."""
    lines = {secret, *(line.strip() for line in secret.splitlines())}
    return {form for line in lines for form in (line, json.dumps(line)[1:-1], quote(line), quote(line, safe=""))}
