"""Where figures are shown: how the settings say it, and what is refused."""

from __future__ import annotations

import pytest

from kueue import config, units
from kueue.errors import ConfigError, UserError


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1:11237", ("127.0.0.1", 11237)),
        (" localhost:0 ", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        (":9100", ("", 9100)),
    ],
)
def test_a_place_is_a_host_and_a_port(text, place):
    assert units.parse_bind(text) == place


@pytest.mark.parametrize(
    "text",
    ["", ":", "11237", "localhost", "localhost:", "a:65536", "a:-1", "a:1x", "a:\uff11", "::1:9100", "[::1]", "[]:1", "[a:1",
     "a b:1", "http://a:1", "a/b:1", "user@a:1", "a:0000001"],
)  # fmt: skip
def test_what_is_no_place_is_refused_with_an_example(text):
    with pytest.raises(UserError) as caught:
        units.parse_bind(text)
    assert ":9100" in caught.value.hint


@pytest.fixture
def load(tmp_path):
    def load(*lines: str) -> config.Config:
        path = tmp_path / "config.toml"
        path.write_text('[common_settings]\nshared_secret = "0123456789abcdefghijklmnop"\n' + "\n".join(lines) + "\n")
        path.chmod(0o600)
        return config.load(str(path), environ={"HOME": str(tmp_path)})

    return load


def test_the_server_is_shown_to_its_own_machine_and_a_worker_to_nobody_unless_told(load):
    found = load().metrics
    assert (found.server_bind, found.worker_bind, found.server_textfile) == ("127.0.0.1:11237", "", "")


def test_empty_is_nowhere_and_blanks_do_not_count(load):
    found = load("[metrics_settings]", 'server_bind = "  "', 'worker_bind = " :9100 "').metrics
    assert (found.server_bind, found.worker_bind) == ("", ":9100")


@pytest.mark.parametrize("value", ["9100", "::1:9100", "here:there"])
def test_a_mistake_names_file_line_and_key(load, value):
    with pytest.raises(ConfigError, match=r"config\.toml, line 5: metrics_settings\.worker_bind must be like"):
        load("[metrics_settings]", 'server_bind = ""', f'worker_bind = "{value}"')


@pytest.mark.parametrize("value", ["kueue.prom", "/var/lib/kueue.txt", "."])
def test_node_exporter_must_be_able_to_find_the_file(load, value):
    with pytest.raises(ConfigError, match=r"line 4: metrics_settings\.server_textfile must be an absolute path"):
        load("[metrics_settings]", f'server_textfile = "{value}"')
