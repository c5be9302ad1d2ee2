"""Makes docs/protocol.md and docs/settings.md from the code: ``python tests/support/pages.py`` writes them."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from kueue import config, model, settings  # noqa: E402  the path must be known first
from kueue.protocol import messages  # noqa: E402

WARNING = "<!-- Made by tests/support/pages.py from the code; do not edit. -->"
BLOCKS = {
    "client → server": "Client to server",
    "server → client": "Server to client",
    "worker → server": "Worker to server",
    "server → worker": "Server to worker",
}


def prose(text):
    """A docstring as Markdown: one kind of backticks, paragraphs on one line each."""
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    paragraphs = [re.sub(r"\n\s*(?!-)", " ", part.strip()) for part in text.split("\n\n")]
    return "\n\n".join(re.sub(r"\n\s*-", "\n-", part) for part in paragraphs)


def cell(text):
    return " ".join(prose(text).split()).replace("|", "\\|")


def classes(module):
    """(line, class, docstring, [(field, type, default, meaning)]) of each class of the module, in order."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = []
        for position, statement in enumerate(node.body):
            if not isinstance(statement, ast.AnnAssign):
                continue
            after = node.body[position + 1] if position + 1 < len(node.body) else None
            meaning = ""
            if (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                meaning = after.value.value
            default = "" if statement.value is None else ast.unparse(statement.value)
            fields.append((statement.target.id, ast.unparse(statement.annotation), default, meaning))
        yield node.lineno, node.name, ast.get_docstring(node) or "", fields


def aliases(module):
    """(name, definition, docstring) of each type alias."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            yield node.target.id, ast.unparse(node.value)


def described(name, docstring, fields):
    lines = [f"### {name}", "", prose(docstring), ""]
    if fields:
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        for field, kind, default, meaning in fields:
            shown = f"`{default}`".replace("|", "\\|") if default else ""
            kind_shown = f"`{kind}`".replace("|", "\\|")
            lines.append(f"| `{field}` | {kind_shown} | {shown} | {cell(meaning)} |")
        lines.append("")
    return lines


def protocol_page():
    source = Path(messages.__file__).read_text(encoding="utf-8").splitlines()
    heads = [
        (number, title)
        for number, line in enumerate(source, 1)
        for mark, title in BLOCKS.items()
        if line.startswith(f"# === {mark} =")
    ]
    assert [title for _, title in heads] == list(BLOCKS.values()), "a block of messages has lost its head line"
    lines = ["# The protocol", "", WARNING, "", prose(messages.__doc__), ""]
    lines += [
        (
            f"This is protocol number {messages.PROTOCOL}. A server reads frames of at most {messages.FRAME_LIMIT // 2**20} MiB, "
            "and only from peers that have proven the secret in the TLS handshake or their uid at the local socket; "
            f"a welcome fits into {messages.FRAME_LIMIT_BEFORE_HELLO // 2**10} KiB, and more is not read before it."
        ),
        "",
        "In JSON a tuple is an array, `bytes` are base64, and a field that has its default may be left out.",
        "",
    ]
    values, used = [], set()
    pending = list(heads)
    for line, name, docstring, fields in classes(messages):
        if name == "Message":
            continue
        while pending and line > pending[0][0]:
            lines += [f"## {pending.pop(0)[1]}", ""]
        if issubclass(getattr(messages, name), messages.Message):
            lines += described(name, docstring, fields)
            used.add(name)
        else:
            values += described(name, docstring, fields)
    spoken = {each.__name__ for each in messages.Message.__subclasses__() if each.__module__ == messages.__name__}
    assert used == spoken, f"messages that are not described: {spoken ^ used}"
    lines += ["## Values inside messages", ""]
    for module in (messages, model):
        for name, definition in aliases(module):
            if not name.startswith(("From", "To")):
                lines += [f"- `{name}` is `{definition}`."]
    lines += ["", *values]
    for _, name, docstring, fields in classes(model):
        kind = getattr(model, name)
        if hasattr(kind, "__struct_fields__") and name != "NodeRecord":
            tag = kind.__struct_config__.tag
            lines += described(name, f"{docstring}\n\nIts `type` is `{tag}`." if tag else docstring, fields)
    return "\n".join(lines).rstrip("\n") + "\n"


def settings_page():
    lines = ["# Settings", "", WARNING, ""]
    lines += [
        (
            "One file for all programs: `~/.config/kueue/config.toml`, or `$XDG_CONFIG_HOME/kueue/config.toml`, or what "
            f"`{config.PATH_VARIABLE}` or `--config` names. The first `kueue` command, or `kueue_server` in a terminal, makes it, readable by you alone, with a "
            "random secret. It holds the secret, so other users must not be able to read it: `chmod 600`."
        ),
        "",
        (
            "A flag wins over the environment, that over the file, that over the default. A missing key has its default. A "
            "program checks the sections it uses; a mistake names key, file and line, an unknown key is a warning."
        ),
        "",
        "| variable | wins over |",
        "|---|---|",
        f"| `{config.PATH_VARIABLE}` | the place of the file |",
        *(f"| `{name}` | `{key}` |" for name, key in config.OVERRIDES.items()),
        "",
    ]
    for section in settings.SECTIONS.values():
        lines += [f"## [{section.name}]", "", section.__doc__, ""]
        lines += ["| key | kind | default | unit | meaning |", "|---|---|---|---|---|"]
        for key, known in section.settings.items():
            default = "must be set" if known.required else f"`{settings.toml(known.default)}`"
            if key == "shared_secret":
                default = "64 random characters in a new file"
            bounds = ""
            if known.least:
                bounds += f" At least {known.least}."
            if known.most is not None and known.most < settings.U64_MAX:
                bounds += f" At most {known.most}."
            meaning = f"{known.meaning}.{bounds}".replace("|", "\\|").replace("<uid>", "`uid`")
            lines.append(f"| `{key}` | {known.kind_name.removeprefix('a ')} | {default} | {known.unit} | {meaning} |")
        lines.append("")
    lines += [f"## [{settings.GLOBAL_RESOURCES}]", "", f"{settings.GLOBAL_RESOURCES_MEANING}.", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


PAGES = {"docs/protocol.md": protocol_page, "docs/settings.md": settings_page}


if __name__ == "__main__":
    for file, page in PAGES.items():
        (ROOT / file).write_text(page(), encoding="utf-8")
        print(file)
